"""The transfers of a microbatch between ranks, and the record of them that later microbatches follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from smpkit.torch.pipeline.specs import TensorSpec

__all__ = ["DIVERGED", "TRANSFERS_PER_MICROBATCH", "P2PTransfer", "TransferRecord"]

TRANSFERS_PER_MICROBATCH: Final = 1 << 12
DIVERGED: Final = 1 << 11
"""Added to the numbers of transfers of a microbatch that has diverged from the record."""


@dataclass(frozen=True)
class P2PTransfer:
    """A value that one rank sends to another, once; `number` counts those of a microbatch, alike on all ranks."""

    number: int
    source: int
    target: int
    source_segment: int
    target_segment: int
    spec: TensorSpec
    consumer: str = ""
    """What needed the value: a unit or an operation."""

    def __post_init__(self) -> None:
        assert self.number < TRANSFERS_PER_MICROBATCH, "more moves in one microbatch than tags"


@dataclass(frozen=True)
class TransferRecord:
    """The transfers of the first microbatch of a kind, which the schedule relies on."""

    transfers: tuple[P2PTransfer, ...]
    mutated: frozenset[int]
    """Numbers of transfers from this rank whose value was changed in place after the send: they are sent as copies."""
    has_mutations: bool
    """Whether any call has changed its arguments in place: then received values must allow that."""
