"""The hooks by which checkpointed calls and the pipeline drive the offloading engine of this process, if it has one.

They call these functions and never import the engine, which lies above them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

import torch

from smpkit.plan.schedule.actions import Action
from smpkit.plan.schedule.graph import Kind

__all__ = [
    "OffloadUse",
    "Offloader",
    "begin_action",
    "current_offloader",
    "follow",
    "footprint",
    "install",
    "offload_inputs",
    "reserve",
]


@dataclass(frozen=True)
class OffloadUse:
    """What an engine holds, and has moved since the step began, in bytes."""

    parked: int = 0
    """On the device."""
    offloaded: int = 0
    """On the host."""
    mapped: int = 0
    """Taken from the host, in use or not."""
    bytes_out: int = 0
    bytes_back: int = 0


class Offloader:
    """An engine that offloads the inputs of checkpointed calls; this one keeps them."""

    def offload_inputs(self, name: str) -> AbstractContextManager[object]:  # noqa: ARG002 - for engines that offload
        """Offload the tensors that autograd saves in the block."""
        return contextlib.nullcontext()

    def follow(self, actions: Sequence[Action]) -> None:
        """Take the order of this rank's actions in the step that begins."""

    def begin_action(self, kind: Kind, segment: int, microbatch: int) -> None:
        """Take note that an action begins."""

    def footprint(self) -> list[int]:
        """Return the sizes of the blocks of host memory that the live graphs use."""
        return []

    def reserve(self, sizes: Sequence[int]) -> None:
        """Allocate host memory for blocks of these sizes."""

    def use(self) -> OffloadUse:
        """Count what is held and was moved."""
        return OffloadUse()


_engine: Offloader | None = None
"""One per process, like the model; suspended microbatches see it from their own threads."""
_NOTHING: Final = contextlib.nullcontext()


def offload_inputs(name: str) -> AbstractContextManager[object]:
    """Offload the tensors that autograd saves in the block: the inputs of the checkpointed call in it.

    Without an engine this costs one comparison.

    Args:
        name: path of the checkpointed module as in `state_dict`, for reports and errors.
    """
    # A compiled model decides itself what it saves, and hooks would break its graph.
    return _NOTHING if _engine is None or torch.compiler.is_compiling() else _engine.offload_inputs(name)


def follow(actions: Sequence[Action]) -> None:
    """Give the engine the order of this rank's actions, at the start of a step of the pipeline."""
    if _engine is not None:
        _engine.follow(actions)


def begin_action(kind: Kind, segment: int, microbatch: int) -> None:
    """Report to the engine that an action begins."""
    if _engine is not None:
        _engine.begin_action(kind, segment, microbatch)


def footprint() -> list[int]:
    """Return the sizes of the blocks of host memory that the live graphs use: after a first forward, a microbatch's."""
    return [] if _engine is None else _engine.footprint()


def reserve(sizes: Sequence[int], live_microbatches: int) -> None:
    """Reserve host memory for some microbatches before a step begins.

    Args:
        sizes: the footprint of one microbatch.
        live_microbatches: how many are alive at a time.
    """
    # Before the step: pinning may synchronize with the device, and in the middle of one, two ranks that send to each
    # other could deadlock.
    if _engine is not None and sizes:
        _engine.reserve([*sizes] * live_microbatches)


def current_offloader() -> Offloader | None:
    """Return the engine that offloads in this process."""
    return _engine


def install(engine: Offloader | None) -> Offloader | None:
    """Install an engine, or none; return the one before it."""
    global _engine
    previous, _engine = _engine, engine
    return previous
