"""The hooks that autograd calls: what is saved becomes a handle, and a handle becomes the saved tensor again.

This runs for every saved tensor, so it is written to be short in time: no call that is not needed, no object that is
not kept.
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

from smpkit.torch.offload.arena import Form
from smpkit.torch.offload.forms import CASTS
from smpkit.torch.offload.record import Group, Record, check_version

if TYPE_CHECKING:
    from typing_extensions import Self

    from smpkit.torch.offload.engine import Engine

__all__ = ["Scope"]

# Whether this runs inside `torch.func.jvp`, `vmap` and the like. Those take every operation for the user's: a copy
# would be one that changes a captured tensor, which they refuse.
_transforms_are_active: Final = torch._C._are_functorch_transforms_active
_NOTHING: Final = contextlib.nullcontext()
_UINT8: Final = torch.uint8
_STRIDED: Final = torch.strided
_SPARSE_USE: Final = 2
"""A view that covers no more than 1/2 of its storage is gathered, so that it does not take the storage with it."""

Handle = tuple[Any, ...]
"""Of what left `(record, group)`, for another view of it than the first `(record, group, dtype, size, stride, offset)`;
`(tensor, witness, version)` of what stayed."""


class Scope(contextlib.AbstractContextManager["Scope"]):
    """Where saved tensors go while it is entered.

    Args:
        engine: what moves them.
        name: of the layer.
        group_bytes: groups end when they are so large; None: all is one group.
        expected: without `group_bytes`, how many storages are awaited before the first leave; one by one after that.
    """

    def __init__(self, engine: Engine, name: str, group_bytes: int | None = None, expected: int = 1) -> None:
        self._engine = engine
        self._name = name
        self._group_bytes = group_bytes
        self._group: Group | None = None
        self._waiting: list[Record] = []
        self._num_bytes = 0
        self._most_bytes, self._most = (sys.maxsize, expected) if group_bytes is None else (group_bytes, sys.maxsize)
        self._num_sent = 0
        self._device = engine.link.device
        self._empty = engine.nothing
        self._index = self._empty.get_device()
        self._hooks: saved_tensors_hooks | None = None
        # Looked up once, and not for every tensor.
        self._records, self._stream = engine.records, engine.link.stream
        self._parameters = engine.parameters
        self._forms, self._form = engine.forms.ordinary, engine.forms.form
        self._least_bytes = max(1, engine.min_bytes)

    def __enter__(self) -> Self:
        if not _others_save():
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
            self._engine.boundary_sizes[self._name] = self._num_sent

    def next_layer(self, name: str) -> None:
        """End the group: what is saved from now on belongs to another layer."""
        if self._group is not None:
            self.flush()
            self._group = None
        self._name = name

    def flush(self) -> None:
        """Send what waits."""
        waiting, self._waiting, self._num_bytes = self._waiting, [], 0
        if waiting and self._group is not None:
            if self._group_bytes is None:
                self._most = 1
            self._num_sent += len(waiting)
            with _outside_transforms():
                self._engine.send(self._group, waiting)

    # --- forward -----------------------------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> Handle:
        """Return a handle that does not keep the tensor on the device."""
        # What nearly all tensors need is written out here: a call for each step would cost as much as the steps.
        if (
            type(tensor) is not Tensor
            or tensor.layout is not _STRIDED
            or tensor.get_device() != self._index
            or tensor.is_neg()
            or tensor.is_nested
            or ((alike := self._forms.get(tensor.dtype)) is None and self._must_stay(tensor))
        ):
            return self._stay(tensor)
        storage = tensor.untyped_storage()
        key = storage._cdata
        record = self._records.get(key)
        if record is not None and record.storage() is storage and record.version == tensor._version:
            return self._save_again(tensor, storage, record)
        num_bytes = storage.nbytes()
        if num_bytes != tensor.nbytes or not tensor.is_contiguous() or num_bytes < self._least_bytes:
            return self._take_part(tensor, storage)
        base = tensor._base
        if (
            (key in self._parameters and self._parameters[key]() is storage)
            or (base is not None and type(base) is not Tensor)  # this and the next are `_is_not_ours`
            or _transforms_are_active()
            or (_is_capturing() if self._index >= 0 else not tensor.is_cpu)
        ):
            return self._stay(tensor)
        witness = tensor.detach()
        size = tensor.shape
        form = (alike.get(size) if alike else None) or self._form(tensor.dtype, size)
        group = self._group or self._begin()
        record = Record(key, storage, witness, witness, form, num_bytes, self._stream(), group.index)
        self._records[key] = record
        group.needs.append(record)
        waiting = self._waiting
        waiting.append(record)
        self._num_bytes += num_bytes
        if self._num_bytes >= self._most_bytes or len(waiting) >= self._most:
            self._send()
        return record, group

    def _save_again(self, tensor: Tensor, storage: torch.UntypedStorage, record: Record) -> Handle:
        """Refer to a storage that left before, or is about to."""
        # Asked first: a new group would put loads and stamps into the graph that is captured.
        if (self._index >= 0 and _is_capturing()) or not (group := self._group or self._begin()).add(record):
            return self._take_part(tensor, storage)
        record.handles += 1
        record.pending += 1
        if record.form == (tensor.dtype, tensor.size()) and tensor.is_contiguous():
            return record, group
        return record, group, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()

    def _take_part(self, tensor: Tensor, storage: torch.UntypedStorage) -> Handle:
        """Take over a storage of which the tensor is a view, or a copy of the view."""
        key, num_bytes = storage._cdata, storage.nbytes()
        if (key in self._parameters and self._parameters[key]() is storage) or self._is_not_ours(tensor):
            return self._stay(tensor)
        if tensor.nbytes * _SPARSE_USE <= num_bytes:
            return self._gather(tensor, storage)
        if num_bytes < self._least_bytes or (self._index >= 0 and _is_capturing()):
            return self._stay(tensor)
        witness = tensor.detach()
        witness.data = self._empty
        data = torch.empty(0, dtype=_UINT8, device=self._device).set_(storage)
        form = self._form(_UINT8, data.size())
        record, group = self._take_over(key, storage, witness, data, form, num_bytes)
        return record, group, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()

    def _gather(self, tensor: Tensor, storage: torch.UntypedStorage) -> Handle:
        """Take a copy of a view that is a small part of its storage, which may then go."""
        key = (storage._cdata, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())
        record = self._records.get(key)
        if (
            record is not None
            and record.storage() is storage
            and record.version == tensor._version
            and not (self._index >= 0 and _is_capturing())
            and (group := self._group or self._begin()).add(record)
        ):
            record.handles += 1
            record.pending += 1
            return record, group
        alias = tensor.detach()
        gathered = alias.clone(memory_format=torch.contiguous_format)
        alias.data = self._empty
        num_bytes = gathered.numel() * gathered.element_size()
        if num_bytes < self._least_bytes or (self._index >= 0 and _is_capturing()):
            return gathered, alias, alias._version
        return self._take_over(key, storage, alias, gathered, self._form(tensor.dtype, tensor.size()), num_bytes)

    def _take_over(
        self,
        key: Hashable,
        storage: torch.UntypedStorage,
        witness: Tensor,
        data: Tensor,
        form: Form,
        num_bytes: int,
    ) -> tuple[Record, Group]:
        """Hold data, to be known when it is saved again, and send it now or with its group."""
        group = self._group or self._begin()
        record = Record(key, storage, witness, data, form, num_bytes, self._stream(), group.index)
        self._records[key] = record
        group.needs.append(record)
        self._waiting.append(record)
        self._num_bytes += record.num_bytes
        if self._num_bytes >= self._most_bytes or len(self._waiting) >= self._most:
            self._send()
        return record, group

    def _send(self) -> None:
        """Send what waits, as that is enough."""
        if self._group_bytes is None:
            self.flush()
        else:
            self.next_layer(self._name)

    def _stay(self, tensor: Tensor) -> Handle:
        """Leave a tensor where it is, as autograd itself would keep it."""
        with _outside_transforms():
            alias = tensor.detach()
        return alias, alias, alias._version

    def _must_stay(self, tensor: Tensor) -> bool:
        """Return whether a tensor of a type that is not ordinary here is more, or less, than its bytes."""
        return tensor.is_conj() or tensor.is_quantized or (tensor.dtype in CASTS and self._is_cast(tensor))

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

    def _is_not_ours(self, tensor: Tensor) -> bool:
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

    def _begin(self) -> Group:
        with _outside_transforms():
            group = self._group = self._engine.new_group(self._name)
        return group

    # --- backward ----------------------------------------------------------------------------------------------------

    def _unpack(self, handle: Handle) -> Tensor:
        """Return the saved tensor."""
        if len(handle) == 3:
            tensor, witness, version = handle
            if witness._version != version:
                check_version(witness, version, f"`{self._name}`")
            return cast("Tensor", tensor)
        record, group = handle[:2]
        if record.witness._version != record.version:
            check_version(record.witness, record.version, group.what)
        restored: Tensor = self._engine.bring(group, record)
        if len(handle) > 2:
            _, _, dtype, size, stride, offset = handle
            storage = restored.untyped_storage()
            restored = torch.empty(0, dtype=dtype, device=self._device).set_(storage, offset, size, stride)
        record.pending -= 1
        if record.pending <= 0:
            self._engine.let_go(record)
        return restored


def _others_save() -> bool:
    """Return whether saved tensors are somebody else's here.

    Inside a checkpointed call they are torch's: it drops them and makes them again in backward. There, as in anything
    that backward runs, a copy to the host would be work for nothing.
    """
    top: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    owner = None if top is None else getattr(top[0], "__self__", top)
    return not (owner is None or isinstance(owner, Scope)) or torch._C._current_graph_task_id() != -1


def _outside_transforms() -> AbstractContextManager[object]:
    """Return what hides the transforms from the engine's own work."""
    return torch._C._DisableFuncTorch() if _transforms_are_active() else _NOTHING


def _is_capturing() -> bool:
    """Return whether a CUDA graph is being captured: its replays would read memory that is somebody else's by then."""
    return torch.cuda.is_current_stream_capturing()
