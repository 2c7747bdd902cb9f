"""What scripts for sharded data parallelism save beside a checkpoint, for tools that put the shards together."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path

import torch
from torch import nn

from smpkit.torch.checkpoints.export import find_checkpoint, sources_in
from smpkit.torch.checkpoints.folder import PARTIAL
from smpkit.torch.checkpoints.reader import CheckpointReader, read_whole
from smpkit.torch.core.runtime import WrappedOptimizer

__all__ = ["get_buffer_names", "get_full_state_dict_from_sharded_data_parallel_checkpoint", "get_param_shapes"]


def get_buffer_names(model: nn.Module) -> list[str]:
    """Return the names of the buffers that a state dict of the model has."""
    parameters = {name for name, _ in model.named_parameters()}
    return [name for name in model.state_dict() if name not in parameters]


def get_param_shapes(model: nn.Module, optimizer: WrappedOptimizer) -> list[OrderedDict[str, torch.Size]]:
    """Return the whole shape of each parameter by name, for each parameter group of the optimizer."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        of_model = [optimizer.model_parameter(parameter) for parameter in group["params"]]
        groups.append(OrderedDict((names[id(each)], each.shape) for each in of_model if id(each) in names))
    return groups


def get_full_state_dict_from_sharded_data_parallel_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    dtype: torch.dtype = torch.float32,
    tag: str | None = None,
    remove_smp_prefix: bool = True,
) -> OrderedDict[str, torch.Tensor]:
    """Return the whole state dict of a partial checkpoint of `smp.save_checkpoint`, of master weights if it has some.

    Args:
        checkpoint_dir: the folder that checkpoints are saved in.
        dtype: of what is returned.
        tag: of the checkpoint; None: the newest.
        remove_smp_prefix: False puts `module.` before each name, as SMP v1 had it.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    folder = Path(checkpoint_dir)
    if tag is not None:
        folder /= tag if tag.endswith(PARTIAL) else f"{tag}{PARTIAL}"
    reader = CheckpointReader(find_checkpoint(folder))
    sources, _ = sources_in(reader)
    prefix = "" if remove_smp_prefix else "module."
    return OrderedDict((prefix + name, read_whole(reader, source, dtype)) for name, source in sources.items())
