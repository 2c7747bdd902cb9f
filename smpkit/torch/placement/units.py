"""Cut a model into units, the smallest parts that a pipeline rank may hold, by the rules of `plan.partition.units`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import torch
from torch import nn

from smpkit.plan.partition.assignment import UnitCost
from smpkit.plan.partition.units import Node, cut_into_units

_UNCUT: Final = (nn.AdaptiveLogSoftmaxWithLoss,)
"""Classes of torch that are never cut: what their parts compute depends on values."""


def units_of(module: nn.Module, split: Collection[str] = ()) -> list[UnitCost]:
    """Cut a model into units; a leaf without parameters is none, and runs on the rank that has its input.

    Args:
        split: names of modules that must be cut, because the user placed their parts apart.
    """
    return [unit for unit in cut_into_units(_node(module, "", set()), split) if unit.parameters_bytes]


def _node(module: nn.Module, name: str, seen: set[int]) -> Node:
    """Describe a module to the planner; one that appears twice (its id is in `seen`) is listed once."""
    seen.add(id(module))
    children = []
    is_whole = isinstance(module, _UNCUT)
    if not is_whole:
        for child_name, child in module.named_children():
            if id(child) not in seen:
                children.append(_node(child, f"{name}.{child_name}" if name else child_name, seen))
    owned = [*module.parameters(recurse=is_whole), *_statistics(module)]
    return Node(
        name,
        type(module).__qualname__,
        is_stack=isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict),
        children=tuple(children),
        parameters={str(id(each)): each.numel() * each.element_size() for each in owned},
    )


def _statistics(module: nn.Module) -> list[torch.Tensor]:
    """Return the buffers of a module of torch's own, such as BatchNorm's statistics.

    Its calls change them, so it has to be placed on a rank even if it has no parameters.
    """
    return list(module.buffers(recurse=False)) if type(module).__module__.startswith("torch.nn") else []
