"""Apex's optimizers: those of `smp.optimizers`, and SGD."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from smpkit.errors import UnsupportedError
from smpkit.torch.optimizers import FusedAdam as _Adam
from smpkit.torch.optimizers import FusedLAMB, FusedNovoGrad

__all__ = ["FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedSGD"]


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
            hint = '`"fp16": true` or `"bf16": true` in the model-parallel parameters keeps them'
            raise UnsupportedError("FusedAdam keeps no master weights here", hint=hint)
        super().__init__(*args, **options)


class FusedSGD(torch.optim.SGD):
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
        self.wd_after_momentum = wd_after_momentum
        self.set_grad_none = set_grad_none
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients; `set_grad_none` of the constructor says how if the argument does not."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters that have gradients; `closure` is called first, and its result returned."""
        if not self.wd_after_momentum:
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
