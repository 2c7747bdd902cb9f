"""`dump_model` and `verify`, which public scripts import from `smdistributed.modelparallel.test.torch.utils`.

They are for debugging: save what a rank holds of a model, and compare another run with it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from smpkit.errors import UsageError
from smpkit.torch.checkpoints.save_load import load, save
from smpkit.torch.core.runtime import WrappedModel, state

__all__ = ["dump_model", "verify"]


def dump_model(model: WrappedModel, path: str | os.PathLike[str]) -> None:
    """Save this rank's parameters and buffers, in a file with the name that `smp.save` gives it.

    Raises:
        CheckpointError: the file cannot be written.
    """
    save(_tensors_of(model), path)


def verify(
    model: WrappedModel, path: str | os.PathLike[str], rtol: float | None = None, atol: float | None = None
) -> None:
    """Compare this rank's parameters and buffers with those that `dump_model` saved with the same degrees.

    Args:
        rtol, atol: as in `torch.testing.assert_close`, which chooses them by dtype.

    Raises:
        AssertionError: they differ; the message names the first one that does.
        UsageError: the saved ones have other names.
        CheckpointError: there is no such file.
    """
    saved, now = load(path), _tensors_of(model)
    if saved.keys() != now.keys():
        other = sorted(saved.keys() ^ now.keys())
        raise UsageError(
            f"{Path(path)} was saved from another model or another partition: it differs in `{other[0]}`",
            hint="verify with the degrees and the partition that dump_model ran with",
        )
    for name, tensor in now.items():
        msg = functools.partial("`{}` on rank {}: {}".format, name, state.rank)
        torch.testing.assert_close(tensor, saved[name], rtol=rtol, atol=atol, msg=msg)


def _tensors_of(model: WrappedModel) -> Mapping[str, torch.Tensor]:
    values = model.local_state_dict()
    return {name: value.detach().cpu() for name, value in values.items() if isinstance(value, torch.Tensor)}
