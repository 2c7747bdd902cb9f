"""Cut a model into units: the smallest subtrees that we are willing to place on a pipeline rank.

A unit runs whole on one rank, at native speed. A module that is no unit *spans*: its own `forward` runs on every rank
and calls units on several. Units depend on the model alone, never on the number of ranks, because random streams and
checkpoints are keyed by them::

    model            spans                      encoder           stack of stages   spans
    ├── embed        unit (a leaf)              ├── 0             spans: it holds a stack of blocks
    ├── layers       stack, spans               │   └── blocks    stack, spans
    │   ├── 0        unit (child of a stack)    │       ├── 0     unit
    │   └── 1        unit                       │       └── 1     unit
    └── head         unit (a leaf)              └── 1 ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import Final

import torch
from torch import nn

from smpkit.plan.partition.assignment import UnitCost

_UNCUT: Final = (nn.AdaptiveLogSoftmaxWithLoss,)
"""Classes of torch that are never cut: what their parts compute depends on values."""


def units_of(model: nn.Module, split: Collection[str] = ()) -> list[UnitCost]:
    """Return the units of a model in the order of definition; what they cost beside memory is not known yet.

    From the top down, each of these is a unit:

    - a leaf;
    - a child of a stack, unless it holds a stack of blocks itself: a stack with two children of one class that have
      children of their own;
    - a module with parameters of its own and no stack below, such as `MultiheadAttention`, which reads its children's
      weights instead of calling them; but not the model itself;
    - a module with a stack of experts, for which values decide what each gets: only one rank can follow that. Such a
      stack is known by its name (`experts`), and is none of blocks.

    One without parameters is none: it runs on the rank that has its input.

    Args:
        split: names of modules that are cut in any case, because parts of them were placed apart by hand.
    """
    tree = _Tree(model)
    bytes_of = {unit: tree.bytes_of(unit) for unit in _cut(tree, model, split, in_stack=False)}
    holders = Counter(key for parameters in bytes_of.values() for key in parameters)
    return [
        UnitCost(
            tree.names[unit],
            sum(parameters.values()),
            shared={key: num_bytes for key, num_bytes in parameters.items() if holders[key] > 1},
        )
        for unit, parameters in bytes_of.items()
        if any(parameters.values())
    ]


class _Tree:
    """The modules of a model; one that appears twice is listed once, where it is first."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {module: name for name, module in model.named_modules()}

    def children(self, module: nn.Module) -> list[nn.Module]:
        if isinstance(module, _UNCUT):
            return []
        prefix = f"{self.names[module]}." if self.names[module] else ""
        return [child for key, child in module.named_children() if self.names[child] == prefix + key]

    def walk(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yield a module and all below it."""
        yield module
        for child in self.children(module):
            yield from self.walk(child)

    def bytes_of(self, module: nn.Module) -> dict[str, int]:
        """Return the bytes of each parameter (and buffer) in a module, by a key that is equal for tied ones."""
        owned = [tensor for below in self.walk(module) for tensor in _owned(below)]
        return {str(id(tensor)): tensor.numel() * tensor.element_size() for tensor in owned}


def _cut(tree: _Tree, module: nn.Module, split: Collection[str], in_stack: bool) -> Iterator[nn.Module]:
    """Yield the units of a subtree."""
    is_split = tree.names[module] in split
    if not is_split and _is_unit(tree, module, in_stack):
        yield module
        return
    for child in tree.children(module):
        yield from _cut(tree, child, split, in_stack=_is_stack(module) or is_split)


def _is_unit(tree: _Tree, module: nn.Module, in_stack: bool) -> bool:
    name, children = tree.names[module], tree.children(module)
    if _is_stack(module) or not children:
        return not _is_stack(module)
    if name and any(_is_stack_of_experts(tree, child) for child in children):
        return True
    if in_stack:
        return not any(_is_stack_of_blocks(tree, below) for below in tree.walk(module))
    # The model itself is never one (its name is empty): there would be nothing left to place.
    return bool(name and _owned(module)) and not any(map(_is_stack, tree.walk(module)))


def _is_stack(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)


def _is_stack_of_blocks(tree: _Tree, module: nn.Module) -> bool:
    blocks = Counter(type(child).__qualname__ for child in tree.children(module) if tree.children(child))
    return _is_stack(module) and any(count > 1 for count in blocks.values()) and not _is_stack_of_experts(tree, module)


def _is_stack_of_experts(tree: _Tree, module: nn.Module) -> bool:
    return _is_stack(module) and "expert" in tree.names[module].rpartition(".")[2].lower()


def _owned(module: nn.Module) -> list[torch.Tensor]:
    """Return the parameters of a module's own, and the buffers of one of torch's own, such as BatchNorm's statistics.

    Its calls change these, so it has to be placed on a rank even if it has no parameters.
    """
    statistics = list(module.buffers(recurse=False)) if type(module).__module__.startswith("torch.nn") else []
    return [*module.parameters(recurse=isinstance(module, _UNCUT)), *statistics]
