"""Seeds of streams of random numbers, which tensor-parallel ranks have in common or to themselves.

Where ranks hold the same values they must draw the same numbers, and where each has its own samples they must not. So a
seed holds two things: a number that all ranks of a tensor-parallel group have, and whether a salt of this rank is mixed
in. Each rank can compute the common number from its generator's seed, without asking the others.

[Note: numbers without draws] What a call leaves its caller follows from the number before it and from the call's name,
not from what was drawn meanwhile: ranks with their own samples may draw more or fewer random values, and ranks that
skip the call draw none. The generator is seeded with it, so whatever restores the generator (recomputation by any
checkpoint) restores the position in this sequence too. It is a multiplicative hash of both (Knuth, The Art of Computer
Programming 6.4), so that numbers inside the call do not meet those after it.

    bits    63      62 to 43    42 to 1     0
            0       _TAG        number      whether the stream is closed, and its seed this rank's own
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from smpkit.torch.core.runtime import state

_WORD: Final = (1 << 64) - 1
_SHIFT: Final = 43
_TAG: Final = 0x9E377
"""Tells these seeds from those that scripts choose."""
_TAGGED: Final = _TAG << _SHIFT
_NUMBER: Final = (1 << _SHIFT) - 2
_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Of SplitMix64."""
_DROPPED: Final = 64 - _SHIFT
"""The lowest bits of a product, which depend on few of its factors' bits."""


@dataclass(frozen=True)
class Seeds:
    """The seeds of this rank.

    Args:
        rank_salt: mixed into the seeds of closed streams; 0 on the first rank, and where all have the same samples.
    """

    rank_salt: int = 0

    @classmethod
    def for_this_rank(cls) -> Seeds:
        if not state.initialized or state.tp_size == 1 or state.cfg.prescaled_batch or not state.tp_rank:
            return cls()
        return cls(mix(0, state.tp_rank) & _NUMBER)

    def open(self, number: int) -> int:
        """Return the seed of a stream for what all ranks compute alike."""
        return number & _NUMBER | _TAGGED

    def closed(self, number: int) -> int:
        """Return the seed of a stream for operations on this rank's own values."""
        return (number & _NUMBER ^ self.rank_salt) | _TAGGED | 1

    def number(self, seed: int) -> int:
        """Return the number in a seed, which all ranks have."""
        return (seed ^ self.rank_salt if seed & 1 else seed) & _NUMBER

    def after(self, seed: int, key: int) -> int:
        """Return the seed with which the stream of `seed` goes on after a call; `key` is its name in 64 mixed bits."""
        # Every call of a layer comes here, so `number`, `open` and `closed` are written out.
        if seed & 1:
            later = ((seed ^ self.rank_salt) & _NUMBER) + key
            return (later * _GAMMA >> _DROPPED & _NUMBER ^ self.rank_salt) | _TAGGED | 1
        return ((seed & _NUMBER) + key) * _GAMMA >> _DROPPED & _NUMBER | _TAGGED

    @staticmethod
    def is_stream_seed(seed: int) -> bool:
        """Return whether a seed is one of these; a script's is not."""
        return seed >> _SHIFT == _TAG


def mix(value: int, key: int) -> int:
    """Mix one more key in, to 64 bits, with the finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    value = (value + key + _GAMMA) & _WORD
    value = ((value ^ (value >> 30)) * _FIRST) & _WORD
    value = ((value ^ (value >> 27)) * _SECOND) & _WORD
    return value ^ (value >> 31)
