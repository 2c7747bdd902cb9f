"""Linear layers whose weight lies on several ranks: divided by output features, or by input features.

A block of two needs one collective on its way in and one on its way out::

    x ──enter_region──► ColumnParallelLinear ──► (per feature) ──► RowParallelLinear ──leave_region──► y
                        output features divided                    input features divided

With `optimize: memory`, `_GatheredLinear` keeps what a rank holds of x for backward, not the gathered x.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from smpkit.torch.core.arguments import check_sizes
from smpkit.torch.core.runtime import state
from smpkit.torch.tensor_parallel import collectives
from smpkit.torch.tensor_parallel.layouts import (
    Layout,
    check_divisible,
    enter_region,
    leave_region,
    mark_replicated,
    new_shard_parameter,
)
from smpkit.torch.tensor_parallel.module import DistributedModule, initialize_shard


class _Linear(DistributedModule):
    """What the linear layers share: a weight (out, in), perhaps a bias, and nn.Linear's initialisation.

    Args:
        initializer_range: draw weights from N(0, initializer_range) and set the bias to 0; None for torch's own way.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, in_features: int, out_features: int, boundary: Layout | None, initializer_range: float | None
    ) -> None:
        super().__init__(boundary=boundary)
        check_sizes(type(self).__name__, 0, in_features=in_features, out_features=out_features)
        self.in_features = in_features
        self.out_features = out_features
        self.initializer_range = initializer_range

    def reset_parameters(self) -> None:
        """Initialise this rank's pieces of what one process would hold."""
        deviation = self.initializer_range
        # As nn.Linear does: its Kaiming bound, with its slope of sqrt(5), is 1 / sqrt(in_features) for the weight too.
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        draw: Callable[[torch.Tensor], object] = functools.partial(nn.init.uniform_, a=-bound, b=bound)
        if deviation is not None:
            draw = functools.partial(nn.init.normal_, mean=0.0, std=deviation)
        initialize_shard(self.weight, draw)
        if self.bias is not None:
            initialize_shard(self.bias, draw if deviation is None else nn.init.zeros_)

    def extra_repr(self) -> str:
        """Return what torch's own prints, and the boundary."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None},"
            f" boundary={self.boundary.value}"
        )


class ColumnParallelLinear(_Linear):
    """A linear layer of which each rank computes some output features, for all samples.

    Args:
        in_features, out_features: of the whole layer.
        bias: whether it has one.
        parts: sizes of layers packed into one along the output features (query, key and value, say), each of which is
            divided by itself.
        boundary: what comes in.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        parts: tuple[int, ...] = (),
        boundary: Layout | None = None,
        initializer_range: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, boundary, initializer_range)
        for part in parts:
            check_divisible("out_features", part)
        options: dict[str, Any] = {"parts": parts, "device": device, "dtype": dtype}
        self.weight = new_shard_parameter((out_features, in_features), 0, self.boundary, **options)
        self.bias = new_shard_parameter((out_features,), 0, self.boundary, **options) if bias else None
        self.reset_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (..., out_features / tp_size), of all values of the group."""
        if not self._regathers_in_backward(x):
            return self.project(enter_region(x, self.boundary))
        weight: torch.Tensor = self.weight
        bias: torch.Tensor | None = self.bias
        if torch.is_autocast_enabled(x.device.type):  # autocast casts in forward, but not in a custom backward
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        output: torch.Tensor = _GatheredLinear.apply(x, weight, bias, self.boundary.dim)  # type: ignore[no-untyped-call]
        return output

    def _regathers_in_backward(self, x: torch.Tensor) -> bool:
        # What needs no gradient is not kept for backward in the first place.
        divided = self.boundary.dim is not None and state.tp_size > 1 and not collectives.is_dry_run(x)
        return divided and state.cfg.optimize == "memory" and torch.is_grad_enabled() and self.weight.requires_grad

    def project(self, region_input: torch.Tensor) -> torch.Tensor:
        """Multiply only: for a caller that lets several layers read the same input, after one `enter_region`."""
        return functional.linear(region_input, self.weight, self.bias)


class RowParallelLinear(_Linear):
    """A linear layer of which each rank computes the share of some input features, for all samples.

    Args:
        in_features, out_features: of the whole layer.
        bias: whether it has one; added once, to what this rank holds of the sum.
        boundary: what goes out.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        boundary: Layout | None = None,
        initializer_range: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, boundary, initializer_range)
        check_divisible("in_features", in_features)
        self.weight = new_shard_parameter((out_features, in_features), 1, self.boundary, device=device, dtype=dtype)
        self.bias = None
        if bias:
            whole = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
            self.bias = mark_replicated(whole, self.boundary)
        self.reset_parameters()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return (..., out_features) of what this rank holds of the values, from this rank's features of all."""
        return sum_shares(self.project(features), self.boundary, self.bias)

    def project(self, features: torch.Tensor) -> torch.Tensor:
        """Multiply only: for a caller that adds up the shares of several layers before one `sum_shares`."""
        return functional.linear(features, self.weight)


class DistributedLinear(RowParallelLinear):
    """A linear layer that takes the place of `torch.nn.Linear` (the class of that name in SMP v1).

    Its input channels are divided: the local weight is (out_features, in_features / tp_size). Each rank collects its
    channels of the samples of all ranks, multiplies, and gets its own samples of the sum back.

    Args:
        in_features, out_features, bias: as in torch.
        boundary: what comes in and goes out; None for what the configuration says.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        boundary: Layout | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, boundary=boundary, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (..., out_features) for (..., in_features); without a batch dimension for (in_features,)."""
        if x.dim() == 1 and state.tp_size > 1:
            return DistributedLinear.forward(self, x.unsqueeze(0)).squeeze(0)
        return super().forward(shard_features(x, self.boundary))


def sum_shares(shares: torch.Tensor, boundary: Layout, *biases: torch.Tensor | None) -> torch.Tensor:
    """Sum the ranks' shares of a row-parallel layer, and add biases: before the sum, each rank would add them."""
    output = leave_region(shares, boundary)
    for bias in biases:
        output = output if bias is None else output + bias
    return output


def shard_features(x: torch.Tensor, boundary: Layout) -> torch.Tensor:
    """Return this rank's features of all values, from all features of what this rank holds of the values."""
    if boundary.dim is None:
        return collectives.scatter_to_tp(x, -1)
    return collectives.all_to_all(x, -1, boundary.dim)


def unshard_features(x: torch.Tensor, boundary: Layout) -> torch.Tensor:
    """Return all features of what this rank holds of the values, from this rank's features of all: the reverse."""
    return collectives.gather_from_tp(x, -1) if boundary.dim is None else collectives.all_to_all(x, boundary.dim, -1)


class _GatheredLinear(torch.autograd.Function):
    """Computes `linear(gather_to_tp(x, dim), weight, bias)`, and gathers `x` again in backward instead of keeping it.

    Otherwise every column-parallel layer would keep the input of all ranks until backward.
    """

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
        # Each exchange runs while the host goes on: the gather of x while the gradient of x is computed, and that is
        # reduced while the gradient of the weight is. Every rank starts them in this order, or they deadlock.
        pending_gather = collectives.start_all_gather(x, ctx.dim) if wants_weight_grad else None
        pending_reduce_scatter = collectives.start_reduce_scatter(grad @ weight, ctx.dim) if wants_input_grad else None
        rows = grad.flatten(0, -2)
        weight_grad = None if pending_gather is None else rows.t() @ pending_gather().flatten(0, -2)
        bias_grad = rows.sum(0) if wants_bias_grad else None
        return None if pending_reduce_scatter is None else pending_reduce_scatter(), weight_grad, bias_grad, None
