"""`dump_model` and `verify`, which public scripts import from `smdistributed.modelparallel.test.torch.utils`."""

from __future__ import annotations

import os

import torch

from smpkit.torch.checkpoints.save_load import load, save
from smpkit.torch.core.runtime import WrappedModel


def dump_model(model: WrappedModel, path: str | os.PathLike[str]) -> None:
    """Save this rank's parameters and buffers, in a file with the name that `smp.save` gives it."""
    save(_tensors_of(model), path)


def verify(
    model: WrappedModel, path: str | os.PathLike[str], rtol: float | None = None, atol: float | None = None
) -> None:
    """Compare this rank's parameters and buffers with those that `dump_model` saved with the same degrees.

    Raises:
        AssertionError: they differ; `torch.testing.assert_close`, which takes `rtol` and `atol`, names the first.
    """
    torch.testing.assert_close(_tensors_of(model), load(path), rtol=rtol, atol=atol)


def _tensors_of(model: WrappedModel) -> dict[str, torch.Tensor]:
    values = model.local_state_dict()
    return {name: value.detach().cpu() for name, value in values.items() if isinstance(value, torch.Tensor)}
