"""Initialise as SMP v1 did: distributed modules draw weights of their own, unless the script has written others.

Public scripts rely on it, and switch Hugging Face's initialisation off. So what their constructors make is remembered:
`smp.DistributedModel` can then tell weights that were loaded, and weights that nothing has ever written.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from smpkit.torch.core.construction import observe_construction
from smpkit.torch.core.tensor_spec import map_tensors
from smpkit.torch.placement.unwritten import mark_unwritten, remember_weights, remembering_moves
from smpkit.torch.tensor_parallel.registry import rule_for

__all__ = ["install"]


def install() -> None:
    """Observe how modules are made from now on; a second call changes nothing."""
    if nn.Module.__new__ is not object.__new__:
        return
    observe_construction(_constructor)
    nn.Module._apply = remembering_moves(nn.Module._apply)  # type: ignore[method-assign]
    nn.Module.to_empty = _marked_as_unwritten(nn.Module.to_empty)  # type: ignore[method-assign,assignment]


@contextlib.contextmanager
def _constructor(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    with mark_unwritten():
        yield
    # Weights that were handed over (`nn.Embedding.from_pretrained`) are written by the script.
    if rule_for(module) is not None and not _has_tensors((args, kwargs)):
        remember_weights(module)


def _has_tensors(arguments: Any) -> bool:
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, arguments)
    return bool(found)


def _marked_as_unwritten(to_empty: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Return an `nn.Module.to_empty` (of `torch.nn.utils.skip_init`, say) whose memory is told from written one."""

    @functools.wraps(to_empty)
    def marked(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        with mark_unwritten():
            return to_empty(self, *args, **kwargs)

    return marked
