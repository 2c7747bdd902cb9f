"""Types and sizes of what is saved: few, and the same in every step, so one object stands for all that are alike."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Hashable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from smpkit.torch.offload.arena import ContiguousSpec
from smpkit.torch.offload.saved_storage import Group, SavedStorage, check_version

if TYPE_CHECKING:
    from typing_extensions import Self

    from smpkit.torch.offload.engine import ActivationEngine

__all__ = ["AUTOCAST_DTYPES", "HookContext", "SpecCache"]

AUTOCAST_DTYPES: Final = frozenset({torch.float16, torch.bfloat16})
"""Types that autocast makes of parameters."""
_PLAIN_DTYPES: Final = AUTOCAST_DTYPES | {
    *(torch.float32, torch.float64),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
}
"""Types of which no tensor is quantized or conjugated."""
_MAX_SIZES: Final = 1024


class SpecCache:
    """Interns specs, so that lists of them, which are compared for every layer, compare by identity."""

    def __init__(self) -> None:
        self.always_offloadable: dict[torch.dtype, dict[torch.Size, ContiguousSpec]] = {
            dtype: {} for dtype in _PLAIN_DTYPES
        }
        """By size, of the types of which every tensor may leave."""
        self._others: dict[torch.dtype, dict[torch.Size, ContiguousSpec]] = {}

    def check_half_precision(self, *, may_be_casts: bool) -> None:
        """Check fp16 and bf16 tensors from now on if they may be autocast copies of parameters."""
        there, here = (
            (self.always_offloadable, self._others) if may_be_casts else (self._others, self.always_offloadable)
        )
        for dtype in AUTOCAST_DTYPES & there.keys():
            here[dtype] = there.pop(dtype)

    def spec(self, dtype: torch.dtype, size: torch.Size) -> ContiguousSpec:
        """Return the spec of this dtype and size."""
        specs_by_size = self.always_offloadable.get(dtype)
        if specs_by_size is None:
            specs_by_size = self._others.setdefault(dtype, {})
        if len(specs_by_size) >= _MAX_SIZES:  # the sizes of one's data vary without end
            specs_by_size.clear()
        return specs_by_size.setdefault(size, (dtype, size))


# --- The hooks that autograd calls: what is saved becomes a handle, and a handle becomes the saved tensor again -------
# This runs for every saved tensor, so it is written to be short in time: no call that is not needed, no object that is
# not kept.


# Whether this runs inside `torch.func.jvp`, `vmap` and the like. Those take every operation for the user's: a copy
# would be one that changes a captured tensor, which they refuse.
_transforms_are_active: Final = torch._C._are_functorch_transforms_active
_NOTHING: Final = contextlib.nullcontext()
_UINT8: Final = torch.uint8
_STRIDED: Final = torch.strided
_SPARSE_USE: Final = 2
"""A view that covers no more than 1/2 of its storage is gathered, so that it does not take the storage with it."""

SavedTensorHandle = tuple[Any, ...]
"""Of what left `(saved, group)`, for another view of it than the first `(saved, group, dtype, size, stride, offset)`;
`(tensor, version_alias, version)` of what stayed."""


class HookContext(contextlib.AbstractContextManager["HookContext"]):
    """Offloads saved tensors while it is entered (a context of saved-tensor hooks).

    Args:
        engine: what moves them.
        name: of the layer.
        group_bytes: groups end when they are so large; None: all is one group.
        expected: without `group_bytes`, how many storages are awaited before the first leave; one by one after that.
    """

    def __init__(self, engine: ActivationEngine, name: str, group_bytes: int | None = None, expected: int = 1) -> None:
        self._engine = engine
        self._name = name
        self._group_bytes = group_bytes
        self._group: Group | None = None
        self._unsent: list[SavedStorage] = []
        self._num_bytes = 0
        self._max_bytes, self._max_storages = (
            (sys.maxsize, expected) if group_bytes is None else (group_bytes, sys.maxsize)
        )
        self._num_sent = 0
        self._device = engine.link.device
        self._empty = engine.empty
        self._index = self._empty.get_device()
        self._hooks: saved_tensors_hooks | None = None
        # Looked up once, and not for every tensor.
        self._storages, self._stream = engine.storages, engine.link.stream
        self._parameters = engine.parameters
        self._specs, self._spec = engine.specs.always_offloadable, engine.specs.spec
        self._min_bytes = max(1, engine.min_bytes)

    def __enter__(self) -> Self:
        if not _hooks_of_others_are_active():
            self._hooks = saved_tensors_hooks(self._pack, self._unpack)
            self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._hooks is not None:
            self._hooks.__exit__()
            self._hooks = None
        self.next_layer(self._name)
        if self._group_bytes is None and self._num_sent:
            self._engine.num_inputs_of[self._name] = self._num_sent

    def next_layer(self, name: str) -> None:
        """End the group: what is saved from now on belongs to another layer."""
        if self._group is not None:
            self.flush()
            self._group = None
        self._name = name

    def flush(self) -> None:
        """Send what waits."""
        waiting, self._unsent, self._num_bytes = self._unsent, [], 0
        if waiting and self._group is not None:
            if self._group_bytes is None:
                self._max_storages = 1
            self._num_sent += len(waiting)
            with _outside_transforms():
                self._engine.send(self._group, waiting)

    # --- forward -----------------------------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> SavedTensorHandle:
        """Return a handle that does not keep the tensor on the device."""
        # What nearly all tensors need is written out here: a call for each step would cost as much as the steps.
        if (
            type(tensor) is not Tensor
            or tensor.layout is not _STRIDED
            or tensor.get_device() != self._index
            or tensor.is_neg()
            or tensor.is_nested
            or ((specs_by_size := self._specs.get(tensor.dtype)) is None and self._must_stay(tensor))
        ):
            return self._keep_here(tensor)
        storage = tensor.untyped_storage()
        key = storage._cdata
        saved = self._storages.get(key)
        if saved is not None and saved.storage() is storage and saved.version == tensor._version:
            return self._pack_again(tensor, storage, saved)
        num_bytes = storage.nbytes()
        if num_bytes != tensor.nbytes or not tensor.is_contiguous() or num_bytes < self._min_bytes:
            return self._pack_view(tensor, storage)
        base = tensor._base
        if (
            (key in self._parameters and self._parameters[key]() is storage)
            or (base is not None and type(base) is not Tensor)  # this and the next are `_cannot_leave`
            or _transforms_are_active()
            or (_is_capturing() if self._index >= 0 else not tensor.is_cpu)
        ):
            return self._keep_here(tensor)
        version_alias = tensor.detach()
        size = tensor.shape
        spec = (specs_by_size.get(size) if specs_by_size else None) or self._spec(tensor.dtype, size)
        group = self._group or self._begin_group()
        saved = SavedStorage(key, storage, version_alias, version_alias, spec, num_bytes, self._stream(), group.index)
        self._storages[key] = saved
        group.storages.append(saved)
        waiting = self._unsent
        waiting.append(saved)
        self._num_bytes += num_bytes
        if self._num_bytes >= self._max_bytes or len(waiting) >= self._max_storages:
            self._send()
        return saved, group

    def _pack_again(self, tensor: Tensor, storage: torch.UntypedStorage, saved: SavedStorage) -> SavedTensorHandle:
        """Refer to a storage that left before, or is about to."""
        # Asked first: a new group would put loads and stamps into the graph that is captured.
        if (self._index >= 0 and _is_capturing()) or not (group := self._group or self._begin_group()).add(saved):
            return self._pack_view(tensor, storage)
        saved.num_handles += 1
        saved.num_pending += 1
        if saved.spec == (tensor.dtype, tensor.size()) and tensor.is_contiguous():
            return saved, group
        return saved, group, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()

    def _pack_view(self, tensor: Tensor, storage: torch.UntypedStorage) -> SavedTensorHandle:
        """Take over a storage of which the tensor is a view, or a copy of the view."""
        key, num_bytes = storage._cdata, storage.nbytes()
        if (key in self._parameters and self._parameters[key]() is storage) or self._cannot_leave(tensor):
            return self._keep_here(tensor)
        if tensor.nbytes * _SPARSE_USE <= num_bytes:
            return self._pack_sparse_view(tensor, storage)
        if num_bytes < self._min_bytes or (self._index >= 0 and _is_capturing()):
            return self._keep_here(tensor)
        version_alias = tensor.detach()
        version_alias.data = self._empty
        data = torch.empty(0, dtype=_UINT8, device=self._device).set_(storage)
        spec = self._spec(_UINT8, data.size())
        saved, group = self._register(key, storage, version_alias, data, spec, num_bytes)
        return saved, group, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()

    def _pack_sparse_view(self, tensor: Tensor, storage: torch.UntypedStorage) -> SavedTensorHandle:
        """Take a copy of a view that is a small part of its storage, which may then go."""
        key = (storage._cdata, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())
        saved = self._storages.get(key)
        if (
            saved is not None
            and saved.storage() is storage
            and saved.version == tensor._version
            and not (self._index >= 0 and _is_capturing())
            and (group := self._group or self._begin_group()).add(saved)
        ):
            saved.num_handles += 1
            saved.num_pending += 1
            return saved, group
        alias = tensor.detach()
        gathered = alias.clone(memory_format=torch.contiguous_format)
        alias.data = self._empty
        num_bytes = gathered.numel() * gathered.element_size()
        if num_bytes < self._min_bytes or (self._index >= 0 and _is_capturing()):
            return gathered, alias, alias._version
        return self._register(key, storage, alias, gathered, self._spec(tensor.dtype, tensor.size()), num_bytes)

    def _register(
        self,
        key: Hashable,
        storage: torch.UntypedStorage,
        version_alias: Tensor,
        data: Tensor,
        spec: ContiguousSpec,
        num_bytes: int,
    ) -> tuple[SavedStorage, Group]:
        """Hold data, to be known when it is saved again, and send it now or with its group."""
        group = self._group or self._begin_group()
        saved = SavedStorage(key, storage, version_alias, data, spec, num_bytes, self._stream(), group.index)
        self._storages[key] = saved
        group.storages.append(saved)
        self._unsent.append(saved)
        self._num_bytes += saved.num_bytes
        if self._num_bytes >= self._max_bytes or len(self._unsent) >= self._max_storages:
            self._send()
        return saved, group

    def _send(self) -> None:
        """Send what waits, as that is enough."""
        if self._group_bytes is None:
            self.flush()
        else:
            self.next_layer(self._name)

    def _keep_here(self, tensor: Tensor) -> SavedTensorHandle:
        """Leave a tensor where it is, as autograd itself would keep it."""
        with _outside_transforms():
            alias = tensor.detach()
        return alias, alias, alias._version

    def _must_stay(self, tensor: Tensor) -> bool:
        """Return whether a tensor of a type that is not ordinary here is more, or less, than its bytes."""
        return tensor.is_conj() or tensor.is_quantized or (tensor.dtype in AUTOCAST_DTYPES and self._is_cast(tensor))

    def _is_cast(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter in another type, or a view of that.

        Autocast keeps such until it ends, so to send one away frees nothing in forward, and takes as long as a weight's
        copy. Of a parameter that is not trained it keeps none, and no graph tells where that cast came from: it leaves.
        """
        base = tensor._base
        made = (tensor if base is None else base).grad_fn
        if made is None or made.name() != "ToCopyBackward0":
            return False
        source = getattr(made.next_functions[0][0], "variable", None)
        if source is None:
            return False
        storage = source.untyped_storage()
        known = self._parameters.get(storage._cdata)
        return known is not None and known() is storage

    def _cannot_leave(self, tensor: Tensor) -> bool:
        """Return whether a tensor is nothing that could be copied and be given up.

        Views of parameters that the model does not know stay: FSDP makes such for a layer's forward, and resizes their
        storage to nothing after it, be it copied or not.
        """
        base = tensor._base
        return (
            (base is not None and type(base) is not Tensor)
            or (self._index < 0 and not tensor.is_cpu)  # -1 is the index of the CPU, and of "meta"
            or _transforms_are_active()
        )

    def _begin_group(self) -> Group:
        with _outside_transforms():
            group = self._group = self._engine.new_group(self._name)
        return group

    # --- backward ----------------------------------------------------------------------------------------------------

    def _unpack(self, handle: SavedTensorHandle) -> Tensor:
        """Return the saved tensor."""
        if len(handle) == 3:
            tensor, version_alias, version = handle
            if version_alias._version != version:
                check_version(version_alias, version, f"`{self._name}`")
            return cast("Tensor", tensor)
        saved, group = handle[:2]
        if saved.version_alias._version != saved.version:
            check_version(saved.version_alias, saved.version, group.label)
        restored: Tensor = self._engine.restore(group, saved)
        if len(handle) > 2:
            _, _, dtype, size, stride, offset = handle
            storage = restored.untyped_storage()
            restored = torch.empty(0, dtype=dtype, device=self._device).set_(storage, offset, size, stride)
        saved.num_pending -= 1
        if saved.num_pending <= 0:
            self._engine.release(saved)
        return restored


def _hooks_of_others_are_active() -> bool:
    """Return whether hooks of somebody else are active.

    Inside a checkpointed call they are torch's: it drops them and makes them again in backward. There, as in anything
    that backward runs, a copy to the host would be work for nothing.
    """
    top: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    owner = None if top is None else getattr(top[0], "__self__", top)
    return not (owner is None or isinstance(owner, HookContext)) or torch._C._current_graph_task_id() != -1


def _outside_transforms() -> AbstractContextManager[object]:
    """Return what hides the transforms from the engine's own work."""
    return torch._C._DisableFuncTorch() if _transforms_are_active() else _NOTHING


def _is_capturing() -> bool:
    """Return whether a CUDA graph is being captured: its replays would read memory that is somebody else's by then."""
    return torch.cuda.is_current_stream_capturing()
