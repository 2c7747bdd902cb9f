"""The whole state of the model, one tensor after the other on rank 0: for full checkpoints and folders of the hub.

All ranks walk through the same names in the same order. The pieces of a tensor are put together where they lie and sent
to rank 0 (`whole_value`), so a rank needs memory for one whole tensor, or a few small ones, beside its own part. A
module that tensor parallelism has replaced comes under the names of the script's own model: its registration has a
translation back, which makes one tensor after the other from the whole tensors of the replacement.
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from smpkit.errors import CheckpointError
from smpkit.torch.checkpoints.agreement import all_or_raise, go_on, together
from smpkit.torch.checkpoints.entries import TensorsOnAccess, translated
from smpkit.torch.checkpoints.folder import as_checkpoint_error, fsync_write, pieces_of
from smpkit.torch.checkpoints.tensors import bytes_of
from smpkit.torch.core.runtime import state
from smpkit.torch.model import DistributedModel
from smpkit.torch.state_dict import tie_of, whole_value, with_versions
from smpkit.torch.tensor_parallel.module import global_shape
from smpkit.torch.tensor_parallel.registry import Translation
from smpkit.torch.tensor_parallel.state_dict import replaced_modules

_ALIGNMENT = 64
"""Of the tensors in a scratch file, in bytes."""
_GATHERED_BYTES = 8 << 20
"""Of tensors that are gathered before rank 0 takes them, or fewer and one large tensor."""
Take: TypeAlias = Callable[[str, Any], object]
"""Takes a name and a value."""


class WholeState:
    """The whole state of a model, the same on all ranks; with `translate` under the names of the script's own model."""

    def __init__(self, model: DistributedModel, *, translate: bool) -> None:
        self._model = model
        self._own: dict[str, Any] = model.module.state_dict(keep_vars=True)
        self._modules: list[tuple[str, nn.Module, Translation]] = []
        for name, module, rule in replaced_modules(model.module) if translate else ():
            if rule.from_distributed is not None:
                self._modules.append((f"{name}." if name else "", module, rule.from_distributed))
        inside = tuple(prefix for prefix, _, _ in self._modules)
        names = [name for name in self._own if not (inside and name.startswith(inside))]
        first: dict[object, str] = {}
        self.ties = {name: first.setdefault(tie_of(name, self._own[name]), name) for name in names}
        """The name under which the value of each name comes: the first of a tied weight."""
        self.specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            name: (tuple(global_shape(self._own[name])), self._own[name].dtype)
            for name in first.values()
            if isinstance(self._own[name], torch.Tensor)
        }
        """Shape and dtype of the tensors that come, in their order."""
        for name, value in self._translated(self._without_data):
            self.specs[name] = tuple(value.shape), value.dtype
        self._plain_names = [*first.values()]

    def deliver(self, take: Take, failure: str) -> None:
        """Call `take` on rank 0 with each name and value; all ranks call this, and raise what `take` raises there.

        They gather a few tensors at a time, and wait for rank 0 before the next: as long as it works, however long.
        """
        _, digests = together(failure, lambda: zlib.crc32(repr(list(self.specs.items())).encode()), set)
        if len(digests) > 1:
            raise CheckpointError(f"{failure}; the model's names or shapes are not the same on all ranks")
        values = self._values()
        while together(failure, lambda: self._deliver_some(values, take), all)[1]:
            pass

    def _deliver_some(self, values: Iterator[tuple[str, Any]], take: Take) -> bool:
        """Gather a few values, and let rank 0 take them; return whether there were any, which is so on all ranks."""
        few: dict[str, Any] = {}
        num_bytes = 0
        while num_bytes < _GATHERED_BYTES and (item := next(values, None)) is not None:
            few |= [item]
            shape, dtype = self.specs.get(item[0], ((0,), torch.uint8))
            num_bytes += torch.Size(shape).numel() * dtype.itemsize
        for name, value in few.items() if state.rank == 0 else ():
            if not (isinstance(value, torch.Tensor) and value.device.type == "meta"):
                take(name, value)
        return bool(few)

    def _values(self) -> Iterator[tuple[str, Any]]:
        for name in self._plain_names:
            yield name, self._gather(name)
        yield from self._translated(self._gather)

    def _translated(self, get: Callable[[str], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the translated tensors; `get` returns those of the model by name."""
        for prefix, module, translation in self._modules:
            tensors = TensorsOnAccess([*module.state_dict()], lambda name, prefix=prefix: get(prefix + name))  # type: ignore[misc]
            for name, make in translated(translation, tensors, module, prefix):
                yield name, make()

    def _gather(self, name: str) -> Any:
        # Without sharded data parallelism the first replica has all.
        if state.rdp_rank == 0 or state.cfg.sharded_data_parallel_degree > 1:
            value = whole_value(name, self._own[name], self._model.placement)
            if state.rank == 0:
                return value
        return self._without_data(name)

    def _without_data(self, name: str) -> Any:
        value = self._own[name]
        if not isinstance(value, torch.Tensor):
            return None
        return torch.empty(global_shape(value), dtype=value.dtype, device="meta")


def write_full(path: Path, model: DistributedModel, failure: str, *, translate: bool) -> None:
    """Write the whole state dict of a model as `torch.save` does, on rank 0; all ranks call this.

    `torch.save` takes all tensors at once, so they are written to a scratch file first and mapped from there.
    """
    whole = all_or_raise(failure, lambda: WholeState(model, translate=translate))
    scratch = path.with_name(f"{path.name}.scratch")
    places: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}
    values: dict[str, Any] = {}

    def take(name: str, value: Any) -> None:
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or not value.numel():
            values[name] = value
            return
        with as_checkpoint_error(f"{path.name} cannot be written"), scratch.open("ab") as file:
            file.write(bytes(-file.tell() % _ALIGNMENT))
            places[name] = file.tell(), tuple(value.shape), value.dtype
            for piece in pieces_of(bytes_of(value)):
                file.write(piece)
                go_on()

    def save() -> None:
        if state.rank > 0:
            return
        with as_checkpoint_error(f"{path.name} cannot be written"):
            if places:
                with scratch.open("rb") as file:
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                for name, (offset, shape, dtype) in places.items():
                    count = torch.Size(shape).numel()
                    values[name] = torch.frombuffer(mapped, dtype=dtype, count=count, offset=offset).view(shape)
            content = {name: values[first] for name, first in whole.ties.items() if first in values}
            content |= {name: value for name, value in values.items() if name not in content}
            content = with_versions(model.module.state_dict(), content)
            fsync_write(path, lambda file: torch.save(content, file))
            scratch.unlink(missing_ok=True)

    whole.deliver(take, failure)
    all_or_raise(failure, save)
