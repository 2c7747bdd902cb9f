"""`FusedLayerNorm` and its kin, on torch's kernels, which are fused themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

__all__ = [
    "FusedLayerNorm",
    "FusedRMSNorm",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "fused_layer_norm",
    "fused_layer_norm_affine",
    "fused_rms_norm",
    "fused_rms_norm_affine",
    "mixed_dtype_fused_layer_norm_affine",
    "mixed_dtype_fused_rms_norm_affine",
]

Shape = int | Sequence[int]


def fused_layer_norm(input: Any, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False) -> Any:  # noqa: A002
    """Normalise without weights."""
    return functional.layer_norm(input, _shape(normalized_shape), None, None, eps)


def fused_layer_norm_affine(
    input: Any,  # noqa: A002
    weight: Any,
    bias: Any,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Any:
    """Normalise; the result has the type of the input."""
    return functional.layer_norm(input, _shape(normalized_shape), weight, bias, eps)


def mixed_dtype_fused_layer_norm_affine(
    input: Any,  # noqa: A002
    weight: Any,
    bias: Any,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Any:
    """Normalise an input of another type than the weights; the result has the type of the weights."""
    wide = torch.promote_types(input.dtype, weight.dtype)
    shape = _shape(normalized_shape)
    return functional.layer_norm(input.to(wide), shape, weight.to(wide), bias.to(wide), eps).to(weight.dtype)


def fused_rms_norm(input: Any, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False) -> Any:  # noqa: A002
    """Divide by the root of the mean square, without weights."""
    return functional.rms_norm(input, _shape(normalized_shape), None, eps)


def fused_rms_norm_affine(
    input: Any,  # noqa: A002
    weight: Any,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Any:
    """Divide by the root of the mean square; the result has the type of the input."""
    return functional.rms_norm(input, _shape(normalized_shape), weight, eps)


def mixed_dtype_fused_rms_norm_affine(
    input: Any,  # noqa: A002
    weight: Any,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Any:
    """Divide an input of another type than the weight; the result has the type of the weight."""
    wide = torch.promote_types(input.dtype, weight.dtype)
    return functional.rms_norm(input.to(wide), _shape(normalized_shape), weight.to(wide), eps).to(weight.dtype)


class FusedLayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` with Apex's arguments.

    Args:
        normalized_shape, eps, elementwise_affine: as there.
        memory_efficient: of no importance here.
    """

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(_shape(normalized_shape), eps=eps, elementwise_affine=elementwise_affine)
        self.memory_efficient = memory_efficient


class FusedRMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` with Apex's arguments.

    Args:
        normalized_shape, eps, elementwise_affine: as there.
        memory_efficient: of no importance here.
    """

    eps: float

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(_shape(normalized_shape), eps=eps, elementwise_affine=elementwise_affine)
        self.memory_efficient = memory_efficient


class MixedFusedLayerNorm(FusedLayerNorm):
    """For inputs in half precision and weights in float32: computes in float32, and returns the weights' type."""

    def __init__(self, normalized_shape: Shape, eps: float = 1e-5, **options: Any) -> None:
        super().__init__(normalized_shape, eps, True, options.get("memory_efficient", False))

    def forward(self, input: torch.Tensor) -> Any:  # noqa: A002
        """Return the normalised input."""
        return mixed_dtype_fused_layer_norm_affine(input, self.weight, self.bias, self.normalized_shape, self.eps)


class MixedFusedRMSNorm(FusedRMSNorm):
    """For inputs in half precision and a weight in float32: computes in float32, and returns the weight's type."""

    def __init__(self, normalized_shape: Shape, eps: float = 1e-5, **options: Any) -> None:
        super().__init__(normalized_shape, eps, True, options.get("memory_efficient", False))

    def forward(self, x: torch.Tensor) -> Any:
        """Return the divided input."""
        return mixed_dtype_fused_rms_norm_affine(x, self.weight, self.normalized_shape, self.eps)


def _shape(given: Shape) -> list[int]:
    return [given] if isinstance(given, int) else list(given)
