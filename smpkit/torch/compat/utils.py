"""Helpers that public SMP v1 scripts import from `smdistributed.modelparallel.torch.utils`."""

from __future__ import annotations

import torch

from smpkit.torch.core.runtime import state
from smpkit.torch.placement.shards import shard_of


def get_distribution_axis(param: torch.Tensor) -> int | None:
    """Return the axis along which tensor parallelism divides a parameter; None if this rank holds all of it."""
    shard = shard_of(param)
    return None if shard is None else shard.dim


def rmsg(message: str) -> str:
    """Return a message with this rank before it."""
    return f"[rank {state.rank}] {message}" if state.initialized else message
