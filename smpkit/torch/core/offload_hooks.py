"""The engine that offloads in this process, if one does: checkpointed calls and the pipeline tell it where they are.

Kept apart from the engine so that these know nothing but this.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Final, Protocol

import torch

from smpkit.plan.schedule.actions import Action
from smpkit.plan.schedule.graph import Kind

__all__ = [
    "Offloader",
    "begin_action",
    "current_offloader",
    "follow",
    "footprint",
    "install",
    "offload_inputs",
    "reserve",
]


class Offloader(Protocol):
    """What offloads the inputs of checkpointed calls."""

    def offload_inputs(self, name: str) -> AbstractContextManager[object]:
        """Offload what is saved for backward inside."""

    def follow(self, actions: Sequence[Action]) -> None:
        """Note which actions of this rank come."""

    def begin_action(self, kind: Kind, segment: int, microbatch: int) -> None:
        """Note that an action begins."""

    def footprint(self) -> list[int]:
        """Return the sizes of the blocks of host memory that the graphs take which are alive now."""

    def reserve(self, sizes: Sequence[int]) -> None:
        """Have host memory for blocks of these sizes."""


_engine: Offloader | None = None
"""One per process, like the model; suspended microbatches see it from their own threads."""
_NOTHING: Final = contextlib.nullcontext()


def offload_inputs(name: str) -> AbstractContextManager[object]:
    """Offload the tensors that autograd saves inside: enter it around a checkpointed call, whose inputs those are.

    Does nothing, at the price of one comparison, when nothing is to be offloaded.

    Args:
        name: path of the checkpointed module as in `state_dict`, for reports and errors.
    """
    # A compiled model decides for itself what it saves; its graph must not have our hooks inside.
    return _NOTHING if _engine is None or torch.compiler.is_compiling() else _engine.offload_inputs(name)


def follow(actions: Sequence[Action]) -> None:
    """Tell in which order this rank's actions come, at the start of a step of the pipeline."""
    if _engine is not None:
        _engine.follow(actions)


def begin_action(kind: Kind, segment: int, microbatch: int) -> None:
    """Tell that an action begins."""
    if _engine is not None:
        _engine.begin_action(kind, segment, microbatch)


def footprint() -> list[int]:
    """Return the sizes of the blocks of host memory that the graphs take which are alive now: a first microbatch's."""
    return [] if _engine is None else _engine.footprint()


def reserve(sizes: Sequence[int], live_microbatches: int) -> None:
    """Reserve host memory for so many microbatches before a step begins.

    Pinning may synchronize with the device; in the middle of a step, two ranks that send to each other could deadlock.

    Args:
        sizes: the footprint of one microbatch.
        live_microbatches: how many are alive at a time.
    """
    if _engine is not None and sizes:
        _engine.reserve([*sizes] * live_microbatches)


def current_offloader() -> Offloader | None:
    """Return what `offload_inputs` hands its tensors to."""
    return _engine


def install(engine: Offloader | None) -> Offloader | None:
    """Let `engine` offload from now on, or nobody; returns the engine before it."""
    global _engine
    previous, _engine = _engine, engine
    return previous
