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
    """Return `linear(gather(x, dim), weight, bias)`."""
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
        return functional.linear(collectives.begin_gather(x, dim)(), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors
        of_input, of_weight, of_bias, _ = ctx.needs_input_grad
        arriving = collectives.begin_gather(x, ctx.dim) if of_weight else None
        leaving = collectives.begin_reduce_scatter(grad @ weight, ctx.dim) if of_input else None
        rows = grad.flatten(0, -2)
        weight_grad = None if arriving is None else rows.t() @ arriving().flatten(0, -2)
        bias_grad = rows.sum(0) if of_bias else None
        return None if leaving is None else leaving(), weight_grad, bias_grad, None
