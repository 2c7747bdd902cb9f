"""Random numbers between tensor-parallel ranks: equal where the values are, different where the ranks hold parts.

In a step, and in a training forward outside of one, the generators are seeded so that each rank can compute a number
that is the same on all ranks (see `stream_seeds`). A generator seeded with it draws masks that must be equal; for masks
that must differ, the rank is mixed in. Then the next such number takes its place. So no message is sent, and nothing
waits for a GPU; and recomputation, which restores the generator, finds the same number and draws the same mask.

A distributed module that is called by itself finds a generator that the script has seeded, by rank or all alike. Then a
number is drawn from it; where masks must be equal, tp_rank 0 broadcasts its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from smpkit.torch.core import devices
from smpkit.torch.core.runtime import state
from smpkit.torch.core.stream_seeds import Seeds, mix
from smpkit.torch.distributed.deadline import waiting
from smpkit.torch.tensor_parallel import collectives
from smpkit.torch.tensor_parallel.layouts import Layout

_KEY: Final = mix(0, 0)
"""Moves the generator on after a common number, as the name of a call (its CRC) does in streams of the pipeline."""


class ParallelDropout(nn.Module):
    """Dropout on what a rank holds between distributed modules: equal values are dropped alike on all ranks."""

    def __init__(self, p: float, boundary: Layout) -> None:
        super().__init__()
        self.p = p
        self.boundary = boundary

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` with dropout, in training."""
        if not self.training or self.p == 0:
            return x
        with tp_rng(x, equal=self.boundary is Layout.REPLICATE):
            return functional.dropout(x, self.p)

    def extra_repr(self) -> str:
        """Return what torch's own prints, and the boundary."""
        return f"p={self.p}, boundary={self.boundary.value}"


@contextlib.contextmanager
def tp_rng(x: torch.Tensor, *, equal: bool) -> Iterator[None]:
    """Seed the generator of `x`'s device in this block, equally on all tensor-parallel ranks or differently."""
    if state.tp_size == 1 or collectives.is_dry_run(x):
        yield
        return
    number = _common_number()
    if number is None:
        number = _random_number_of_first_rank(x.device) if equal else random_number()
    # Odd, as the seeds of the pipeline's closed streams: operations in the block get no stream of their own.
    seed = mix(number, 1 + (0 if equal else 1 + state.tp_rank)) >> 1 | 1
    with devices.fork_rng(x.device):
        _seed(seed, x.device)
        yield


@contextlib.contextmanager
def seed_with_common_number(number: int, device: torch.device) -> Iterator[None]:
    """Seed the generators so that modules in this block find common numbers; restore the generators afterwards.

    `number` is the same on all ranks of a tensor-parallel group, and another one for each block.
    """
    with devices.fork_rng(device):
        _seed(Seeds.for_this_rank().closed(number), device)
        yield


def _seed(seed: int, device: torch.device) -> None:
    torch.default_generator.manual_seed(seed)
    if devices.is_asynchronous(device):
        torch.get_device_module(device).manual_seed(seed)


def _common_number() -> int | None:
    """Take the common number out of the generator's seed; None if the script has seeded the generator."""
    seeds, seed = Seeds.for_this_rank(), torch.default_generator.initial_seed()
    if not seeds.is_stream_seed(seed):
        return None
    torch.default_generator.manual_seed(seeds.after(seed, _KEY))
    return seeds.number(seed)


def _random_number_of_first_rank(device: torch.device) -> int:
    group = collectives.tp_group()
    drawn = torch.tensor(random_number(), dtype=torch.int64, device=device)
    with waiting("agreement on random numbers between tensor-parallel ranks", group):
        dist.broadcast(drawn, group=group, group_src=0)
    return int(drawn.item())


def random_number() -> int:
    """Draw a number of 63 bits from this rank's generator."""
    with torch._C.DisableTorchFunction():  # past the pipeline's random streams, which are a torch function mode
        return int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
