"""The repeated blocks of a model: what sharded data parallelism gathers one at a time."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator

from torch import nn


def repeated_blocks(root: nn.Module) -> list[nn.Module]:
    """Return the modules that are gathered one at a time: those that a list or sequence of the model repeats.

    The outermost are taken, without those that share a parameter with the rest of the model.
    """
    blocks = list(_outermost(root))
    # A parameter that two blocks share, or a block and the rest of the model, cannot be gathered with one of them.
    num_blocks = Counter(id(parameter) for block in blocks for parameter in block.parameters())
    num_uses = _uses_of_parameters(root)
    return [
        block
        for block in blocks
        if all(num_blocks[key] == 1 and num_uses[key] == count for key, count in _uses_of_parameters(block).items())
    ]


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    children = [child for child in module.children() if next(child.parameters(), None) is not None]
    most = max(Counter(type(child) for child in children).values(), default=0)
    repeats = isinstance(module, nn.ModuleList | nn.Sequential) and most > 1
    for child in children:
        yield from _called(child) if repeats else _outermost(child)


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module, or what lies in it if it is a list or dict of modules: those are never called themselves."""
    # Not the attribute itself: the class of a scripted module raises where it is read.
    if inspect.getattr_static(type(module), "forward") is not nn.Module.forward:
        yield module
        return
    for child in module.children():
        yield from _called(child)


def _uses_of_parameters(root: nn.Module) -> Counter[int]:
    """Return how many modules have each parameter (by its id) for their own."""
    return Counter(id(param) for module in root.modules() for param in module._parameters.values() if param is not None)
