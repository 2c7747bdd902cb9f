"""The repeated blocks of a model: what sharded data parallelism gathers one at a time."""

from __future__ import annotations

from collections import Counter

from torch import nn

__all__ = ["repeated_blocks"]


def repeated_blocks(root: nn.Module) -> list[nn.Module]:
    """Return the modules that are gathered one at a time: those that a list or sequence of the model repeats.

    The outermost are taken, without those that share a parameter with the rest of the model.
    """
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        children = [child for child in module.children() if next(child.parameters(), None) is not None]
        most = max(Counter(type(child) for child in children).values(), default=0)
        if isinstance(module, nn.ModuleList | nn.Sequential) and most > 1:
            found.extend(children)
            return
        for child in children:
            visit(child)

    visit(root)
    inside = Counter(id(parameter) for block in found for parameter in block.parameters())
    all_uses = Counter(
        id(parameter) for module in root.modules() for parameter in module._parameters.values() if parameter is not None
    )
    own_uses = [
        Counter(id(p) for module in block.modules() for p in module._parameters.values() if p is not None)
        for block in found
    ]
    return [
        block
        for block, own in zip(found, own_uses, strict=True)
        if all(inside[key] == 1 and all_uses[key] == count for key, count in own.items())
    ]
