"""How the values between distributed modules lie on the tensor-parallel ranks, and what that means for gradients.

==================  =========  ============================================  ===============  =======================
layout              DTensor    a rank holds                                  into a module    out of it
==================  =========  ============================================  ===============  =======================
SHARD_BATCH         Shard(0)   its own samples                               gather on dim 0  reduce-scatter on dim 0
REPLICATE_GATHERED  Replicate  the samples of all ranks, equal on all        copy             reduce
REPLICATE           Replicate  the one batch of all ranks, equal on all      copy             reduce
SHARD_SEQUENCE      Shard(1)   its part of each sequence of that one batch   gather on dim 1  reduce-scatter on dim 1
==================  =========  ============================================  ===============  =======================

The configuration chooses: SHARD_BATCH without `prescaled_batch`, REPLICATE with it. Inside a stack of transformer
layers the layout changes once, at its ends: `optimize: speed` takes the replicated one of the two (REPLICATE_GATHERED
or REPLICATE), `optimize: memory` the sharded one (SHARD_BATCH or SHARD_SEQUENCE).

How the gradient of a weight becomes that of the mean loss: the ranks that average it, and the factor that follows.

==================  ===========================  ==========================================================
layout              sharded weight               replicated weight, used on the values in between
==================  ===========================  ==========================================================
SHARD_BATCH         RDP_GROUP, 1 / tp_size       DP_GROUP, 1              (it has seen this rank's samples)
REPLICATE_GATHERED  RDP_GROUP, 1 / tp_size       RDP_GROUP, 1 / tp_size               (those of all ranks)
REPLICATE           RDP_GROUP, 1                 DP_GROUP, 1                                     (all, too)
SHARD_SEQUENCE      RDP_GROUP, 1                 DP_GROUP, tp_size     (a part of what makes one gradient)
==================  ===========================  ==========================================================
"""

from __future__ import annotations

from enum import Enum
from typing import Final

import torch
import torch.distributed as dist
from torch import nn

from smpkit.errors import ConfigError, Problem, UsageError
from smpkit.plan.mesh import CommGroup
from smpkit.torch.core.runtime import state
from smpkit.torch.distributed.deadline import waiting
from smpkit.torch.placement.shards import TpShard, mark
from smpkit.torch.tensor_parallel import collectives

__all__ = [
    "Layout",
    "check_divisible",
    "check_same_shape",
    "default_layout",
    "enter_region",
    "leave_region",
    "mark_replicated",
    "new_replicated_parameter",
    "new_shard_parameter",
    "stack_layout",
]


class Layout(Enum):
    """The part that a tensor-parallel rank holds of the values between distributed modules."""

    SHARD_BATCH = "batch"
    """Its own samples."""
    REPLICATE_GATHERED = "gathered"
    """The samples of all ranks of the group: equal on all of them, and the loss of each is that of its own samples."""
    REPLICATE = "replicate"
    """The one batch that all ranks of the group have (`prescaled_batch`)."""
    SHARD_SEQUENCE = "sequence"
    """A part of each sequence of that batch: dimension 1 is divided."""

    @property
    def is_replicated(self) -> bool:
        """Whether all ranks hold the same values."""
        return self in (Layout.REPLICATE_GATHERED, Layout.REPLICATE)

    @property
    def dim(self) -> int | None:
        """The dimension that is divided over the ranks; None where all hold the same."""
        return {Layout.SHARD_BATCH: 0, Layout.SHARD_SEQUENCE: 1}.get(self)

    @property
    def shard_reduction(self) -> tuple[CommGroup, float]:
        """Group and scale of a weight that is divided over the ranks; see `TpShard`."""
        losses_add_up = self in (Layout.SHARD_BATCH, Layout.REPLICATE_GATHERED)
        return CommGroup.RDP_GROUP, 1 / state.tp_size if losses_add_up else 1.0

    @property
    def replicated_reduction(self) -> tuple[CommGroup, float]:
        """Group and scale of a weight that all ranks hold and use on the values in between; see `TpShard`."""
        if self is Layout.REPLICATE_GATHERED:
            return CommGroup.RDP_GROUP, 1 / state.tp_size
        return CommGroup.DP_GROUP, float(state.tp_size) if self is Layout.SHARD_SEQUENCE else 1.0


def default_layout() -> Layout:
    """Return the layout of what distributed modules take and return, by the configuration."""
    return Layout.REPLICATE if state.cfg.prescaled_batch else Layout.SHARD_BATCH


def stack_layout() -> Layout:
    """Return the layout between the layers of a transformer stack, by the configuration."""
    if state.cfg.optimize == "speed":
        return Layout.REPLICATE if state.cfg.prescaled_batch else Layout.REPLICATE_GATHERED
    return Layout.SHARD_SEQUENCE if state.cfg.prescaled_batch else Layout.SHARD_BATCH


def enter_region(x: torch.Tensor, boundary: Layout) -> torch.Tensor:
    """Return all values of the group, as a weight that is divided by output features needs them.

    Raises:
        UsageError: the ranks hold unequal numbers of samples.
    """
    if boundary.dim is None:
        return collectives.copy_to_tp(x)
    check_same_shape(x)
    return collectives.gather_to_tp(x, boundary.dim)


def leave_region(x: torch.Tensor, boundary: Layout) -> torch.Tensor:
    """Sum the results of weights that are divided by input features, and return this rank's part of the sum.

    Raises:
        UsageError: the ranks do not divide the dimension that the boundary divides.
    """
    return (
        collectives.reduce_from_tp(x) if boundary.dim is None else collectives.reduce_scatter_from_tp(x, boundary.dim)
    )


_compared_shapes: Final[set[tuple[torch.Size, torch.dtype]]] = set()


def check_same_shape(x: torch.Tensor) -> None:
    """Compare a shape between the tensor-parallel ranks, the first time that it is seen here.

    If only one rank has seen its shape before, it does not take part; then the collective fails that the others wait
    in, and each rank's error names the call and its shape.

    Raises:
        UsageError: the shapes differ.
    """
    key = (x.shape, x.dtype)
    if key in _compared_shapes or state.tp_size == 1 or collectives.is_dry_run(x):
        return
    if not _compared_shapes:  # after smp.shutdown() the same process may join other ranks
        state.reset_hooks.append(_compared_shapes.clear)
    group = collectives.tp_group()
    # A message of one size, whatever the rank of the tensor: at most 12 dimensions, the rest is -1.
    mine = torch.full((12,), -1, dtype=torch.int64, device=x.device)
    mine[: min(x.dim(), 12)] = torch.tensor(x.shape[:12], device=x.device)
    shapes_by_rank = [torch.empty_like(mine) for _ in range(state.tp_size)]
    with waiting(f"comparison of shapes ({list(x.shape)} here) between tensor-parallel ranks", group):
        dist.all_gather(shapes_by_rank, mine, group=group)
    shapes = [[size for size in each.tolist() if size >= 0] for each in shapes_by_rank]
    if any(shape != shapes[0] for shape in shapes):
        ranks = dist.get_process_group_ranks(group)
        listed = ", ".join(f"{shape} on rank {rank}" for rank, shape in zip(ranks, shapes, strict=True))
        raise UsageError(
            f"the tensor-parallel ranks brought batches of different shapes: {listed}",
            hint="give every rank as many samples of the same length: `drop_last=True`, padding to a fixed length",
        )
    _compared_shapes.add(key)


def check_divisible(what: str, value: int) -> None:
    """Raise ConfigError unless the tensor-parallel ranks divide `value`."""
    if value % state.tp_size:
        degree = state.tp_size
        message = f"{what} {value} is not divisible by tensor_parallel_degree {degree}"
        raise ConfigError([Problem((), message)], subject="distributed module")


def new_shard_parameter(
    shape: tuple[int, ...],
    dim: int,
    boundary: Layout,
    *,
    parts: tuple[int, ...] = (),
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Parameter:
    """Return this rank's piece of a parameter, uninitialised, with its mark.

    Args:
        shape: of the whole parameter.
        dim: the dimension that is divided over the ranks.
        boundary: what the module takes and returns.
        parts: sizes along `dim` of pieces that are packed into one, each divided by itself.
    """
    shard = TpShard(shape, dim, parts, state.tp_rank, state.tp_size, *boundary.shard_reduction)
    parameter = nn.Parameter(torch.empty(shard.local_shape, device=device, dtype=dtype))
    mark(parameter, shard)
    return parameter


def new_replicated_parameter(
    shape: tuple[int, ...],
    boundary: Layout,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Parameter:
    """Return a parameter, uninitialised, that all ranks hold and use on the values between modules."""
    parameter = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
    mark_replicated(parameter, boundary)
    return parameter


def mark_replicated(parameter: torch.Tensor, boundary: Layout) -> None:
    """Mark a parameter that all ranks hold, unless it is reduced as any other of data parallelism."""
    group, scale = boundary.replicated_reduction
    if state.tp_size > 1 and (group, scale) != (CommGroup.DP_GROUP, 1.0):
        mark(parameter, TpShard(tuple(parameter.shape), None, (), state.tp_rank, state.tp_size, group, scale))
