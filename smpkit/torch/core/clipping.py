"""torch's own clipping, where `parameter.grad` is not what the optimizer will use.

Scripts import `clip_grad_norm_` and `clip_grad_value_` by name, so these cannot be replaced; the helpers that they look
up on every call can. An optimizer that uses gradients up in backward leaves `parameter.grad` as None, and clipping
would find none: that is refused here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol
from weakref import WeakSet

import torch.nn.utils.clip_grad as torch_clip_grad
from torch import Tensor

from smpkit.errors import UsageError

__all__ = ["GradientHolder", "check_not_held", "hold_gradients", "replace_in_torch"]


class GradientHolder(Protocol):
    """An optimizer that holds gradients."""

    def holds_gradients_of(self) -> Iterable[Tensor]:
        """Return the parameters whose gradients it takes now."""


_holders: Final[WeakSet[GradientHolder]] = WeakSet()


def replace_in_torch(name: str, replacement: Callable[..., Any]) -> Callable[[], None]:
    """Let torch's clipping call `replacement(original, ...)` for a helper; return what puts the original back.

    Args:
        name: a private function of `torch.nn.utils.clip_grad`, as torch 2.11 to 2.13 have it; one that another torch
            does not have is left alone.
    """
    original = getattr(torch_clip_grad, name, None)
    if original is None:
        return lambda: None
    setattr(torch_clip_grad, name, functools.partial(replacement, original))
    return functools.partial(setattr, torch_clip_grad, name, original)


def hold_gradients(holder: GradientHolder) -> None:
    """Refuse to clip gradients that `holder` holds, as long as it lives."""
    _holders.add(holder)
    for name, check in (("_clip_grads_with_norm_", _check_norm), ("_group_tensors_by_device_and_dtype", _check_value)):
        if getattr(getattr(torch_clip_grad, name, None), "func", None) is not check:
            replace_in_torch(name, check)


def check_not_held(parameters: Iterable[Tensor]) -> None:
    """Raise UsageError where an optimizer holds the gradient of a parameter."""
    held = {id(each) for holder in _holders for each in holder.holds_gradients_of()}
    if held and any(id(each) in held for each in parameters):
        raise _refusal("clip_grad_norm_")


def _check_norm(original: Callable[..., None], parameters: Iterable[Tensor], *args: Any, **kwargs: Any) -> None:
    known = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    check_not_held(known)
    original(known, *args, **kwargs)


def _check_value(original: Callable[..., Any], lists: list[list[Tensor]], *args: Any, **kwargs: Any) -> Any:
    # `clip_grad_value_` alone comes here without any gradient.
    if not any(lists) and any(True for holder in _holders for _ in holder.holds_gradients_of()):
        raise _refusal("clip_grad_value_")
    return original(lists, *args, **kwargs)


def _refusal(name: str) -> UsageError:
    return UsageError(
        f"{name} would clip nothing: these gradients go to an OffloadOptimizer, not to `parameter.grad`",
        hint='give it overlap="forward"; then gradients wait in `parameter.grad`, or it clips by max_grad_norm=...',
    )
