"""What the values between distributed modules are on the tensor-parallel ranks, and what that means for gradients.

=========  ==============================================  ======================  =========================
boundary   a rank holds                                    into a module           out of it
=========  ==============================================  ======================  =========================
BATCH      its own samples                                 gather on dim 0         reduce-scatter on dim 0
GATHERED   the samples of all ranks, equal on all          copy                    reduce
REPLICATE  the one batch of all ranks, equal on all        copy                    reduce
SEQUENCE   its part of each sequence of that one batch     gather on dim 1         reduce-scatter on dim 1
=========  ==============================================  ======================  =========================

The configuration chooses: BATCH without `prescaled_batch`, REPLICATE with it. Inside a stack of transformer layers the
values change once, at its ends: `optimize: speed` takes the one of the two that is equal on all ranks (GATHERED or
REPLICATE), `optimize: memory` the one where no rank holds what another does (BATCH or SEQUENCE).

What is averaged over which ranks, and multiplied with what, to be the gradient of the mean loss:

=========  ===============================  ==================================================
boundary   weight divided over the ranks    weight that all hold, used on the values in between
=========  ===============================  ==================================================
BATCH      RDP_GROUP, 1 / tp_size           DP_GROUP, 1        (it has seen this rank's samples)
GATHERED   RDP_GROUP, 1 / tp_size           RDP_GROUP, 1 / tp_size           (those of all ranks)
REPLICATE  RDP_GROUP, 1                     DP_GROUP, 1                                 (all, too)
SEQUENCE   RDP_GROUP, 1                     DP_GROUP, tp_size   (a part of what makes one gradient)
=========  ===============================  ==================================================
"""

from __future__ import annotations

from enum import Enum
from typing import Final

import torch
import torch.distributed as dist
from torch import nn

from smpkit.errors import ConfigError, Problem, UsageError
from smpkit.plan.mesh import CommGroup
from smpkit.torch.deadline import waiting
from smpkit.torch.state import state
from smpkit.torch.tensor_parallel import collectives
from smpkit.torch.tensor_parallel.shards import Shard, mark

__all__ = [
    "Boundary",
    "check_divisible",
    "check_same_shape",
    "enter",
    "leave",
    "mark_whole",
    "outer_boundary",
    "split_parameter",
    "stack_boundary",
    "whole_parameter",
]


class Boundary(Enum):
    """What a tensor-parallel rank holds of the values between distributed modules."""

    BATCH = "batch"
    """Its own samples."""
    GATHERED = "gathered"
    """The samples of all ranks of the group: equal on all of them, and the loss of each is that of its own samples."""
    REPLICATE = "replicate"
    """The one batch that all ranks of the group have (`prescaled_batch`)."""
    SEQUENCE = "sequence"
    """A part of each sequence of that batch: dimension 1 is divided."""

    @property
    def is_equal(self) -> bool:
        """Whether all ranks hold the same values."""
        return self in (Boundary.GATHERED, Boundary.REPLICATE)

    @property
    def dim(self) -> int | None:
        """The dimension that is divided over the ranks; None where all hold the same."""
        return {Boundary.BATCH: 0, Boundary.SEQUENCE: 1}.get(self)

    @property
    def split_reduction(self) -> tuple[CommGroup, float]:
        """Group and scale of a weight that is divided over the ranks; see `Shard`."""
        sums = self in (Boundary.BATCH, Boundary.GATHERED)
        return CommGroup.RDP_GROUP, 1 / state.tp_size if sums else 1.0

    @property
    def whole_reduction(self) -> tuple[CommGroup, float]:
        """Group and scale of a weight that all ranks hold and use on the values in between; see `Shard`."""
        if self is Boundary.GATHERED:
            return CommGroup.RDP_GROUP, 1 / state.tp_size
        return CommGroup.DP_GROUP, float(state.tp_size) if self is Boundary.SEQUENCE else 1.0


def outer_boundary() -> Boundary:
    """Return what distributed modules take and return by the configuration."""
    return Boundary.REPLICATE if state.cfg.prescaled_batch else Boundary.BATCH


def stack_boundary() -> Boundary:
    """Return what the layers of a transformer stack hand on by the configuration."""
    if state.cfg.optimize == "speed":
        return Boundary.REPLICATE if state.cfg.prescaled_batch else Boundary.GATHERED
    return Boundary.SEQUENCE if state.cfg.prescaled_batch else Boundary.BATCH


def enter(x: torch.Tensor, boundary: Boundary) -> torch.Tensor:
    """Return the values as a weight that is divided by output features needs them: all that the group holds.

    Raises:
        UsageError: the ranks hold unequal numbers of samples.
    """
    if boundary.dim is None:
        return collectives.copy(x)
    check_same_shape(x)
    return collectives.gather(x, boundary.dim)


def leave(x: torch.Tensor, boundary: Boundary) -> torch.Tensor:
    """Add up what weights divided by input features made, and return what this rank holds of it.

    Raises:
        UsageError: the ranks do not divide the dimension that the boundary divides.
    """
    return collectives.reduce(x) if boundary.dim is None else collectives.reduce_scatter(x, boundary.dim)


_seen: Final[set[tuple[torch.Size, torch.dtype]]] = set()


def check_same_shape(x: torch.Tensor) -> None:
    """Compare the shape with the other ranks' the first time it is seen.

    A rank that has seen its own shape before does not compare again: then the exchange itself fails, and the error of
    each rank says what it waited in, with the shape.

    Raises:
        UsageError: the shapes differ.
    """
    key = (x.shape, x.dtype)
    if key in _seen or state.tp_size == 1 or collectives.is_rehearsal(x):
        return
    if not _seen:
        state.reset_hooks.append(_seen.clear)
    group = collectives.tp_group()
    mine = torch.full((12,), -1, dtype=torch.int64, device=x.device)
    mine[: min(x.dim(), 12)] = torch.tensor(x.shape[:12], device=x.device)
    everybody = [torch.empty_like(mine) for _ in range(state.tp_size)]
    with waiting(f"comparison of shapes ({list(x.shape)} here) between tensor-parallel ranks", group):
        dist.all_gather(everybody, mine, group=group)
    shapes = [[size for size in each.tolist() if size >= 0] for each in everybody]
    if any(shape != shapes[0] for shape in shapes):
        ranks = dist.get_process_group_ranks(group)
        said = ", ".join(f"{shape} on rank {rank}" for rank, shape in zip(ranks, shapes, strict=True))
        raise UsageError(
            f"the tensor-parallel ranks brought batches of different shapes: {said}",
            hint="give every rank as many samples of the same length: `drop_last=True`, padding to a fixed length",
        )
    _seen.add(key)


def check_divisible(what: str, value: int) -> None:
    """Raise ConfigError unless the tensor-parallel ranks divide `value`."""
    if value % state.tp_size:
        degree = state.tp_size
        message = f"{what} {value} is not divisible by tensor_parallel_degree {degree}"
        raise ConfigError([Problem((), message)], subject="distributed module")


def split_parameter(
    shape: tuple[int, ...],
    dim: int,
    boundary: Boundary,
    *,
    parts: tuple[int, ...] = (),
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Parameter:
    """Return this rank's piece of a parameter, without values, with its place written on it.

    Args:
        shape: of the whole parameter.
        dim: the dimension that is divided over the ranks.
        boundary: what the module takes and returns.
        parts: sizes along `dim` of pieces that are packed into one and divided each by itself.
    """
    shard = Shard(shape, dim, parts, state.tp_rank, state.tp_size, *boundary.split_reduction)
    parameter = nn.Parameter(torch.empty(shard.local_shape, device=device, dtype=dtype))
    mark(parameter, shard)
    return parameter


def whole_parameter(
    shape: tuple[int, ...],
    boundary: Boundary,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Parameter:
    """Return a parameter that all ranks hold and use on the values between modules, without values."""
    parameter = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
    mark_whole(parameter, boundary)
    return parameter


def mark_whole(parameter: torch.Tensor, boundary: Boundary) -> None:
    """Write on a parameter that all ranks hold it, unless it is an ordinary one of data parallelism."""
    group, scale = boundary.whole_reduction
    if state.tp_size > 1 and (group, scale) != (CommGroup.DP_GROUP, 1.0):
        mark(parameter, Shard(tuple(parameter.shape), None, (), state.tp_rank, state.tp_size, group, scale))
