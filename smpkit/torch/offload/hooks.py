"""The saved-tensor hooks: `pack` turns what autograd saves into a handle, `unpack` turns the handle into the tensor.

They run for every saved tensor, so they are written for speed: no call that is not needed, no object that is not kept.
What may leave is decided here (`_pack` and below); moving it is the engine's work.
"""

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

from smpkit.torch.core import devices
from smpkit.torch.offload.arena import ContiguousSpec
from smpkit.torch.offload.saved_storage import Group, SavedStorage, check_version

if TYPE_CHECKING:
    from typing_extensions import Self

    from smpkit.torch.offload.engine import ActivationEngine

__all__ = ["AUTOCAST_DTYPES", "HookContext", "SpecCache"]

AUTOCAST_DTYPES: Final = frozenset({torch.float16, torch.bfloat16})
"""Types that autocast casts parameters to."""
_PLAIN_DTYPES: Final = AUTOCAST_DTYPES | {
    *(torch.float32, torch.float64),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
}
"""Types of which no tensor is quantized or conjugated."""
_MAX_SIZES: Final = 1024
_NOTHING: Final = contextlib.nullcontext()
_UINT8: Final = torch.uint8
_STRIDED: Final = torch.strided
_SPARSE_USE: Final = 2
"""A view that covers at most 1/2 of its storage is copied out of it, so that the rest of the storage need not leave."""

# Whether this runs inside `torch.func.jvp`, `vmap` and the like. They take every operation for the user's: they would
# refuse a copy of ours, because it changes a captured tensor.
_transforms_are_active: Final = torch._C._are_functorch_transforms_active

SavedTensorHandle = tuple[Any, ...]
"""`(saved, group)` for what left; `(saved, group, dtype, size, stride, offset)` for another view of it than the first;
`(tensor, version_alias, version)` for what stayed."""


class SpecCache:
    """Interns specs, so that lists of them, which are compared for every layer, compare by identity."""

    def __init__(self) -> None:
        self.always_offloadable: dict[torch.dtype, dict[torch.Size, ContiguousSpec]] = {
            dtype: {} for dtype in _PLAIN_DTYPES
        }
        """By size, for the types of which every tensor may leave."""
        self._others: dict[torch.dtype, dict[torch.Size, ContiguousSpec]] = {}

    def check_half_precision(self, *, may_be_casts: bool) -> None:
        """Check fp16 and bf16 tensors from now on if they may be autocast copies of parameters."""
        if may_be_casts:
            source, target = self.always_offloadable, self._others
        else:
            source, target = self._others, self.always_offloadable
        for dtype in AUTOCAST_DTYPES & source.keys():
            target[dtype] = source.pop(dtype)

    def spec(self, dtype: torch.dtype, size: torch.Size) -> ContiguousSpec:
        """Return the spec of this dtype and size."""
        specs_by_size = self.always_offloadable.get(dtype)
        if specs_by_size is None:
            specs_by_size = self._others.setdefault(dtype, {})
        if len(specs_by_size) >= _MAX_SIZES:  # sizes of data can vary without end: do not grow without bound
            specs_by_size.clear()
        return specs_by_size.setdefault(size, (dtype, size))


class HookContext(contextlib.AbstractContextManager["HookContext"]):
    """Offloads saved tensors while it is entered (a context of saved-tensor hooks).

    Args:
        engine: what moves them.
        name: of the layer.
        group_bytes: a group ends when it is this large; None: all is one group.
        expected: without `group_bytes`, how many storages to collect before sending them together; later ones are sent
            one by one.
    """

    def __init__(self, engine: ActivationEngine, name: str, group_bytes: int | None = None, expected: int = 1) -> None:
        self._engine = engine
        self._name = name
        self._group_bytes = group_bytes
        self._group: Group | None = None
        self._unsent: list[SavedStorage] = []
        self._num_bytes = 0
        self._max_bytes = sys.maxsize if group_bytes is None else group_bytes
        self._max_storages = expected if group_bytes is None else sys.maxsize
        self._num_sent = 0
        self._device = engine.link.device
        self._empty = engine.empty
        self._index = self._empty.get_device()
        self._hooks: saved_tensors_hooks | None = None
        # Looked up once instead of for every tensor. What a graph captures stays: its replays would read memory that
        # others have by then.
        self._is_capturing = _never if self._index < 0 else devices.capture_query(self._device)
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
        """End the group: what is saved from now on belongs to the layer `name`."""
        if self._group is not None:
            self.flush()
            self._group = None
        self._name = name

    def flush(self) -> None:
        """Send what was saved since the last time."""
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
        # The path of nearly all tensors is written out here: a call for each step would cost as much as the steps.
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
            or (base is not None and type(base) is not Tensor)  # this and the next two lines are `_cannot_leave`
            or _transforms_are_active()
            or (self._is_capturing() if self._index >= 0 else not tensor.is_cpu)
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
        self._num_bytes = waiting_bytes = self._num_bytes + num_bytes
        if waiting_bytes >= self._max_bytes or len(waiting) >= self._max_storages:
            self._send()
        return saved, group

    def _pack_again(self, tensor: Tensor, storage: torch.UntypedStorage, saved: SavedStorage) -> SavedTensorHandle:
        """Refer to a storage that left before, or is about to."""
        # Before `_begin_group`, which would issue loads and record events: a captured graph must not contain them.
        if (self._index >= 0 and self._is_capturing()) or not (group := self._group or self._begin_group()).add(saved):
            return self._pack_view(tensor, storage)
        saved.num_handles += 1
        saved.num_pending += 1
        if saved.spec == (tensor.dtype, tensor.size()) and tensor.is_contiguous():
            return saved, group
        return saved, group, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()

    def _pack_view(self, tensor: Tensor, storage: torch.UntypedStorage) -> SavedTensorHandle:
        """Offload the storage of which the tensor is a view, or a copy of the view if it is small."""
        key, num_bytes = storage._cdata, storage.nbytes()
        if (key in self._parameters and self._parameters[key]() is storage) or self._cannot_leave(tensor):
            return self._keep_here(tensor)
        if tensor.nbytes * _SPARSE_USE <= num_bytes:
            return self._pack_sparse_view(tensor, storage)
        if num_bytes < self._min_bytes or (self._index >= 0 and self._is_capturing()):
            return self._keep_here(tensor)
        version_alias = tensor.detach()
        version_alias.data = self._empty  # keeps the version counter without keeping the memory
        data = torch.empty(0, dtype=_UINT8, device=self._device).set_(storage)
        spec = self._spec(_UINT8, data.size())
        saved, group = self._register(key, storage, version_alias, data, spec, num_bytes)
        return saved, group, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()

    def _pack_sparse_view(self, tensor: Tensor, storage: torch.UntypedStorage) -> SavedTensorHandle:
        """Offload a copy of a view that is a small part of its storage, so that the storage can be freed."""
        key = (storage._cdata, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())
        saved = self._storages.get(key)
        if (
            saved is not None
            and saved.storage() is storage
            and saved.version == tensor._version
            and not (self._index >= 0 and self._is_capturing())
            and (group := self._group or self._begin_group()).add(saved)
        ):
            saved.num_handles += 1
            saved.num_pending += 1
            return saved, group
        alias = tensor.detach()
        gathered = alias.clone(memory_format=torch.contiguous_format)
        alias.data = self._empty
        num_bytes = gathered.numel() * gathered.element_size()
        if num_bytes < self._min_bytes or (self._index >= 0 and self._is_capturing()):
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
        """Add data to the group, and send the group if it is complete."""
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
        """Send a group that is large enough."""
        if self._group_bytes is None:
            self.flush()
        else:
            self.next_layer(self._name)

    def _keep_here(self, tensor: Tensor) -> SavedTensorHandle:
        """Keep a tensor on the device, as autograd itself would."""
        with _outside_transforms():
            alias = tensor.detach()
        return alias, alias, alias._version

    def _must_stay(self, tensor: Tensor) -> bool:
        """Return whether a tensor of an uncommon type is not just its bytes, or is a cast of a parameter."""
        return tensor.is_conj() or tensor.is_quantized or (tensor.dtype in AUTOCAST_DTYPES and self._is_cast(tensor))

    def _is_cast(self, tensor: Tensor) -> bool:
        """Return whether a tensor is autocast's copy of a trained parameter, or a view of that."""
        # Autocast caches these copies until it ends, so sending one frees nothing in forward and costs the copy of a
        # whole weight. Casts of frozen parameters are not cached, and have no graph that leads to the parameter: they
        # leave like activations.
        base = tensor._base
        cast_node = (tensor if base is None else base).grad_fn
        if cast_node is None or cast_node.name() != "ToCopyBackward0":
            return False
        source = getattr(cast_node.next_functions[0][0], "variable", None)
        if source is None:
            return False
        storage = source.untyped_storage()
        known = self._parameters.get(storage._cdata)
        return known is not None and known() is storage

    def _cannot_leave(self, tensor: Tensor) -> bool:
        """Return whether a tensor cannot be copied, or its memory not be freed by us."""
        base = tensor._base
        return (
            # A view of a parameter or of a tensor subclass. FSDP makes parameters that the model does not know for a
            # layer's forward and resizes their storage to nothing afterwards, whether we have copied it or not.
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
        num_parts = len(handle)
        if num_parts == 3:
            tensor, version_alias, version = handle
            if version_alias._version != version:
                check_version(version_alias, version, f"`{self._name}`")
            return cast("Tensor", tensor)
        saved, group = handle[:2]
        if saved.version_alias._version != saved.version:
            check_version(saved.version_alias, saved.version, group.label)
        restored: Tensor = self._engine.restore(group, saved)
        if num_parts > 2:
            _, _, dtype, size, stride, offset = handle
            storage = restored.untyped_storage()
            restored = torch.empty(0, dtype=dtype, device=self._device).set_(storage, offset, size, stride)
        saved.num_pending -= 1
        if saved.num_pending <= 0:
            self._engine.release(group, saved)
        return restored


def _hooks_of_others_are_active() -> bool:
    """Return whether other saved-tensor hooks than ours are active, or a backward runs."""
    # Inside a checkpointed call the hooks are torch's: what they save is dropped and recomputed in backward. There, and
    # in anything that backward runs, a copy to the host would be useless. torch has no public way to ask for either.
    top: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    owner = None if top is None else getattr(top[0], "__self__", top)
    return not (owner is None or isinstance(owner, HookContext)) or torch._C._current_graph_task_id() != -1


def _outside_transforms() -> AbstractContextManager[object]:
    """Return a context in which `torch.func` transforms do not see the engine's own operations."""
    return torch._C._DisableFuncTorch() if _transforms_are_active() else _NOTHING


def _never() -> bool:
    return False
