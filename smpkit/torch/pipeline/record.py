"""Which way a microbatch goes through the ranks: its moves, and the record of them that later ones follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from smpkit.torch.pipeline.specs import TensorSpec

__all__ = ["MOVES_PER_MICROBATCH", "STRAYED", "Move", "Record"]

MOVES_PER_MICROBATCH: Final = 1 << 12
STRAYED: Final = 1 << 11
"""Added to the numbers of moves of a microbatch that has left the record."""


@dataclass(frozen=True)
class Move:
    """A value that one rank sends to another, once; `number` counts the moves of a microbatch, alike on all ranks."""

    number: int
    source: int
    target: int
    source_segment: int
    target_segment: int
    spec: TensorSpec
    unit: str = ""
    """What needed the value: a unit or an operation."""

    def __post_init__(self) -> None:
        assert self.number < MOVES_PER_MICROBATCH, "more moves in one microbatch than tags"


@dataclass(frozen=True)
class Record:
    """The way that the first microbatch of a kind went, which the schedule relies on."""

    moves: tuple[Move, ...]
    changed: frozenset[int]
    """Moves from this rank whose value was changed in place after it had been handed over: they travel as copies."""
    changes: bool
    """Whether any call has changed in place what it was given: then what arrives must allow that."""
