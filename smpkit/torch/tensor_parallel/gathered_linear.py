"""A linear layer on values that are gathered for it, and gathered again in backward instead of being kept.

Without this, every linear layer that is divided by output features keeps the input of all ranks until backward: what
`optimize: memory` promises not to. The second gathering runs while the gradient of the input is computed, and that is
sent while the gradient of the weight is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from smpkit.torch.tensor_parallel import collectives
from smpkit.torch.tensor_parallel.boundary import check_same_shape

__all__ = ["gathered_linear"]


def gathered_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dim: int) -> torch.Tensor:
    """Return `linear(gather_to_tp(x, dim), weight, bias)`."""
    check_same_shape(x)
    if torch.is_autocast_enabled(x.device.type):  # which would reach into forward, but not into backward
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    made: torch.Tensor = _GatheredLinear.apply(x, weight, bias, dim)  # type: ignore[no-untyped-call]
    return made


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dim: int) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dim = dim
        return functional.linear(collectives.start_all_gather(x, dim)(), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors
        wants_input_grad, wants_weight_grad, wants_bias_grad, _ = ctx.needs_input_grad
        pending_gather = collectives.start_all_gather(x, ctx.dim) if wants_weight_grad else None
        pending_reduce_scatter = collectives.start_reduce_scatter(grad @ weight, ctx.dim) if wants_input_grad else None
        rows = grad.flatten(0, -2)
        weight_grad = None if pending_gather is None else rows.t() @ pending_gather().flatten(0, -2)
        bias_grad = rows.sum(0) if wants_bias_grad else None
        return None if pending_reduce_scatter is None else pending_reduce_scatter(), weight_grad, bias_grad, None
