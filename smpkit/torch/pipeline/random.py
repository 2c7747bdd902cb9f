"""Random numbers that do not depend on where, when or how often a layer runs.

[Note: streams along the module tree] Each call of a module takes one number from its caller's stream and runs under a
stream of its own, seeded by that number and the module's name. So a call costs its caller one number whatever happens
inside, and a rank that skips the module takes the number too: dropout is the same for every partition and schedule, and
what all ranks compute alike (LayerDrop's coin) comes out alike. Recomputation in backward repeats it exactly, because
checkpointing restores the caller's stream.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from typing import Final

import torch

__all__ = ["RandomStreams"]

_WORD: Final = (1 << 64) - 1


class RandomStreams:
    """The generators of this process during a step.

    Args:
        seed: common to the ranks of one model; replicas differ, or they would drop the same activations.
        device: where layers run; its generator is led as well as the CPU's.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = seed
        self.step = 0
        self.active = False
        """Whether a training step runs; evaluation draws nothing, and outside a step the generators are the user's."""
        self._cuda = device if device.type == "cuda" else None
        self._names: dict[str, int] = {}

    def state(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return where the generators are."""
        return torch.get_rng_state(), torch.cuda.get_rng_state(self._cuda) if self._cuda is not None else None

    def restore(self, state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        """Put the generators back."""
        torch.set_rng_state(state[0])
        if state[1] is not None and self._cuda is not None:
            torch.cuda.set_rng_state(state[1], self._cuda)

    def begin_microbatch(self, index: int) -> None:
        """Start the stream of a microbatch."""
        if self.active:
            self._seed(_mixed(self.seed, self.step, index))

    def skip(self) -> None:
        """Take the number that a call takes which another rank runs."""
        if self.active:
            _draw()

    @contextlib.contextmanager
    def stream(self, name: str) -> Iterator[None]:
        """Run a call under a stream of its own."""
        if not self.active:
            yield
            return
        key = self._names.get(name)
        if key is None:
            key = self._names[name] = zlib.crc32(name.encode())
        seed = _mixed(_draw(), key)
        kept = self.state()
        self._seed(seed)
        try:
            yield
        finally:
            self.restore(kept)

    def _seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        if self._cuda is not None:
            torch.cuda.manual_seed(seed)


def _draw() -> int:
    return int(torch.empty((), dtype=torch.int64).random_().item())


def _mixed(*keys: int) -> int:
    """Mix keys to 63 bits with the finaliser of SplitMix64 (Steele, Lea, Flood 2014): near keys give far seeds."""
    mixed = 0
    for key in keys:
        mixed = (mixed + key + 0x9E3779B97F4A7C15) & _WORD
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _WORD
        mixed ^= mixed >> 31
    return mixed >> 1
