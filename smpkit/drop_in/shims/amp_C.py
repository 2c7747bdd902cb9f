"""Apex's kernels on lists of tensors that public scripts call, on torch's operations on lists."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from smpkit.drop_in.removed_names import announce

__all__ = ["multi_tensor_l2norm", "multi_tensor_scale"]

Tensors = Sequence[torch.Tensor]

announce("amp_C")


@torch.no_grad()
def multi_tensor_scale(chunk_size: int, overflow: torch.Tensor, tensors: Sequence[Tensors], scale: float) -> None:
    """Write `scale` times each of the first list to the second; set `overflow` to 1 if an input is not finite."""
    inputs, outputs = tensors
    for output, scaled in zip(outputs, torch._foreach_mul(_wide(inputs), float(scale)), strict=True):
        output.copy_(scaled)
    _flag(overflow, inputs)


def multi_tensor_l2norm(
    chunk_size: int, overflow: torch.Tensor, tensors: Sequence[Tensors], per_tensor: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the L2 norm of all elements, [1], and with `per_tensor` that of each tensor, [number], in float32.

    `overflow` is set to 1 if the norm is not finite. Without `per_tensor` the second result is empty.
    """
    (inputs,) = tensors
    if not inputs:
        return torch.zeros(1, device=overflow.device), torch.zeros(0, device=overflow.device)
    norms = torch.stack([norm.to(inputs[0].device) for norm in torch._foreach_norm(_wide(inputs), 2.0)])
    total = torch.linalg.vector_norm(norms).reshape(1)
    _flag(overflow, [total])
    return total, norms if per_tensor else norms.new_zeros(0)


def _wide(tensors: Tensors) -> list[torch.Tensor]:
    """Return them in float32 at least, in which the kernels compute; in float64 if any is."""
    wide = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    return [tensor.detach().to(wide) for tensor in tensors]


def _flag(overflow: torch.Tensor, tensors: Tensors) -> None:
    """Set `overflow` without waiting for a GPU."""
    for tensor in tensors:
        infinite = (~torch.isfinite(tensor.detach())).any().to(overflow.device, overflow.dtype)
        overflow.copy_(torch.maximum(overflow, infinite.expand_as(overflow)))
