"""Apex's optimizers: those of `smp.optimizers`, and torch's SGD and Adagrad."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from smpkit.errors import UnsupportedError
from smpkit.torch.optimizers import FusedAdam as _Adam
from smpkit.torch.optimizers import FusedLAMB, FusedNovoGrad

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedMixedPrecisionLamb", "FusedNovoGrad", "FusedSGD"]

_MASTERS_HINT = '`"fp16": true` or `"bf16": true` in the model-parallel parameters keeps them'


class FusedAdam(_Adam):
    """`smp.optimizers.FusedAdam`, with the arguments of Apex's later releases.

    Args:
        args, options: those of `smp.optimizers.FusedAdam`.
        capturable: of no importance without CUDA graphs.
        master_weights: must be False.

    Raises:
        UnsupportedError: master weights.
    """

    def __init__(self, *args: Any, capturable: bool = False, master_weights: bool = False, **options: Any) -> None:
        if master_weights:
            raise UnsupportedError("FusedAdam keeps no master weights here", hint=_MASTERS_HINT)
        super().__init__(*args, **options)


class FusedMixedPrecisionLamb(FusedLAMB):
    """`smp.optimizers.FusedLAMB` with the arguments of Apex's; a GradScaler divides gradients and skips steps itself.

    Args:
        params, lr, bias_correction, betas, eps, weight_decay: as there.
        step: must be 0: `load_state_dict` goes on from another step.
        amsgrad, adam_w_mode, grad_averaging, max_grad_norm, use_nvlamb: as there.
        reduced_precision_dtype: no parameter may have it: master weights are not kept.

    Raises:
        UnsupportedError: another first step, or parameters that need master weights.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        step: int = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
    ) -> None:
        if step != 0:
            hint = "load the state of an optimizer that has taken them"
            raise UnsupportedError(f"FusedMixedPrecisionLamb begins at step 0, not {step}", hint=hint)
        settings = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "max_grad_norm": max_grad_norm}
        flags = {"amsgrad": amsgrad, "adam_w_mode": adam_w_mode, "use_nvlamb": use_nvlamb}
        flags |= {"bias_correction": bias_correction, "grad_averaging": grad_averaging}
        super().__init__(params, float(lr), **settings, **flags)  # type: ignore[arg-type]
        dtypes = {each.dtype for group in self.param_groups for each in group["params"]}
        if reduced_precision_dtype in dtypes:
            raise UnsupportedError("FusedMixedPrecisionLamb keeps no master weights here", hint=_MASTERS_HINT)


class _DecaysApart(torch.optim.Optimizer):
    """An optimizer of torch that can decay weights themselves, and not gradients."""

    set_grad_none: bool
    decays_apart: bool

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients; `set_grad_none` of the constructor says how if the argument does not."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters that have gradients; `closure` is called first, and its result returned."""
        if not self.decays_apart:
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        decays = [group["weight_decay"] for group in self.param_groups]
        for group in self.param_groups:
            with_gradient = [each for each in group["params"] if each.grad is not None]
            if with_gradient:
                torch._foreach_mul_(with_gradient, 1.0 - float(group["lr"]) * group["weight_decay"])
            group["weight_decay"] = 0.0
        try:
            super().step()
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                group["weight_decay"] = decay
        return loss


class FusedAdagrad(_DecaysApart, torch.optim.Adagrad):
    """`torch.optim.Adagrad` with Apex's arguments.

    Args:
        params, lr, eps, weight_decay: as there.
        set_grad_none: let `zero_grad()` set gradients to None, not to zero.
        adagrad_w_mode: decay weights and not gradients.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        self.decays_apart = adagrad_w_mode
        self.set_grad_none = set_grad_none
        super().__init__(params, lr=lr, weight_decay=weight_decay, eps=eps)


class FusedSGD(_DecaysApart, torch.optim.SGD):
    """`torch.optim.SGD` with Apex's arguments.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov: as there.
        wd_after_momentum: decay weights after the momentum, which then does not hold the decay.
        materialize_master_grads: of no importance without apex.amp's O2.
        set_grad_none: let `zero_grad()` set gradients to None, not to zero.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        self.decays_apart = self.wd_after_momentum = wd_after_momentum
        self.set_grad_none = set_grad_none
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)
