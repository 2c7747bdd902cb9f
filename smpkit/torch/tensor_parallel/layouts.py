"""How the values between distributed modules lie on the tensor-parallel ranks, and what that means for gradients.

==============  =========  ============================================  ===============  =======================
layout          DTensor    a rank holds                                  into a module    out of it
==============  =========  ============================================  ===============  =======================
SHARD_BATCH     Shard(0)   its own samples                               gather on dim 0  reduce-scatter on dim 0
REPLICATE       Replicate  the one batch of all ranks, equal on all      copy             reduce
SHARD_SEQUENCE  Shard(1)   its part of each sequence of that one batch   gather on dim 1  reduce-scatter on dim 1
==============  =========  ============================================  ===============  =======================

The configuration chooses: SHARD_BATCH without `prescaled_batch`, REPLICATE with it. Inside a stack of transformer
layers `optimize: memory` divides the sequences of that one batch: the layout changes once, at the ends of the stack.

How the gradient of a weight becomes that of the mean loss: the ranks that average it, and the factor that follows.

==============  ========================  ==========================================================
layout          sharded weight            replicated weight, used on the values in between
==============  ========================  ==========================================================
SHARD_BATCH     RDP_GROUP, 1 / tp_size    DP_GROUP, 1              (it has seen this rank's samples)
REPLICATE       RDP_GROUP, 1              DP_GROUP, 1                                     (all, too)
SHARD_SEQUENCE  RDP_GROUP, 1              DP_GROUP, tp_size     (a part of what makes one gradient)
==============  ========================  ==========================================================
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import nn

from smpkit.errors import ConfigError, Problem
from smpkit.plan.mesh import CommGroup
from smpkit.torch.core.runtime import state
from smpkit.torch.placement.delayed import is_delayed
from smpkit.torch.placement.shards import TpShard, is_tp_shard, mark, take_shard
from smpkit.torch.tensor_parallel import collectives


class Layout(Enum):
    """The part that a tensor-parallel rank holds of the values between distributed modules: the first table above."""

    SHARD_BATCH = "batch"
    REPLICATE = "replicate"
    SHARD_SEQUENCE = "sequence"

    @property
    def dim(self) -> int | None:
        """The dimension that is divided over the ranks; None where all hold the same."""
        return {Layout.SHARD_BATCH: 0, Layout.SHARD_SEQUENCE: 1}.get(self)

    @property
    def shard_reduction(self) -> tuple[CommGroup, float]:
        """Group and scale of a weight that is divided over the ranks; see `TpShard`."""
        return CommGroup.RDP_GROUP, 1 / state.tp_size if self is Layout.SHARD_BATCH else 1.0

    @property
    def replicated_reduction(self) -> tuple[CommGroup, float]:
        """Group and scale of a weight that all ranks hold and use on the values in between; see `TpShard`."""
        return CommGroup.DP_GROUP, float(state.tp_size) if self is Layout.SHARD_SEQUENCE else 1.0


def default_layout() -> Layout:
    """Return the layout of what distributed modules take and return, by the configuration."""
    return Layout.REPLICATE if state.cfg.prescaled_batch else Layout.SHARD_BATCH


def stack_layout() -> Layout:
    """Return the layout between the layers of a transformer stack, by the configuration."""
    divides_sequences = state.cfg.prescaled_batch and state.cfg.optimize == "memory"
    return Layout.SHARD_SEQUENCE if divides_sequences else default_layout()


def enter_region(x: torch.Tensor, boundary: Layout) -> torch.Tensor:
    """Return all values of the group, as a weight that is divided by output features needs them."""
    return collectives.copy_to_tp(x) if boundary.dim is None else collectives.gather_to_tp(x, boundary.dim)


def leave_region(x: torch.Tensor, boundary: Layout) -> torch.Tensor:
    """Sum the results of weights that are divided by input features, and return this rank's part of the sum."""
    if boundary.dim is None:
        return collectives.reduce_from_tp(x)
    return collectives.reduce_scatter_from_tp(x, boundary.dim)


def gather_indices(indices: torch.Tensor, boundary: Layout) -> torch.Tensor:
    """Return the indices (or labels, masks: what has no gradient) of all samples of the group."""
    if boundary is not Layout.SHARD_BATCH:
        return indices
    with torch.no_grad():
        return collectives.gather_to_tp(indices, 0)


def check_divisible(what: str, value: int) -> None:
    """Raise ConfigError unless the tensor-parallel ranks divide `value`."""
    if value % state.tp_size:
        message = f"{what} {value} is not divisible by tensor_parallel_degree {state.tp_size}"
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
    """Return this rank's piece of a parameter of `shape` that is divided along `dim`, uninitialised, with its mark.

    Args:
        boundary: what the module takes and returns.
        parts: sizes along `dim` of pieces that are packed into one, each divided by itself.
    """
    shard = TpShard(shape, dim, parts, state.tp_rank, state.tp_size, *boundary.shard_reduction)
    parameter = nn.Parameter(torch.empty(shard.local_shape, device=device, dtype=dtype))
    mark(parameter, shard)
    return parameter


def divide_parameter(parameter: torch.Tensor, dim: int, *, packed: bool = False) -> None:
    """Make a parameter this rank's piece of itself; the object stays, so modules that share it share the piece.

    Args:
        packed: two weights lie in it along `dim`, and each is divided by itself.
    """
    if is_tp_shard(parameter):
        return  # shared, and divided already for the other module that has it
    shape = tuple(parameter.shape)
    parts = (shape[dim] // 2,) * 2 if packed else ()
    shard = TpShard(shape, dim, parts, state.tp_rank, state.tp_size, *default_layout().shard_reduction)
    if isinstance(parameter, nn.Parameter) and is_delayed(parameter):
        parameter.data = parameter.data.new_empty(()).expand(shard.local_shape)
    else:
        parameter.data = take_shard(parameter.data, shard)
    mark(parameter, shard)


def mark_replicated(parameter: nn.Parameter, boundary: Layout) -> nn.Parameter:
    """Mark a parameter that all ranks hold, unless it is reduced as any other of data parallelism, and return it."""
    group, scale = boundary.replicated_reduction
    if state.tp_size > 1 and (group, scale) != (CommGroup.DP_GROUP, 1.0):
        mark(parameter, TpShard(tuple(parameter.shape), None, (), state.tp_rank, state.tp_size, group, scale))
    return parameter
