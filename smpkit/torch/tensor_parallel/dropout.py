"""Random numbers between tensor-parallel ranks: equal where the values are, different where the ranks hold parts.

Nothing says that the generators of the ranks agree: a script may have seeded them by rank or all alike. So a number is
drawn from this rank's generator, and the mask comes from another, seeded by that number: as rank 0 of the group drew it
where masks must be equal, mixed with the rank where they must differ. Recomputation restores the generator, draws the
same number again, and gets the same mask.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from smpkit.torch.deadline import waiting
from smpkit.torch.state import state
from smpkit.torch.tensor_parallel import collectives
from smpkit.torch.tensor_parallel.arguments import check_probability
from smpkit.torch.tensor_parallel.boundary import Boundary

__all__ = ["BoundaryDropout", "numbers"]

_WORD = (1 << 64) - 1


class BoundaryDropout(nn.Module):
    """Dropout on what a rank holds between distributed modules: equal values are dropped alike on all ranks.

    Args:
        p: the probability of an element to be dropped.
        boundary: what the values are.
    """

    def __init__(self, p: float, boundary: Boundary) -> None:
        super().__init__()
        check_probability("distributed modules", "the dropout", p)
        self.p = p
        self.boundary = boundary

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` with dropout, in training."""
        if not self.training or self.p == 0:
            return x
        with numbers(x, equal=self.boundary.is_equal):
            return functional.dropout(x, self.p)

    def extra_repr(self) -> str:
        """Say what torch's own would, and the boundary."""
        return f"p={self.p}, boundary={self.boundary.value}"


@contextlib.contextmanager
def numbers(x: torch.Tensor, *, equal: bool) -> Iterator[None]:
    """Let operations on `x` in this block draw random numbers that are equal, or differ, on tensor-parallel ranks."""
    if state.tp_size == 1 or collectives.is_rehearsal(x):
        yield
        return
    seed = _agreed(x.device) if equal else _different()
    device = x.device if x.device.type == "cuda" else None
    with torch.random.fork_rng([] if device is None else [device]):
        # Odd, as the seeds of the pipeline's closed streams are: what draws here gets no stream of its own.
        torch.default_generator.manual_seed(seed | 1)
        if device is not None:
            torch.cuda.manual_seed(seed | 1)
        yield


def _different() -> int:
    # SplitMix64's finaliser (Steele, Lea, Flood 2014): neighbouring ranks get distant seeds.
    mixed = (_number() + (state.tp_rank + 1) * 0x9E3779B97F4A7C15) & _WORD
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _WORD
    return (mixed ^ (mixed >> 31)) >> 1


def _agreed(device: torch.device) -> int:
    group = collectives.tp_group()
    drawn = torch.tensor(_number(), dtype=torch.int64, device=device)
    with waiting("agreement on random numbers between tensor-parallel ranks", group):
        dist.broadcast(drawn, group=group, group_src=0)
    return int(drawn.item())


def _number() -> int:
    with torch._C.DisableTorchFunction():  # the pipeline's streams must not give this draw one of its own
        return int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
