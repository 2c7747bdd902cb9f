"""What leaves the device per block, counted: in units of tokens × width × bytes of a number."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.activation_offload.blocks import Decoder, gradients_of, train_step
from benchmarks.activation_offload.contestants import CONTESTANTS, Absent, Contestant, Entry

__all__ = ["bytes_table"]

_WIDTH, _TOKENS, _LAYERS = 256, 256, 4
_UNIT = _WIDTH * _TOKENS * 4


def bytes_table() -> list[dict[str, Any]]:
    """Return a row per contestant: units out, back and left on the device, and whether gradients are the same bits."""
    torch.manual_seed(0)
    model = Decoder(_WIDTH, 4, _LAYERS)
    x = torch.randn(1, _TOKENS, _WIDTH)
    train_step(model, x, contextlib.nullcontext)
    expected = gradients_of(model)
    return [_row(each, model, x, expected) for each in CONTESTANTS]


def _row(contestant: Contestant, model: Decoder, x: Tensor, expected: list[Tensor]) -> dict[str, Any]:
    model.is_checkpointed = contestant.is_checkpointed
    try:
        entry = contestant.enter(model)
    except Absent as reason:
        return {"name": contestant.name, "absent": str(reason)}
    try:
        out, back, kept = _moved(entry, model, x)
        same = all(torch.equal(ours, theirs) for ours, theirs in zip(gradients_of(model), expected, strict=True))
    finally:
        entry.close()
    per_block = [num_bytes / _UNIT / _LAYERS for num_bytes in (out, back, kept)]
    return {"name": contestant.name, "out": per_block[0], "back": per_block[1], "kept": per_block[2], "same": same}


def _moved(entry: Entry, model: Decoder, x: Tensor) -> tuple[int, int, int]:
    """Return bytes out, bytes back, and bytes that are on the device when forward has ended."""
    if entry.report is not None:
        for _ in range(3):  # the engine learns the order of the backward
            train_step(model, x, entry.around)
        step = entry.report().steps[-1]
        return step.bytes_out, step.bytes_back, step.bytes_out - step.bytes_back
    made = entry.around()
    hooks = made if isinstance(made, saved_tensors_hooks) else None
    counted = _Counted(hooks, set(map(_place, model.parameters())))
    train_step(model, x, lambda: counted)
    return (counted.num_bytes, counted.num_bytes, 0) if hooks else (0, 0, counted.num_bytes)


class _Counted(saved_tensors_hooks):
    """Hooks that count what they are given and hand it on; without others, each storage once and no parameters."""

    def __init__(self, hooks: saved_tensors_hooks | None, parameters: set[int]) -> None:
        self.num_bytes = 0
        self._alive: list[Tensor] = []
        self._seen = parameters if hooks is None else None
        super().__init__(self._count, self._give_back)
        self._theirs: Any = hooks

    def _count(self, tensor: Tensor) -> Any:
        if self._theirs is not None:
            self.num_bytes += tensor.numel() * tensor.element_size()
            return self._theirs.pack_hook(tensor)
        assert self._seen is not None
        if _place(tensor) not in self._seen:
            self._alive.append(tensor)
            self._seen.add(_place(tensor))
            self.num_bytes += tensor.untyped_storage().nbytes()
        return tensor

    def _give_back(self, packed: Any) -> Any:
        return packed if self._theirs is None else self._theirs.unpack_hook(packed)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
