"""Helpers that public scripts import from `torch.utils` and `test.torch.utils` of `smdistributed.modelparallel`."""

from __future__ import annotations

import os

import torch

from smpkit.torch.checkpoints.save_load import load, save
from smpkit.torch.core.runtime import WrappedModel, state
from smpkit.torch.placement.shards import shard_of


def get_distribution_axis(param: torch.Tensor) -> int | None:
    """Return the axis along which tensor parallelism divides a parameter; None if this rank holds all of it."""
    shard = shard_of(param)
    return None if shard is None else shard.dim


def rmsg(message: str) -> str:
    """Return a message with this rank before it."""
    return f"[rank {state.rank}] {message}" if state.initialized else message


def dump_model(model: WrappedModel, path: str | os.PathLike[str]) -> None:
    """Save this rank's parameters and buffers, in a file with the name that `smp.save` gives it."""
    save(_tensors_of(model), path)


def verify(
    model: WrappedModel, path: str | os.PathLike[str], rtol: float | None = None, atol: float | None = None
) -> None:
    """Compare this rank's parameters and buffers with those that `dump_model` saved with the same degrees.

    `torch.testing.assert_close`, which takes `rtol` and `atol`, raises AssertionError and names the first that differs.
    """
    torch.testing.assert_close(_tensors_of(model), load(path), rtol=rtol, atol=atol)


def _tensors_of(model: WrappedModel) -> dict[str, torch.Tensor]:
    values = model.local_state_dict()
    return {name: value.detach().cpu() for name, value in values.items() if isinstance(value, torch.Tensor)}
