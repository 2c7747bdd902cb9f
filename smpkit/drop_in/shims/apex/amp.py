"""`apex.amp` with opt_level O0 and O1: `torch.autocast` around the forward, and a loss scale."""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from smpkit.errors import UnsupportedError, UsageError
from smpkit.torch.core.runtime import state
from smpkit.torch.core.tree import map_leaves

__all__ = ["initialize", "load_state_dict", "master_params", "scale_loss", "state_dict"]

_GROWTH_INTERVAL: Final = 2000


@dataclass
class _LossScaler:
    """The scale of one loss: halved when gradients overflow, doubled after 2000 steps in which none did.

    Args:
        scale: what losses are multiplied by.
        dynamic: whether it changes.
        smallest, largest: its bounds.
        unskipped: steps since it changed.
    """

    scale: float
    dynamic: bool
    smallest: float
    largest: float
    unskipped: int = 0

    def update(self, overflow: bool) -> None:
        if not self.dynamic:
            return
        self.unskipped = 0 if overflow else self.unskipped + 1
        if overflow:
            self.scale = max(self.scale / 2.0, self.smallest)
        elif self.unskipped == _GROWTH_INTERVAL:
            self.scale, self.unskipped = min(self.scale * 2.0, self.largest), 0


_scalers: list[_LossScaler] = []
_enabled = True


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Any:
    """Let the models compute under `torch.autocast` in float16 (O1), or as they are (O0).

    Args:
        models, optimizers: one or a list; they are changed in place, and returned as they were given.
        enabled: False leaves everything as it is.
        opt_level: "O0" or "O1".
        loss_scale: a number, or "dynamic", the default of O1.
        num_losses: how many losses have a scale of their own.
        min_loss_scale, max_loss_scale: bounds of a dynamic scale.
        cast_model_outputs: the type of the models' outputs; float32 under O1.
        verbosity: of no importance here.
        cast_model_type, patch_torch_functions, keep_batchnorm_fp32, master_weights: must be left to `opt_level`.

    Raises:
        UnsupportedError: O2 or O3, an argument that contradicts the level, or O1 for a model of SMP.
        UsageError: another opt_level.
    """
    global _enabled  # noqa: PLW0603
    _enabled = enabled
    if enabled:
        _check(opt_level, cast_model_type, master_weights, patch_torch_functions)
        scale = loss_scale if loss_scale is not None else ("dynamic" if opt_level == "O1" else 1.0)
        dynamic = scale == "dynamic"
        first = min(2.0**16, max_loss_scale) if dynamic else float(scale)
        smallest = min_loss_scale or 0.0
        _scalers[:] = [_LossScaler(first, dynamic, smallest, max_loss_scale) for _ in range(num_losses)]
        for model in models if isinstance(models, list | tuple) else [models]:
            if opt_level == "O1":
                model.forward = _autocast(model, model.forward, cast_model_outputs or torch.float32)
    return models if optimizers is None else (models, optimizers)


@contextlib.contextmanager
def scale_loss(
    loss: Any,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Any]:
    """Give the loss times its scale; at the end, divide the gradients of this backward by it.

    If one is not finite, the next `step()` of the optimizers does nothing, and the scale is halved.

    Args:
        loss: of the forward, one number.
        optimizers: one or a list, whose parameters backward gives gradients.
        loss_id: which scale, of the `num_losses` of `initialize`.
        delay_unscale: more backwards follow before the step. (The gradients are divided at once, all the same.)
        model, delay_overflow_check: of no importance here.

    Raises:
        UsageError: before `initialize`.
        UnsupportedError: in a job of SMP, where `model.backward(loss)` only notes the loss.
    """
    if not _enabled:
        yield loss
        return
    if not _scalers:
        raise UsageError(
            "amp.scale_loss was called before amp.initialize", hint="call amp.initialize(model, optimizer)"
        )
    scaler = _scalers[loss_id]
    if scaler.scale == 1.0 and not scaler.dynamic:
        yield loss
        return
    _refuse_under_smp("apex.amp.scale_loss")
    every = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
    parameters = [each for optimizer in every for each in master_params(optimizer)]
    # What earlier backwards gave has been divided already.
    before = {each: each.grad for each in parameters if each.grad is not None}
    for each in before:
        each.grad = None
    scale = scaler.scale
    yield loss.float() * scale
    gradients = [each.grad for each in parameters if each.grad is not None]
    overflow = not all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
    with torch.no_grad():
        if gradients:
            torch._foreach_mul_(gradients, 1.0 / scale)
        for each, gradient in before.items():
            each.grad = gradient if each.grad is None else gradient.add_(each.grad)
    if overflow or not delay_unscale:
        scaler.update(overflow)
    if overflow:
        for optimizer in every:
            _skip_next_step(optimizer)


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    """Yield the parameters of an optimizer, as gradient clipping wants them."""
    for group in optimizer.param_groups:
        yield from group["params"]


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the scales and how many steps they have lasted."""
    result = OrderedDict() if destination is None else destination
    for number, scaler in enumerate(_scalers):
        result[f"loss_scaler{number}"] = {"loss_scale": scaler.scale, "unskipped": scaler.unskipped}
    return result


def load_state_dict(state_dict: dict[str, Any]) -> None:
    """Set the scales to what `state_dict()` returned.

    Raises:
        UsageError: other losses than `initialize` was told of.
    """
    if set(state_dict) != {f"loss_scaler{number}" for number in range(len(_scalers))}:
        raise UsageError(
            f"the state of amp has {len(state_dict)} loss scales, and amp.initialize made {len(_scalers)}",
            hint="call amp.initialize with the same num_losses first",
        )
    for number, scaler in enumerate(_scalers):
        saved = state_dict[f"loss_scaler{number}"]
        scaler.scale, scaler.unskipped = float(saved["loss_scale"]), int(saved["unskipped"])


def _check(opt_level: str, *overrides: Any) -> None:
    instead = '`"fp16": true` in the model-parallel parameters'
    if opt_level in ("O2", "O3"):
        raise UnsupportedError(
            f"amp.initialize got opt_level {opt_level}, which casts the weights", hint=f"use {instead}, or O1"
        )
    if opt_level not in ("O0", "O1"):
        raise UsageError(f"opt_level of amp.initialize must be `O0` or `O1`, with a capital O, got {opt_level!r}")
    cast, masters, patches = overrides
    if cast not in (None, torch.float32) or masters or patches not in (None, opt_level == "O1"):
        hint = f"leave cast_model_type, master_weights and patch_torch_functions out, or use {instead}"
        raise UnsupportedError(f"amp.initialize got arguments that contradict opt_level {opt_level}", hint=hint)
    if opt_level == "O1":
        _refuse_under_smp('apex.amp with opt_level "O1"')


def _refuse_under_smp(what: str) -> None:
    if state.initialized:
        hint = '`"fp16": true` in the model-parallel parameters, or torch.autocast with smp.amp.GradScaler'
        raise UnsupportedError(f"{what} does not know of the other ranks of a model of SMP", hint=f"use {hint}")


def _autocast(model: nn.Module, forward: Callable[..., Any], output: torch.dtype) -> Callable[..., Any]:
    """Return `forward` under autocast, with outputs in one type, so that losses are not computed in half precision."""

    @functools.wraps(forward)
    def under_autocast(*args: Any, **kwargs: Any) -> Any:
        device = next((each.device.type for each in model.parameters()), "cpu")
        with torch.autocast(device, dtype=torch.float16):
            result = forward(*args, **kwargs)
        return map_leaves(lambda leaf: _cast(leaf, output), result)

    return under_autocast


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def _skip_next_step(optimizer: torch.optim.Optimizer) -> None:
    if "step" in vars(optimizer) and getattr(optimizer.step, "_skips", False):
        return
    own = vars(optimizer).get("step")

    def skip(closure: Any = None) -> None:
        if own is None:
            del optimizer.step
        else:
            optimizer.step = own  # type: ignore[method-assign]

    skip._skips = True  # type: ignore[attr-defined]
    optimizer.step = skip  # type: ignore[method-assign,assignment]
