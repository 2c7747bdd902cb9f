"""The norm of the whole model's gradient, of which each rank holds a part, and clipping by it.

Every value counts once::

    piece of a tensor-parallel parameter         on each tensor-parallel rank
    whole parameter beside such pieces           on tp_rank 0
    parameter on several pipeline ranks          on the first of them
    replicas of any of these                     count alone, because their gradients are equal; but where each replica
                                                 has a part of the gradients (sharded optimizer state, sharded data
                                                 parallelism) all replicas are summed over

`norms_of` gives the norms of single tensors, which optimizers such as LAMB need, from their pieces on other ranks.

torch's own clipping is put right, or refused, where `parameter.grad` is not what the optimizer will use. Scripts
import `clip_grad_norm_` and `clip_grad_value_` by name, so these cannot be replaced; the helpers that they look up on
every call can. Some scripts call two of the helpers themselves, by their public names in `torch.nn.utils`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
import torch.nn.utils.clip_grad as torch_clip_grad
from torch import nn
from torch.nn.utils import get_total_norm

from smpkit.errors import UsageError
from smpkit.plan.mesh import CommGroup
from smpkit.torch.core.runtime import state
from smpkit.torch.distributed.deadline import waiting
from smpkit.torch.placement.dtensor import is_dtensor, local_tensor_of
from smpkit.torch.placement.placement import placement_of
from smpkit.torch.placement.shards import is_tp_shard
from smpkit.torch.precision.cast import half_dtype
from smpkit.torch.precision.loss_scale import group_of_all_gradients


def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients so that the norm of the whole model's gradient is at most `max_norm`; return the norm before.

    As `torch.nn.utils.clip_grad_norm_` does in one process. All ranks call it, after backward and before the
    optimizer's step, with the same parameters as far as they hold them; all get the same norm.

    With `fp16` and `bf16` these are, as for `optimizer.clip_master_grads`, the float32 gradients that the optimizer
    will use, without the loss scale. Those of half-precision weights, `parameter.grad`, stay as they are. After an
    overflow the norm is not finite, nothing is clipped, and the optimizer will skip the step.

    Args:
        parameters: the model, or the parameters whose gradients count.
        max_norm: at most this.
        norm_type: the p of the p-norm; `float("inf")` for the largest absolute value.
        error_if_nonfinite: raise if the norm is not a finite number, instead of scaling by it.

    Raises:
        UsageError: before `smp.init()`, for a `max_norm` that is none, for gradients that an `OffloadOptimizer` holds,
            or on all ranks for such a norm.
    """
    if not max_norm >= 0:
        raise UsageError(f"gradients cannot be clipped to a norm of {max_norm}", hint="give 0 or more")
    tensors = _listed(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
    unique = {id(tensor): tensor for tensor in tensors}
    check_not_held(unique.values(), "clip_grad_norm_ would clip")
    pairs = gradients_of(unique.values())
    norm = global_norm(pairs, norm_type)
    if error_if_nonfinite:
        _check_finite(norm)
    clip_to_norm((gradient for _, gradient in pairs), max_norm, norm)
    return norm


def gradients_of(parameters: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return those of the model's parameters that have a gradient, each with the one that the optimizer will use."""
    end_accumulation()
    masters = None if state.optimizer is None else state.optimizer.masters
    if masters is not None:
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = masters.gradients_of(parameters)
        return pairs
    return [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]


def end_accumulation() -> None:
    """Make the gradients of the model final, before they are used; all ranks call this."""
    if state.model is not None and state.model.data_parallel is not None:
        state.model.data_parallel.end_accumulation()


def end_accumulation_before(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Do so before an update of the model by an optimizer that is not wrapped."""
    own = set(map(id, _parameters_here()))
    if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        end_accumulation()


def _listed(tensors: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _check_finite(norm: torch.Tensor) -> None:
    if not bool(torch.isfinite(norm)):
        raise UsageError(
            f"the norm of the gradients is {norm.item()}, which they cannot be clipped by",
            hint="pass error_if_nonfinite=False to scale by it anyway, or skip this step",
        )


@torch.no_grad()
def global_norm(gradients: Iterable[tuple[torch.Tensor, torch.Tensor]], norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of the whole model's gradient, the same on every rank; all ranks call this.

    Args:
        gradients: this rank's parameters of the model with a gradient of each, which may be another tensor than its
            `grad` (that of a master weight, say); the parameter tells on which ranks it counts.

    Returns:
        A tensor without dimensions; in float64, or on a single rank in the type of the gradients, float32 at least.
    """
    state.refuse_inside_step("clip_grad_norm_")
    pairs = list(gradients)
    locals_ = [local_tensor_of(gradient) for parameter, gradient in pairs if placement_of(parameter).is_counted_here]
    norm = _local_norm([gradient for gradient in locals_ if gradient.numel()], float(norm_type))
    group = group_of_all_gradients()
    if dist.get_world_size(group) == 1:
        return norm
    # In float64 the powers neither overflow nor lose precision. All ranks must send one type, and a rank without
    # gradients does not know the type of the others'.
    is_max_norm = norm_type == float("inf")
    value = norm.double() if is_max_norm else norm.double() ** norm_type
    # NaN travels as a flag of its own: a maximum would lose it.
    packed = torch.stack([value.nan_to_num(nan=0.0, posinf=float("inf")), value.isnan().double()])
    with waiting("the norm of the gradients", group):
        dist.all_reduce(packed, op=dist.ReduceOp.MAX if is_max_norm else dist.ReduceOp.SUM, group=group)
    total = packed[0] if is_max_norm else packed[0] ** (1.0 / norm_type)
    return total.masked_fill(packed[1] != 0, float("nan"))


def _local_norm(gradients: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    if not gradients:
        return torch.zeros((), device=state.device)
    total: torch.Tensor
    if all(gradient.dtype in (torch.float32, torch.float64) for gradient in gradients):
        total = get_total_norm(gradients, norm_type)
    else:  # torch's function computes in the dtype of the gradients: half precision overflows and has few digits
        norms = [
            torch.linalg.vector_norm(gradient, norm_type, dtype=torch.promote_types(gradient.dtype, torch.float32))
            for gradient in gradients
        ]
        total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    return total


@torch.no_grad()
def clip_to_norm(gradients: Iterable[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
    """Multiply gradients by `max_norm / norm` where that is less than 1, without waiting for the device."""
    grad_holders = []
    for gradient in gradients:
        part = local_tensor_of(gradient)
        # torch scales the `.grad` of tensors; ours may be on no tensor. This alias holds one, and costs no memory.
        grad_holder = part.detach()
        grad_holder.grad = part
        grad_holders.append(grad_holder)
    torch.nn.utils.clip_grads_with_norm_(grad_holders, max_norm, norm)


# --- norms of single tensors ------------------------------------------------------------------------------------------


def norms_of(tensors: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norm of each tensor, for divided ones that of the whole; all ranks call this.

    Args:
        tensors: what this rank holds of values that are divided as the parameters are (gradients, say).
        norm_type: 2, or infinity for the largest absolute value.
    """
    # An empty tensor has no largest value.
    filled = [value if value.numel() else value.new_zeros(1) for value in tensors]
    norms = torch.stack(list(torch._foreach_norm(filled, norm_type)))
    squares = norm_type == 2.0
    for group, divided in _divided_over(parameters):
        positions = torch.tensor(divided, device=norms.device)
        whole = norms[positions].square() if squares else norms[positions]
        with waiting("the norms of divided tensors", group):
            dist.all_reduce(whole, op=dist.ReduceOp.SUM if squares else dist.ReduceOp.MAX, group=group)
        norms[positions] = whole.sqrt() if squares else whole
    return norms


def _divided_over(parameters: Sequence[torch.Tensor]) -> Iterator[tuple[dist.ProcessGroup, list[int]]]:
    """Yield groups of ranks, each with the positions of the parameters whose pieces it holds: innermost first.

    With sharded optimizer states a rank has some of the parameters, and of the pieces those that the others have.
    """
    dtensors = [position for position, parameter in enumerate(parameters) if is_dtensor(parameter)]
    mesh = next((parameter.device_mesh for parameter in parameters if is_dtensor(parameter)), None)
    if mesh is not None:
        yield mesh.get_group("shard"), dtensors
    tp_shards = [position for position, parameter in enumerate(parameters) if is_tp_shard(parameter)]
    if state.initialized and state.tp_size > 1 and tp_shards:
        yield state.process_group(CommGroup.TP_GROUP), tp_shards


# --- torch.nn.utils ---------------------------------------------------------------------------------------------------


def _replace_in_torch(name: str, replacement: Callable[..., Any]) -> Callable[[], None]:
    """Let torch's clipping call `replacement(original, ...)` for a helper; return what puts the original back.

    Args:
        name: a private function of `torch.nn.utils.clip_grad`, as torch 2.11 to 2.13 have it; one that another torch
            does not have is left alone. `torch.nn.utils` has some without the underscore.
    """
    original = getattr(torch_clip_grad, name, None)
    if getattr(original, "func", None) is replacement:  # already there
        return lambda: None
    places = [(torch_clip_grad, name), (nn.utils, name.removeprefix("_"))]
    places = [(module, name) for module, name in places if getattr(module, name, None) is original is not None]
    for place in places:
        setattr(*place, functools.partial(replacement, original))

    def put_back() -> None:
        for place in places:
            setattr(*place, original)

    return put_back


def clip_whole_models_with_torch(*, accumulates: bool) -> None:
    """Make torch's own `clip_grad_norm_` do what ours does with gradients of the model, until `smp.shutdown()`.

    Where ranks or master weights hold them it would clip by a different norm on each rank, or clip what nobody uses;
    where they are accumulated, it might clip them before they are averaged. With a loss scale its `clip_grad_value_`
    would compare with scaled values.
    """
    if group_of_all_gradients().size() > 1 or half_dtype(state.cfg) is not None or accumulates:
        state.reset_hooks.append(_replace_in_torch("_get_total_norm", _total_norm))
        state.reset_hooks.append(_replace_in_torch("_clip_grads_with_norm_", _clip_grads_with_norm))
        state.reset_hooks.append(_replace_in_torch("_group_tensors_by_device_and_dtype", _group_gradients))


def _total_norm(
    original: Callable[..., torch.Tensor],
    gradients: Sequence[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    own = _parameters_by_gradient()
    # A rank whose part has no gradients gets none, and takes part all the same.
    if gradients and not any(id(gradient) in own for gradient in gradients):
        return original(gradients, norm_type, error_if_nonfinite, foreach)
    norm = global_norm(gradients_of(own[id(gradient)] for gradient in gradients if id(gradient) in own), norm_type)
    if error_if_nonfinite:
        _check_finite(norm)
    return norm


def _clip_grads_with_norm(
    original: Callable[..., None],
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    total_norm: torch.Tensor,
    foreach: bool | None = None,
) -> None:
    known = _listed(parameters)
    check_not_held(known, "clip_grad_norm_ would clip")
    optimizer = state.optimizer
    if optimizer is not None and any(optimizer.model_parameter(parameter) is not parameter for parameter in known):
        raise UsageError(
            "torch's clip_grad_norm_ was given master weights, which have no gradients before the optimizer's step",
            hint="give it model.parameters(), or call smp.clip_grad_norm_, which takes both",
        )
    own = set(map(id, _parameters_here()))
    if any(id(gradient) in own for gradient in known):
        clip_to_norm((gradient for _, gradient in gradients_of(known)), max_norm, total_norm)
    else:
        original(known, max_norm, total_norm, foreach)


def _group_gradients(original: Callable[..., Any], lists: list[list[torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
    if not any(lists):  # only `clip_grad_value_` comes here without any gradient: it would clip nothing
        check_not_held(None, "clip_grad_value_ would clip")
        state.refuse_inside_step("clip_grad_value_")
    known = _parameters_by_gradient()
    own = [known[id(gradient)] for gradient in lists[0] if id(gradient) in known]
    if own:  # gradients of the model, from `clip_grad_value_`: clip what the optimizer will use, without a loss scale
        used = {id(parameter): gradient for parameter, gradient in gradients_of(own)}
        lists = [[used.get(id(known.get(id(gradient))), gradient) for gradient in lists[0]]]
    return original(lists, *args, **kwargs)


def _parameters_by_gradient() -> dict[int, torch.Tensor]:
    """Return this rank's parameters of the model by the ids of their gradients."""
    return {id(parameter.grad): parameter for parameter in _parameters_here() if parameter.grad is not None}


def _parameters_here() -> list[torch.Tensor]:
    """Return the parameters of the model that this rank holds."""
    # Not `local_parameters()`, which warns the script before a pipeline's first step.
    return [] if state.model is None else [parameter for _, parameter in state.model.local_named_parameters()]


class GradientHolder(Protocol):
    """An optimizer that uses gradients up in backward, so that clipping would find none."""

    def holds_gradients_of(self) -> Iterable[torch.Tensor]:
        """Return the parameters whose gradients it takes now."""


_holders: Final[WeakSet[GradientHolder]] = WeakSet()


def hold_gradients(holder: GradientHolder) -> None:
    """Refuse to clip gradients that `holder` holds, as long as it lives."""
    _holders.add(holder)
    _replace_in_torch("_clip_grads_with_norm_", _clip_grads_with_norm)
    _replace_in_torch("_group_tensors_by_device_and_dtype", _group_gradients)


def check_not_held(parameters: Iterable[torch.Tensor] | None, action: str) -> None:
    """Raise UsageError, beginning with `action`, if an optimizer uses up gradients of these parameters; None: any."""
    held = {id(parameter) for holder in _holders for parameter in holder.holds_gradients_of()}
    if held and (parameters is None or any(id(parameter) in held for parameter in parameters)):
        raise UsageError(
            f"{action} nothing: these gradients go to an OffloadOptimizer, not to `parameter.grad`",
            hint='give it overlap="forward"; then gradients wait in `parameter.grad`, or it clips by max_grad_norm=...',
        )
