"""`smp.optimizers`: Adam, LAMB and NovoGrad that update many tensors at once.

SMP v1 had them in place of Apex's, with Apex's names and arguments. Adam is torch's fused one; LAMB and NovoGrad, which
torch does not have, are built on its operations on lists of tensors. The norms in their rules are those of the whole
model and of whole tensors, on however many ranks these lie.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch
from torch.nn.utils import get_total_norm
from torch.optim.optimizer import ParamsT

from smpkit.errors import UnsupportedError, UsageError
from smpkit.torch.core.runtime import state
from smpkit.torch.optim.gradient_norm import global_norm, norms_of
from smpkit.torch.placement.dtensor import local_tensor_of

__all__ = ["FusedAdam", "FusedLAMB", "FusedLamb", "FusedNovoGrad"]

Tensors = list[torch.Tensor]


class _WithSetGradNone(torch.optim.Optimizer):
    set_grad_none: bool

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients; `set_grad_none` of the constructor says how if the argument does not."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)


class FusedAdam(_WithSetGradNone, torch.optim.Adam):
    """`torch.optim.AdamW(fused=True)`, or with `adam_w_mode=False` `torch.optim.Adam(fused=True)`, as Apex names it.

    Args:
        params, lr, betas, eps, weight_decay: as in `torch.optim.AdamW`.
        bias_correction: must be True.
        adam_w_mode: decay weights and not gradients.
        amsgrad: must be False.
        set_grad_none: let `zero_grad()` set gradients to None, not to zero.

    Raises:
        UsageError: a value out of its range.
        UnsupportedError: amsgrad, or moments that are not corrected.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _check("FusedAdam", amsgrad, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        if not bias_correction:
            raise UnsupportedError(
                "FusedAdam is torch's, which always corrects the moments of the first steps",
                hint="leave out bias_correction=False",
            )
        super().__init__(params, lr, betas, eps, weight_decay, fused=True, decoupled_weight_decay=adam_w_mode)
        self.set_grad_none = set_grad_none


@dataclass(frozen=True)
class _SameStepParameters:
    """Parameters of a group with a gradient that have taken the same number of steps.

    One call of a kernel updates them all: bias correction depends on the number of steps.
    """

    parameters: Tensors
    states: list[dict[str, torch.Tensor]]
    steps: float
    """This one included."""

    @cached_property
    def weights(self) -> Tensors:
        """What this rank holds of the parameters."""
        return [local_tensor_of(param.detach()) for param in self.parameters]

    @cached_property
    def gradients(self) -> Tensors:
        return [local_tensor_of(param.grad) for param in self.parameters if param.grad is not None]

    def state(self, name: str) -> Tensors:
        return [local_tensor_of(values[name]) for values in self.states]


class _Fused(_WithSetGradNone, ABC):
    """Counts steps per parameter, keeps moments, and updates parameters of equal counts together."""

    def __init__(self, params: ParamsT, *, set_grad_none: bool, amsgrad: bool, **defaults: Any) -> None:
        _check(type(self).__name__, amsgrad, defaults)
        self.set_grad_none = set_grad_none
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters that have gradients; `closure` is called first, and its result returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if any(p.grad is not None and p.grad.is_sparse for group in self.param_groups for p in group["params"]):
            raise UnsupportedError(
                f"{type(self).__name__} does not take sparse gradients", hint="make embeddings with sparse=False"
            )
        self._before_update()
        for group in self.param_groups:
            for same_step in self._by_step_count(group):
                self._update(group, same_step)
        return loss

    def _before_update(self) -> None:
        """Read all gradients before any parameter changes; for norms of the whole model."""

    @abstractmethod
    def _update(self, group: dict[str, Any], same_step: _SameStepParameters) -> None:
        """Change parameters of `group` and their states."""

    def _by_step_count(self, group: dict[str, Any]) -> Iterator[_SameStepParameters]:
        """Count a step and yield the parameters with gradients, those of the same count together."""
        by_step: dict[float, Tensors] = {}
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            own = self.state[parameter]
            if not own:
                # On the host, as torch's optimizers keep it: reading it must not wait for a GPU.
                own["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
                own.update(self._initial_state(parameter))
            own["step"] += 1
            by_step.setdefault(float(own["step"]), []).append(parameter)
        for steps, parameters in sorted(by_step.items(), key=lambda item: item[0]):
            yield _SameStepParameters(parameters, [self.state[param] for param in parameters], steps)

    def _initial_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}


class FusedLAMB(_Fused):
    """LAMB: Adam whose step is, for each tensor, in proportion to the norm of its weights.

    Before, the gradients of the whole model are clipped to `max_grad_norm`.

    Args:
        params, lr, betas, eps, weight_decay: as in `torch.optim.AdamW`.
        bias_correction: divide the moments by what they lack in the first steps.
        amsgrad: must be False.
        adam_w_mode: decay weights and not gradients.
        grad_averaging: give a new gradient the weight `1 - betas[0]` in the first moment, not 1.
        set_grad_none: let `zero_grad()` set gradients to None, not to zero.
        max_grad_norm: clip the norm of all gradients to this; 0 does not clip.
        use_nvlamb: also without weight decay let the step be in proportion to the weights.

    Raises:
        UsageError: a value out of its range.
        UnsupportedError: amsgrad.
    """

    looks_at_all_parameters: Final = True
    """An optimizer that updates part by part, such as an `OffloadOptimizer`, cannot use it."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        self.adam_w_mode = adam_w_mode
        self.use_nvlamb = use_nvlamb
        settings = {"bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        settings |= {"grad_averaging": grad_averaging, "max_grad_norm": max_grad_norm}
        super().__init__(params, set_grad_none=set_grad_none, amsgrad=amsgrad, lr=lr, **settings)

    def _before_update(self) -> None:
        self._norm: torch.Tensor | None = None
        if not any(group["max_grad_norm"] > 0 for group in self.param_groups):
            return
        every = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        if state.initialized:
            # The model's parameters, not the master weights that these may be, are marked with their places.
            marked = every if state.optimizer is None else [state.optimizer.model_parameter(param) for param in every]
            self._norm = global_norm([(own, param.grad) for own, param in zip(marked, every, strict=True)])
        else:
            self._norm = get_total_norm([param.grad for param in every])

    def _update(self, group: dict[str, Any], same_step: _SameStepParameters) -> None:
        gradients = same_step.gradients
        if self._norm is not None and group["max_grad_norm"] > 0:
            excess = (self._norm / group["max_grad_norm"]).clamp(min=1.0)
            gradients = list(torch._foreach_div(gradients, excess.to(gradients[0])))
        updates = self._adam_updates(group, same_step, gradients)
        if self.use_nvlamb or group["weight_decay"] != 0:
            weight_norms = norms_of(same_step.weights, same_step.parameters, 2.0)
            update_norms = norms_of(updates, same_step.parameters, 2.0)
            # Without weights or without a change there is no ratio of norms.
            ratios = torch.where((weight_norms > 0) & (update_norms > 0), weight_norms / update_norms, 1.0)
            torch._foreach_mul_(updates, list(ratios.unbind()))
        torch._foreach_add_(same_step.weights, updates, alpha=-float(group["lr"]))

    def _adam_updates(self, group: dict[str, Any], same_step: _SameStepParameters, gradients: Tensors) -> Tensors:
        """Update Adam's moments, and return the change of the parameters before the learning rate."""
        beta1, beta2 = group["betas"]
        first, second = same_step.state("exp_avg"), same_step.state("exp_avg_sq")
        decay, corrects = group["weight_decay"], group["bias_correction"]
        if decay and not self.adam_w_mode:
            gradients = list(torch._foreach_add(gradients, same_step.weights, alpha=decay))
        torch._foreach_mul_(first, beta1)
        torch._foreach_add_(first, gradients, alpha=1.0 - beta1 if group["grad_averaging"] else 1.0)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, value=1.0 - beta2)
        divisors = list(torch._foreach_sqrt(second))
        torch._foreach_div_(divisors, math.sqrt(1.0 - beta2**same_step.steps) if corrects else 1.0)
        torch._foreach_add_(divisors, group["eps"])
        updates = list(torch._foreach_div(first, divisors))
        torch._foreach_div_(updates, 1.0 - beta1**same_step.steps if corrects else 1.0)
        if decay and self.adam_w_mode:
            torch._foreach_add_(updates, same_step.weights, alpha=decay)
        return updates


FusedLamb = FusedLAMB
"""The name in a part of SMP v1's documentation."""


class FusedNovoGrad(_Fused):
    """NovoGrad: momentum on gradients that are divided, tensor by tensor, by a running average of their norm.

    The state "exp_avg_sq" of a tensor is that average: one number.

    Args:
        params, lr, betas, eps, weight_decay: as in `torch.optim.AdamW`.
        bias_correction: divide the averages by what they lack in the first steps.
        amsgrad: must be False.
        reg_inside_moment: divide and decay gradients before they go into the momentum, not after.
        grad_averaging: give a new gradient the weight `1 - betas[0]` in the momentum, not 1.
        norm_type: 2, or 0 for the largest absolute value.
        init_zero: let the average of norms start with 0, not with the first norm.
        set_grad_none: let `zero_grad()` set gradients to None, not to zero.

    Raises:
        UsageError: a value out of its range.
        UnsupportedError: amsgrad.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if norm_type not in (0, 2):
            raise UsageError(f"norm_type of FusedNovoGrad must be 2 or 0 (the largest absolute value), got {norm_type}")
        self.reg_inside_moment = reg_inside_moment
        settings = {"bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        settings |= {"grad_averaging": grad_averaging, "norm_type": norm_type, "init_zero": init_zero}
        super().__init__(params, set_grad_none=set_grad_none, amsgrad=amsgrad, lr=lr, **settings)

    def _initial_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": local_tensor_of(parameter).new_zeros(())}

    def _update(self, group: dict[str, Any], same_step: _SameStepParameters) -> None:
        beta1, _ = group["betas"]
        gradients, momenta = same_step.gradients, same_step.state("exp_avg")
        divisors = list(self._divisors(group, same_step).unbind())
        weight = 1.0 - beta1 if group["grad_averaging"] else 1.0
        if self.reg_inside_moment:
            gradients = list(torch._foreach_div(gradients, divisors))
            torch._foreach_add_(gradients, same_step.weights, alpha=group["weight_decay"])
        torch._foreach_mul_(momenta, beta1)
        torch._foreach_add_(momenta, gradients, alpha=weight)
        updates = list(torch._foreach_div(momenta, 1.0 - beta1**same_step.steps if group["bias_correction"] else 1.0))
        if not self.reg_inside_moment:
            torch._foreach_div_(updates, divisors)
            torch._foreach_add_(updates, same_step.weights, alpha=group["weight_decay"])
        torch._foreach_add_(same_step.weights, updates, alpha=-float(group["lr"]))

    def _divisors(self, group: dict[str, Any], same_step: _SameStepParameters) -> torch.Tensor:
        """Update the averages of norms, and return the divisor of each gradient: [number of parameters]."""
        _, beta2 = group["betas"]
        averages = same_step.state("exp_avg_sq")
        norms = norms_of(same_step.gradients, same_step.parameters, 2.0 if group["norm_type"] == 2 else math.inf)
        # The average starts with the first norm, or with 0.
        old = norms if same_step.steps == 1 and not group["init_zero"] else torch.stack(averages)
        if group["norm_type"] == 2:
            new = (beta2 * old.square() + (1.0 - beta2) * norms.square()).sqrt()
        else:
            new = beta2 * old + (1.0 - beta2) * norms
        torch._foreach_copy_(averages, list(new.unbind()))
        correction = math.sqrt(1.0 - beta2**same_step.steps) if group["bias_correction"] else 1.0
        divisors: torch.Tensor = new / correction + group["eps"]
        return divisors


def _check(name: str, amsgrad: bool, defaults: dict[str, Any]) -> None:
    if amsgrad:
        raise UnsupportedError(f"{name} has no amsgrad variant", hint="use torch.optim.AdamW(..., amsgrad=True)")
    for key in ("eps", "lr", "weight_decay", "max_grad_norm"):
        value = defaults.get(key, 1.0)
        if value < 0 or (value == 0 and key == "eps"):
            bound = "more than 0" if key == "eps" else "at least 0"
            raise UsageError(f"`{key}` of {name} must be {bound}, got {value}")
    for beta in defaults["betas"]:
        if not 0 <= beta < 1:
            raise UsageError(f"`betas` of {name} must be at least 0 and less than 1, got {defaults['betas']}")
