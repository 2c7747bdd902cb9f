"""What checkpointed calls keep and what they compute again, seen while a model runs on tensors without data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from smpkit.plan.schedule.actions import Action
from smpkit.plan.schedule.graph import Kind
from smpkit.torch.offload.active import install

__all__ = ["CheckpointedCall", "CheckpointedCalls"]


@dataclass(frozen=True)
class CheckpointedCall:
    """One of them."""

    unit: str | None
    """The first unit that ran inside; None if it was inside of one itself."""
    boundary_bytes: int
    """Of what it keeps: its inputs, as far as nothing before it keeps them."""
    recomputed_bytes: int
    """Of what it makes, and makes again in backward; an upper bound of what that keeps."""
    flops: int


class CheckpointedCalls:
    """Installed in the place of an offload engine, to record checkpointed calls.

    Args:
        saved_bytes: tells what autograd keeps so far.
        flops: tells what was computed so far.
    """

    def __init__(self, saved_bytes: Callable[[], int], flops: Callable[[], int]) -> None:
        self.calls: list[CheckpointedCall] = []
        self._started_units: list[str] = []
        self._num_open_units = 0
        self._saved_bytes = saved_bytes
        self._flops = flops

    def begin_unit(self, name: str) -> None:
        """Note that a unit's forward begins."""
        self._started_units.append(name)
        self._num_open_units += 1

    def end_unit(self) -> None:
        """Note that it ends."""
        self._num_open_units -= 1

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Record checkpointed calls in this block."""
        previous = install(self)
        try:
            yield
        finally:
            install(previous)

    def offload_inputs(self, name: str) -> AbstractContextManager[None]:  # noqa: ARG002 - of every Offloader
        """Note one call; entered around it."""
        return self._note()

    def follow(self, actions: Sequence[Action]) -> None:
        """Do nothing: no pipeline runs here."""

    def begin_action(self, kind: Kind, segment: int, microbatch: int) -> None:
        """Do nothing."""

    def footprint(self) -> list[int]:
        """Return that nothing is taken."""
        return []

    def reserve(self, sizes: Sequence[int]) -> None:
        """Do nothing."""

    @contextlib.contextmanager
    def _note(self) -> Iterator[None]:
        saved, flops, begun, is_inside = (
            self._saved_bytes(),
            self._flops(),
            len(self._started_units),
            self._num_open_units > 0,
        )
        with _NewBytes() as made:
            yield
        unit = None if is_inside else next(iter(self._started_units[begun:]), None)
        saved, flops = self._saved_bytes() - saved, self._flops() - flops
        self.calls.append(CheckpointedCall(unit, saved, made.num_bytes, flops))


class _NewBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of what operations make; views and what is changed in place are not new."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        values = output if isinstance(output, tuple | list) else (output,)
        for value, declared in zip(values, func._schema.returns, strict=False):
            if isinstance(value, torch.Tensor) and declared.alias_info is None:
                self.num_bytes += value.untyped_storage().nbytes()
        return output
