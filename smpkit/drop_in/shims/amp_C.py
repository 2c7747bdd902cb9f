"""Apex's kernels on lists of tensors that public scripts call, on torch's operations on lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = [
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_lamb",
    "multi_tensor_lamb_stage1_cuda",
    "multi_tensor_lamb_stage2_cuda",
    "multi_tensor_scale",
]

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


def multi_tensor_lamb(
    chunk_size: int,
    overflow: torch.Tensor,
    tensors: Sequence[Tensors],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: torch.Tensor | float,
    max_grad_norm: float,
    use_nvlamb: bool = False,
) -> None:
    """Take a step of LAMB.

    Args:
        chunk_size, overflow: of no importance here: what is not finite is passed on.
        tensors: lists of gradients, weights, and first and second moments; all but the gradients are changed.
        lr, beta1, beta2, epsilon, weight_decay: as in LAMB's paper.
        step: the number of this step, from 1.
        bias_correction: whether moments are divided by what they lack in the first steps.
        grad_averaging: whether a gradient has the weight `1 - beta1` in the first moment, not 1.
        mode: 1 to decay weights, 0 to decay gradients.
        global_grad_norm, max_grad_norm: gradients are divided by the first over the second if that is more than 1.
        use_nvlamb: also without weight decay let the step be in proportion to the weights.
    """
    gradients, weights, *moments = tensors
    wide = torch._foreach_div(_wide(gradients), _excess(global_grad_norm, max_grad_norm))
    if not mode:
        torch._foreach_add_(wide, torch._foreach_mul(_wide(weights), float(weight_decay)))
    decays = [weight_decay if mode else 0.0] * len(weights)
    new_weight = 1.0 - beta1 if grad_averaging else 1.0
    correction = step if bias_correction else None
    updates = _lamb_updates(wide, weights, moments, (beta1, new_weight, beta2), correction, epsilon, decays)
    norms = [torch.stack(torch._foreach_norm(each)) for each in (_wide(weights), updates)]
    _apply_lamb(weights, updates, norms, lr, in_proportion=use_nvlamb or weight_decay != 0)


def multi_tensor_lamb_stage1_cuda(
    chunk_size: int,
    overflow: torch.Tensor,
    tensors: Sequence[Tensors],
    per_tensor_decay: torch.Tensor | Sequence[float],
    step: int,
    beta1: float,
    beta2: float,
    epsilon: float,
    global_grad_norm: torch.Tensor | float,
    max_global_grad_norm: float,
) -> None:
    """Compute what a step of LAMB adds to the weights, before it is scaled.

    Args:
        chunk_size, overflow: of no importance here: what is not finite is passed on.
        tensors: lists of gradients, weights, first moments, second moments, and updates; the latter three are written.
        per_tensor_decay: of each tensor, [number].
        step: how many steps were taken before.
        beta1, beta2, epsilon: as in LAMB's paper.
        global_grad_norm, max_global_grad_norm: as in `multi_tensor_lamb`.
    """
    gradients, weights, first, second, updates = tensors
    wide = torch._foreach_div(_wide(gradients), _excess(global_grad_norm, max_global_grad_norm))
    decays = [float(each) for each in per_tensor_decay]
    betas = (beta1, 1.0 - beta1, beta2)
    _copy(updates, _lamb_updates(wide, weights, (first, second), betas, step + 1, epsilon, decays))


def multi_tensor_lamb_stage2_cuda(
    chunk_size: int,
    overflow: torch.Tensor,
    tensors: Sequence[Tensors],
    per_tensor_param_norm: torch.Tensor,
    per_tensor_update_norm: torch.Tensor,
    lr: float,
    weight_decay: float | None = None,
    use_nvlamb: bool = False,
) -> None:
    """Add updates to the weights, each in proportion to the norm of its weights.

    Args:
        chunk_size, overflow: of no importance here.
        tensors: lists of weights and updates.
        per_tensor_param_norm, per_tensor_update_norm: their norms, [number].
        lr: the learning rate.
        weight_decay: 0 leaves out the norms, unless `use_nvlamb`; None, as of the first releases of Apex, does not.
    """
    weights, updates = tensors
    norms = (per_tensor_param_norm, per_tensor_update_norm)
    _apply_lamb(weights, _wide(updates), norms, lr, in_proportion=use_nvlamb or weight_decay != 0)


def _excess(norm: torch.Tensor | float, largest: float) -> float:
    """Return by how much the norm of all gradients is too large; 1 if it is not."""
    return max(float(norm) / largest, 1.0) if largest > 0 else 1.0


def _lamb_updates(
    gradients: Tensors,
    weights: Tensors,
    moments: Sequence[Tensors],
    betas: tuple[float, float, float],
    step: int | None,
    epsilon: float,
    decays: Sequence[float],
) -> list[torch.Tensor]:
    """Update both moments, and return Adam's updates.

    Args:
        betas: what the first moment keeps, the weight of a new gradient in it, and what the second one keeps.
        step: for the correction of the bias; None: without.
    """
    keep1, new1, keep2 = betas
    updates = []
    for gradient, weight, first, second, decay in zip(gradients, weights, *moments, decays, strict=True):
        (wide1, wide2, wide) = _wide([first, second, weight])
        wide1 = keep1 * wide1 + new1 * gradient
        wide2 = keep2 * wide2 + (1.0 - keep2) * gradient * gradient
        _copy([first, second], [wide1, wide2])
        if step is not None:
            wide1, wide2 = wide1 / (1.0 - keep1 ** int(step)), wide2 / (1.0 - keep2 ** int(step))
        updates.append(wide1 / (wide2.sqrt() + epsilon) + decay * wide)
    return updates


def _apply_lamb(
    weights: Tensors, updates: Tensors, norms: Sequence[torch.Tensor], lr: float, *, in_proportion: bool
) -> None:
    ours, theirs = norms
    # Without weights or without a change there is no ratio of norms.
    ratios = torch.where((ours != 0) & (theirs != 0), ours / theirs, 1.0) if in_proportion else torch.ones_like(ours)
    steps = [float(lr) * ratio * update for ratio, update in zip(ratios.unbind(), updates, strict=True)]
    _copy(weights, torch._foreach_sub(_wide(weights), steps))


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
