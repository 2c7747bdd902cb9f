"""What scripts for sharded data parallelism save beside a checkpoint, for tools that put the shards together."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from smpkit.torch.core.runtime import WrappedOptimizer

__all__ = ["get_buffer_names", "get_param_shapes"]


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
