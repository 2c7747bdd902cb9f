"""Lists of layers and the models that run them: where the layout of values changes.

::

    inputs ──► base model ──► embedding ──► layers[0] ... layers[-1] ──► norm ──► this rank's samples
           gather inputs     (everywhere    change                 change
           (SHARD_BATCH or    an ordinary    to the                back
           REPLICATE_GATHERED) parameter)    stack's layout

Before and after the layers each rank has its own samples, so gradients are those of ordinary data parallelism.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Collection, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from smpkit.errors import UnsupportedError, UsageError
from smpkit.torch.core.runtime import state
from smpkit.torch.distributed.objects import gather_objects
from smpkit.torch.tensor_parallel import collectives
from smpkit.torch.tensor_parallel.hf_plan.layers import current_layout
from smpkit.torch.tensor_parallel.layouts import Layout

__all__ = ["inputs_are_gathered", "install_base_hooks", "install_stack_hooks"]

# --- the list of layers ---------------------------------------------------------------------------------------------


def install_stack_hooks(layers: nn.Module, boundary: Layout) -> None:
    """Change the layout before the first layer of a list, and back after the last one."""
    assert isinstance(layers, nn.ModuleList)
    if boundary is not Layout.REPLICATE:
        layers[0].register_forward_pre_hook(functools.partial(_enter_stack, boundary), with_kwargs=True)
        for layer in layers:
            layer.register_forward_pre_hook(_refuse_extra_trained_inputs, with_kwargs=True)
        layers[-1].register_forward_hook(functools.partial(_leave_stack, boundary))


def _refuse_extra_trained_inputs(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse layers that read values with a gradient besides their hidden states: their layout would not change."""
    named = {**{f"argument {index}": value for index, value in enumerate(args)}, **kwargs}
    trained = [name for name, value in named.items() if isinstance(value, torch.Tensor) and value.requires_grad]
    if len(trained) > 1:
        raise UnsupportedError(
            f"a layer ({type(layer).__name__}) reads values with a gradient besides its hidden states"
            f" ({', '.join(trained[1:])}), which is supported only if all tensor-parallel ranks hold the same",
            hint="set `prescaled_batch: true` and `optimize: speed`",
        )


def _enter_stack(
    boundary: Layout, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Change hidden states to the layout of the stack: a hook before the first layer."""
    if args and isinstance(args[0], torch.Tensor):
        return (_as_in_stack(args[0], boundary), *args[1:]), kwargs
    if isinstance(kwargs.get("hidden_states"), torch.Tensor):
        return args, {**kwargs, "hidden_states": _as_in_stack(kwargs["hidden_states"], boundary)}
    raise UnsupportedError(
        f"the first layer of the model ({type(module).__name__}) was called without hidden states",
        hint="train this model without tensor parallelism",
    )


def _as_in_stack(hidden: torch.Tensor, boundary: Layout) -> torch.Tensor:
    boundary = current_layout(boundary)
    if boundary is Layout.REPLICATE_GATHERED:
        return _keep_own_gradient(hidden)
    if boundary is Layout.SHARD_BATCH:
        return hidden.narrow(0, *_own_samples(hidden.shape[0]))
    return collectives.scatter_to_tp(hidden, 1) if boundary is Layout.SHARD_SEQUENCE else hidden


def _leave_stack(boundary: Layout, _module: nn.Module, _args: Any, output: Any) -> Any:
    """Change hidden states back to this rank's samples: a hook after the last layer."""
    boundary = current_layout(boundary)
    hidden = output[0] if isinstance(output, tuple) else output
    if boundary is Layout.REPLICATE_GATHERED:
        hidden = collectives.scatter_to_tp(hidden, 0)
    elif boundary is Layout.SHARD_SEQUENCE:
        hidden = collectives.gather_from_tp(hidden, 1)
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def _own_samples(of_all: int) -> tuple[int, int]:
    return of_all // state.tp_size * state.tp_rank, of_all // state.tp_size


def _keep_own_gradient(x: torch.Tensor) -> torch.Tensor:
    """Return `x`, all samples of the group, with a gradient for this rank's samples only."""
    made: torch.Tensor = _OwnGradient.apply(x)  # type: ignore[no-untyped-call]
    return made


class _OwnGradient(torch.autograd.Function):
    # Every rank has the gradient of all samples here. Before the stack the ranks' gradients are averaged, so a sample
    # must count on one rank only: the one that brought it.

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        start, length = _own_samples(grad.shape[0])
        own = torch.zeros_like(grad)
        own.narrow(0, start, length).copy_(grad.narrow(0, start, length))
        return own


# --- the model around it --------------------------------------------------------------------------------------------


def install_base_hooks(base: nn.Module, name: str, boundaries: Collection[Layout], *, several: bool) -> None:
    """Make a model run on the inputs of all ranks of the group, where each brings its own.

    Args:
        boundaries: the layouts between its layers.
        several: whether it has several lists of layers, which read each other's results.
    """
    base.register_forward_pre_hook(functools.partial(_refuse_outputs, name, boundaries), with_kwargs=True)
    if not state.cfg.prescaled_batch:
        base.register_forward_pre_hook(functools.partial(_gather_inputs, name, several), with_kwargs=True)
        base.register_forward_hook(_end_forward, always_call=True)


_OPTIONAL_OUTPUTS: Final = {
    "output_attentions": frozenset[Layout](),  # each rank has those of its own heads
    "output_hidden_states": frozenset({Layout.REPLICATE}),
    "output_router_logits": frozenset({Layout.REPLICATE, Layout.SHARD_BATCH}),
}
"""What a model can be asked for besides its result, and the layouts in which a rank has it for its own samples."""


def _refuse_outputs(
    name: str, boundaries: Collection[Layout], module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refuse optional outputs that this rank does not have for its own samples: a hook before a model's forward."""
    now = {current_layout(boundary) for boundary in boundaries}
    for what, valid in _OPTIONAL_OUTPUTS.items():
        asked = kwargs.get(what)
        if asked is None:
            asked = getattr(module.config, what, False)
        if not asked or now <= valid:
            continue
        called = f"`{name}` ({type(module).__name__}) was asked for `{what}`, but"
        if not valid:
            raise UnsupportedError(f"{called} each tensor-parallel rank has some of the heads", hint="leave it out")
        held = ", ".join(sorted(boundary.value for boundary in now))
        raise UnsupportedError(
            f"{called} between its layers each tensor-parallel rank holds other values than those of its samples"
            f" (boundary: {held})",
            hint="set `prescaled_batch: true` and `optimize: speed`",
        )


class _ForwardState(threading.local):
    """Whether this thread is in the forward of a model that has gathered its inputs.

    By thread: over a pipeline, microbatches that are suspended in a forward each have a thread of their own.
    """

    gathered = False


_forward_state = _ForwardState()


def inputs_are_gathered() -> bool:
    """Tell whether this thread is in the forward of a model that has gathered its inputs."""
    return _forward_state.gathered


def _end_forward(_module: nn.Module, _args: Any, _output: Any) -> None:
    _forward_state.gathered = False


def _gather_inputs(
    name: str, several: bool, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Gather a model's inputs: a hook before its forward."""
    if several:
        raise UnsupportedError(
            f"`{name}` ({type(module).__name__}) has several stacks of layers that read each other's results,"
            " which cannot be divided over ranks that bring their own batches",
            hint="set `prescaled_batch: true`, and give the ranks of a tensor-parallel group the same batch",
        )
    samples = _samples(args, kwargs)
    _compare_inputs(name, args, kwargs)
    _forward_state.gathered = True
    gathered = [_gather_input(value, "", samples) for value in args]
    return tuple(gathered), {key: _gather_input(value, key, samples) for key, value in kwargs.items()}


def _samples(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    for value in (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.dim() > 1:
            return value.shape[0]
    raise UnsupportedError(
        "the model was called without a tensor that says how many samples there are",
        hint="pass `input_ids` or `inputs_embeds`",
    )


def _gather_input(value: Any, name: str, samples: int) -> Any:
    if isinstance(value, dict):  # masks by kind of layer
        return {key: _gather_input(each, name, samples) for key, each in value.items()}
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return value
    if value.shape[0] == samples:
        return collectives.gather_to_tp(value, 0)
    if name == "position_ids" and value.dim() == 3 and value.shape[1] == samples:  # of several axes
        return collectives.gather_to_tp(value, 1)
    return value


_compared_inputs: Final[set[tuple[Any, ...]]] = set()


def _compare_inputs(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Check that all ranks bring inputs of the same names and shapes, the first time that these are seen here.

    Raises:
        UsageError: they do not.
    """
    named = {**{str(index): value for index, value in enumerate(args)}, **kwargs}
    tensors = {key: value for key, value in named.items() if isinstance(value, torch.Tensor)}
    own_inputs = tuple(sorted((key, str(value.dtype), *value.shape) for key, value in tensors.items()))
    if own_inputs in _compared_inputs or any(collectives.is_dry_run(value) for value in tensors.values()):
        return
    if not _compared_inputs:
        state.reset_hooks.append(_compared_inputs.clear)
    group = collectives.tp_group()
    what = f"comparison of the inputs of `{name}` between tensor-parallel ranks"
    by_rank = gather_objects(own_inputs, group, what)
    if any(each != own_inputs for each in by_rank):
        ranks = dist.get_process_group_ranks(group)
        listed = "; ".join(f"{_input_shapes(each)} on rank {rank}" for rank, each in zip(ranks, by_rank, strict=True))
        raise UsageError(
            f"the tensor-parallel ranks called `{name}` with different inputs: {listed}",
            hint="give every rank as many samples of the same length, and the same arguments",
        )
    _compared_inputs.add(own_inputs)


def _input_shapes(inputs: tuple[tuple[Any, ...], ...]) -> str:
    return ", ".join(f"{key} {list(shape)}" for key, _, *shape in inputs) or "no tensors"
