"""What modules are called: their paths in the wrapped model, as in its state dict."""

from __future__ import annotations

import weakref

from torch import nn

from smpkit.torch.state import state

__all__ = ["name_of"]


class _Known:
    """The names of the model that was asked about last."""

    def __init__(self) -> None:
        self.root: weakref.ref[nn.Module] | None = None
        self.names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


_known = _Known()


def name_of(module: nn.Module) -> str:
    """Return the path of a module in the wrapped model, or the name of its class if it is in none."""
    root = None if state.model is None else state.model.module
    if root is not None and (_known.root is None or _known.root() is not root):
        _known.root = weakref.ref(root)
        _known.names = weakref.WeakKeyDictionary({each: name for name, each in root.named_modules() if name})
    return _known.names.get(module) or type(module).__name__
