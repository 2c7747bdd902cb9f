"""What `smp.DistributedModel` refuses: models and options that cannot work, and scripts that do not train."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Final, NoReturn

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy

from smpkit.errors import UnsupportedError, UsageError
from smpkit.torch.core.runtime import state
from smpkit.torch.core.tensor_spec import tensors_in
from smpkit.torch.core.warn import warn_user
from smpkit.torch.model_parts import ModelParts, refuse_use_of_parts
from smpkit.torch.offload_model.model import OffloadModel
from smpkit.torch.pipeline.parameters import has_gradient_of_a_step
from smpkit.torch.placement.delayed import refuse_unset_values
from smpkit.torch.placement.placement import Placement
from smpkit.torch.placement.shards import refuse_assignment
from smpkit.torch.precision.cast import half_dtype


def check_arguments(
    module: nn.Module,
    trace_device: str,
    trace_execution_times: bool,
    trace_memory_usage: bool,
    backward_passes: int,
    bucket_cap_mb: float | None,
) -> None:
    """Refuse a model or an option of `smp.DistributedModel` that cannot work; warn of one without effect."""
    if not isinstance(module, nn.Module):
        raise UsageError(f"DistributedModel wraps a torch.nn.Module, got {type(module).__name__}")
    lazy = [name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if is_lazy(tensor)]
    refusals: tuple[tuple[bool, str, str], ...] = (
        (isinstance(module, ModelParts), "this model is a DistributedModel already", "wrap a model once"),
        (
            isinstance(module, nn.parallel.DistributedDataParallel),
            "this model is wrapped in DistributedDataParallel",
            "pass the plain model and set `ddp: True`",
        ),
        (
            state.model is not None,
            "there is a DistributedModel already, and a script can have only one",
            "put models that are trained together into one torch.nn.Module; call smp.shutdown() before another one",
        ),
        (
            bool(lazy),
            f"`{''.join(lazy[:1])}` has no shape yet: its module is a lazy one",
            "call the model once with a batch, on all ranks with the same seed, before it is wrapped",
        ),
        (trace_device not in ("gpu", "cpu"), f"trace_device must be one of `gpu`, `cpu`, got `{trace_device}`", ""),
        (
            trace_device == "cpu" and trace_execution_times,
            "trace_execution_times measures on the GPU, but trace_device is `cpu`",
            "pass trace_device='gpu' or trace_execution_times=False",
        ),
        (backward_passes < 1, f"backward_passes_per_step must be at least 1, got {backward_passes}", ""),
        (
            bucket_cap_mb is not None and bucket_cap_mb <= 0,
            f"bucket_cap_mb must be more than 0, got {bucket_cap_mb}",
            "",
        ),
    )
    for applies, message, hint in refusals:
        if applies:
            raise UsageError(message, hint=hint or None)
    refuse_unset_values(module)
    if trace_memory_usage:
        warn_user("trace_memory_usage=True has no effect: what each part keeps is computed from shapes")
    if any(isinstance(part, OffloadModel) for part in module.modules()):
        _check_offload_model()


def _check_offload_model() -> None:
    cfg = state.cfg
    if state.dp_size > 1:
        raise UnsupportedError(
            "there is an OffloadModel in this model, whose gradients a DistributedModel cannot average",
            hint="give OffloadModel(..., process_group=smp.get_dp_process_group()), and do not wrap it",
        )
    if state.pp_size > 1 or state.tp_size > 1 or cfg.sharded_data_parallel_degree > 1 or half_dtype(cfg) is not None:
        raise UnsupportedError(
            "there is an OffloadModel in this model, which moves its own weights: in a DistributedModel it works on one"
            " rank only",
            hint="remove pipeline, tensor and sharded data parallelism, fp16 and bf16, or use the plain model",
        )


def check_trains(model: nn.Module, parameters: Iterable[torch.Tensor]) -> None:
    """Find scripts that do not train: an update of `parameters` after passes, without a backward or a gradient.

    A forgotten `model.backward(loss)` costs nothing but the training: losses are printed, checkpoints saved, and
    torch's optimizers skip parameters without a gradient and say nothing.
    """
    if any(isinstance(module, OffloadModel) for module in model.modules()):
        return  # its optimizer may have used gradients up in the backward
    own = {id(param): param for param in model.parameters()}
    known = list(parameters)
    trains = any(param.requires_grad for param in own.values()) and any(id(param) in own for param in known)
    if trains and all(param.grad is None for param in (*known, *own.values())):
        raise UsageError(
            "optimizer.step() was called after training passes, but no backward has run: no weight would change",
            hint="call `model.backward(loss)` in the function decorated with @smp.step; passes that are not for"
            " training run under `torch.no_grad()` or `model.eval()`",
        )


def refuse_layers_dropped_by_rank(model: nn.Module) -> None:
    """Refuse LayerDrop in a forward outside of a step, where tensor-parallel ranks with own samples draw differently.

    Values of different layers would be exchanged, which have the same shape. In a step all ranks leave out the same.
    """
    if state.cfg.prescaled_batch:
        return
    for module in model.modules():
        for name, value in getattr(getattr(module, "config", None), "__dict__", {}).items():
            if "layerdrop" in name and isinstance(value, float) and value > 0:
                raise UnsupportedError(
                    f"the configuration of {type(module).__name__} has `{name}` {value}: outside of a step each"
                    " tensor-parallel rank would leave out other layers",
                    hint=f"train in a function decorated with @smp.step, or set `{name}` to 0",
                )


def refuse_gradients_beyond_step(step: str, arguments: object) -> None:
    """Refuse a batch that needs gradients: ranks get copies of it, and what these are given would come back to nothing.

    So an encoder outside the model would never be trained.
    """
    tensors = (value for value in tensors_in(arguments) if value.requires_grad and not isinstance(value, nn.Parameter))
    for tensor in tensors:
        raise UsageError(
            f"a tensor of shape {list(tensor.shape)} that needs gradients was passed to the step `{step}`, and a"
            " pipeline gives none back",
            hint="put what makes it into the model, or pass it with `.detach()`",
        )


def refuse_parameters_beyond_model(placement: Placement, parameters: Iterable[torch.Tensor]) -> None:
    """Refuse to train what is not in the model: pipeline ranks that do not use it would keep old values, and replicas
    would train it on their own samples alone.

    What is wider than parameters of the model may be masters of the script's own.
    """
    for param in parameters:
        if param.requires_grad and param not in placement and (state.pp_size > 1 or param.grad is not None):
            if any(known.parameter.dtype.itemsize < param.dtype.itemsize for known in placement):
                return
            raise _beyond_model_error(param)


def refuse_updates_in_half(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Refuse an optimizer that is not wrapped to update weights in half precision, without masters and loss scale."""
    model = state.model
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        is_half = param.dtype in (torch.float16, torch.bfloat16) and param.requires_grad and param.grad is not None
        if is_half and model is not None and param in model.placement:
            raise UsageError(
                f"{type(optimizer).__name__} would update weights in half precision, which loses small updates: with"
                " `fp16` and `bf16` the master weights and the loss scale are in smp.DistributedOptimizer",
                hint="wrap it, `optimizer = smp.DistributedOptimizer(optimizer)`, one for all parameters of the model",
            )


def refuse_what_one_rank_trains(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Refuse to train beside a pipeline, by another optimizer of torch's, what steps gave gradients on one rank alone.

    What a script trains outside of steps (a probe on what they return) is the same on all ranks of a pipeline.
    """
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if has_gradient_of_a_step(param):
            raise _beyond_model_error(param)


def _beyond_model_error(parameter: torch.Tensor) -> UsageError:
    alone = "a pipeline would train it on one of its ranks only"
    if state.pp_size == 1:
        alone = "each replica would train it on its own samples only"
    return UsageError(
        f"the optimizer trains a parameter of shape {list(parameter.shape)} that is not in the model, and {alone}",
        hint="wrap one module that has both: the model and, say, the loss with weights of its own; and make the"
        " optimizer when the model has its final weights, after `resize_token_embeddings`",
    )


_watched: Final = weakref.WeakSet[nn.Module]()
"""The modules of the wrapped model."""


def watch_users_model(root: nn.Module) -> None:
    """Refuse, for as long as a model is wrapped, what libraries do to a model that is a process's own.

    Replace its parameters by assignment, save what this rank holds, and give it new parameters once ranks know their
    parts, as `resize_token_embeddings` and adapters do: no rank would average their gradients, or hold them for others.
    """
    refuse_assignment(root)
    refuse_use_of_parts(root)
    _watched.clear()
    _watched.update(root.modules())
    for register in (register_module_parameter_registration_hook, register_module_module_registration_hook):
        state.reset_hooks.append(register(_refuse_new).remove)


def _refuse_new(module: nn.Module, name: str, value: nn.Module | nn.Parameter | None) -> None:
    model = state.model
    if module not in _watched or model is None or not model.partitioned or state.pp_size == state.dp_size == 1:
        return
    if state.cfg.sharded_data_parallel_degree > 1:  # torch assigns parameters when it gathers them
        return
    parameters = value.parameters() if isinstance(value, nn.Module) else () if value is None else (value,)
    for parameter in parameters:
        if parameter not in model.placement:
            raise UsageError(
                f"`{name}` of {type(module).__name__} was given a new parameter of shape {list(parameter.shape)} after"
                " smp.DistributedModel: other ranks do not know it, and nobody would average its gradient",
                hint="resize embeddings, and add adapters and heads, before the model is wrapped",
            )


def refuse_comm_hook(model: nn.Module, state: object, callable: Callable[..., object]) -> NoReturn:  # noqa: A002, ARG001
    """Raise UnsupportedError: gradients are reduced by smpkit itself."""
    raise UnsupportedError(
        "model.register_comm_hook would replace the all-reduce of gradients, which smpkit does itself",
        hint="remove it; with `fp16` or `bf16` gradients travel in half precision",
    )


def refuse_join(model: nn.Module) -> NoReturn:  # noqa: ARG001
    """Raise UnsupportedError: no replica goes on without the others."""
    raise UnsupportedError(
        "model.join() lets replicas take different numbers of steps, which smpkit does not do",
        hint="give every rank as many batches: DistributedSampler(..., drop_last=True) and"
        " DataLoader(..., drop_last=True)",
    )
