"""Modules whose weight another module reads by itself, so that they stay whole.

A divided module returns what the whole one would, but its weight is a piece: `self.rel_embeddings.weight`, which the
encoder of a DeBERTa hands to its layers, would have some of the columns. A wrong number comes of `self.lm_head.weight`
in a forward that computes its loss from it.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


def weight_readers(root: nn.Module) -> dict[nn.Module, list[nn.Module]]:
    """Return the modules in a model whose weight the forwards of others read, each with those others."""
    readers: dict[nn.Module, list[nn.Module]] = {}
    for reader in root.modules():
        kind: Any = type(reader)
        forward = getattr(reader.forward, "__func__", reader.forward)
        # torch's own forwards do it in evaluation, for a kernel that divided modules rule out.
        if getattr(forward, "__module__", "").startswith("torch."):
            continue
        for path in _paths_read(kind, forward):
            try:
                readers.setdefault(reader.get_submodule(path), []).append(reader)
            except AttributeError:  # the option that makes it is off
                continue
    return readers


@functools.lru_cache(maxsize=1024)
def _paths_read(kind: Any, forward: Callable[..., Any]) -> list[str]:
    """Return `a.b` for each `self.a.b.weight` in a forward, or in methods that are called from there."""
    paths, seen, functions = dict[str, None](), set[Any](), [forward]
    while functions:
        function = inspect.unwrap(functions.pop())
        if function in seen:
            continue
        seen.add(function)
        for name in _names_read(function):
            path, _, last = name.rpartition(".")
            if path and last == "weight":
                paths[path] = None
            elif not path and inspect.isfunction(method := getattr(kind, last, None)):
                functions.append(method)
    return [*paths]


def _names_read(function: Callable[..., Any]) -> Iterator[str]:
    """Yield `a.b` for each `self.a.b` that a method reads: not to look at its dtype or device, as T5 does."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # written in C, or at a prompt
        return
    looked_at: set[ast.expr] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("dtype", "device"):
            looked_at.add(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            looked_at.add(node.args[0])
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node not in looked_at:
            owner, _, name = ast.unparse(node).partition(".")
            if owner == "self":
                yield name
