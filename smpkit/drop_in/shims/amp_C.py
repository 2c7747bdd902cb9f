"""Apex's kernels on lists of tensors that public scripts call, on torch's operations on lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["multi_tensor_axpby", "multi_tensor_l2norm", "multi_tensor_scale"]

Tensors = Sequence[torch.Tensor]


def multi_tensor_scale(chunk_size: int, overflow: torch.Tensor, tensors: Sequence[Tensors], scale: float) -> None:
    """Write `scale` times each of the first list to the second; set `overflow` if an input is not finite.

    Args:
        chunk_size: of no importance here.
        overflow: one integer, set to 1 or left.
        tensors: two lists of tensors of equal shapes, of any floating types.
        scale: the factor.
    """
    inputs, outputs = tensors
    _copy(outputs, torch._foreach_mul(_wide(inputs), float(scale)))
    _flag(overflow, inputs)


def multi_tensor_axpby(
    chunk_size: int, overflow: torch.Tensor, tensors: Sequence[Tensors], a: float, b: float, arg_to_check: int
) -> None:
    """Write `a` times each of the first list plus `b` times each of the second to the third.

    Args:
        chunk_size: of no importance here.
        overflow: one integer; set to 1 if an input that is checked is not finite.
        tensors: three lists of tensors of equal shapes, of any floating types.
        a, b: the factors.
        arg_to_check: 0 for the first list, 1 for the second, -1 for both.
    """
    first, second, outputs = tensors
    sums = torch._foreach_mul(_wide(first), float(a))
    torch._foreach_add_(sums, torch._foreach_mul(_wide(second), float(b)))
    _copy(outputs, sums)
    _flag(overflow, {0: first, 1: second}.get(arg_to_check, [*first, *second]))


def multi_tensor_l2norm(
    chunk_size: int, overflow: torch.Tensor, tensors: Sequence[Tensors], per_tensor: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the L2 norm of all elements, [1], and with `per_tensor` that of each tensor, [number], in float32.

    Args:
        chunk_size: of no importance here.
        overflow: one integer; set to 1 if the norm is not finite.
        tensors: one list.
        per_tensor: whether to return each tensor's norm, too; else the second result is empty.
    """
    (inputs,) = tensors
    if not inputs:
        none = torch.zeros(0, dtype=torch.float32, device=overflow.device)
        return none.new_zeros(1), none
    wide = _wide(inputs)
    norms = torch.stack([norm.to(wide[0].device) for norm in torch._foreach_norm(wide, 2.0)])
    total = torch.linalg.vector_norm(norms).reshape(1)
    _flag(overflow, [total])
    return total, norms if per_tensor else norms.new_zeros(0)


def _wide(tensors: Tensors) -> list[torch.Tensor]:
    """Return them in float32 at least, in which the kernels compute; in float64 if any is."""
    wide = torch.float64 if any(each.dtype == torch.float64 for each in tensors) else torch.float32
    return [each.detach().to(wide) for each in tensors]


@torch.no_grad()
def _copy(outputs: Tensors, values: Tensors) -> None:
    for output, value in zip(outputs, values, strict=True):
        output.copy_(value)


def _flag(overflow: torch.Tensor, tensors: Tensors) -> None:
    """Set `overflow` without waiting for a GPU."""
    for each in tensors:
        infinite = (~torch.isfinite(each.detach())).any().to(overflow.device, overflow.dtype)
        overflow.copy_(torch.maximum(overflow, infinite.expand_as(overflow)))


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise AttributeError(
        f"smpkit's stand-in for Apex's `amp_C` has {', '.join(f'`{each}`' for each in __all__)}, not `{name}`:"
        " use an optimizer of apex.optimizers, or install Apex with --cpp_ext --cuda_ext"
    )
