"""What looks at parameters before somebody clips their gradients, and optimizers that use gradients up in backward.

Behind such a backward `parameter.grad` is None: clipping would find none, and return 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol
from weakref import WeakSet

import torch.nn.utils.clip_grad as torch_clip_grad
from torch import Tensor

from smpkit.errors import UsageError

__all__ = ["GradientHolder", "before_torch_clips", "check_not_held", "hold_gradients"]

_TORCH_FUNCTION: Final = "_clip_grads_with_norm_"
"""The helper with which `torch.nn.utils.clip_grad_norm_` scales gradients, in torch 2.6 to 2.13 at least."""
_torch_function: Final[Callable[..., None] | None] = getattr(torch_clip_grad, _TORCH_FUNCTION, None)
_checks: Final[list[Callable[[Sequence[Tensor]], None]]] = []


class GradientHolder(Protocol):
    """An optimizer that holds gradients."""

    def holds_gradients_of(self) -> Iterable[Tensor]:
        """Return the parameters whose gradients it takes now."""


_holders: Final[WeakSet[GradientHolder]] = WeakSet()


def before_torch_clips(check: Callable[[Sequence[Tensor]], None]) -> None:
    """Call `check` with the parameters whose gradients torch's own `clip_grad_norm_` is about to scale."""
    # Scripts import that function by name, so it cannot be replaced; the helper that it looks up on every call can.
    if check not in _checks:
        _checks.append(check)
    if _torch_function is not None:
        setattr(torch_clip_grad, _TORCH_FUNCTION, _check_and_clip)


def _check_and_clip(parameters: list[Tensor], *args: Any, **kwargs: Any) -> None:
    for check in _checks:
        check(parameters)
    assert _torch_function is not None
    _torch_function(parameters, *args, **kwargs)


def hold_gradients(holder: GradientHolder) -> None:
    """Refuse to clip gradients that `holder` holds, as long as it lives."""
    _holders.add(holder)
    before_torch_clips(check_not_held)


def check_not_held(parameters: Iterable[Tensor]) -> None:
    """Raise UsageError where an optimizer holds the gradient of a parameter."""
    held = {id(each) for holder in _holders for each in holder.holds_gradients_of()}
    if held and any(id(each) in held for each in parameters):
        raise UsageError(
            "clip_grad_norm_ would clip nothing: these gradients go to an OffloadOptimizer, not to `parameter.grad`",
            hint='give it overlap="forward"; then gradients wait in `parameter.grad`, or it clips by max_grad_norm=...',
        )
