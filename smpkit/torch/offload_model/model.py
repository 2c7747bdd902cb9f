"""OffloadModel: train a model that is larger than the device, one slice of layers at a time."""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from smpkit.errors import UnsupportedError, UsageError
from smpkit.torch.core import devices
from smpkit.torch.core.arguments import check_bool, check_num_bytes, check_sizes
from smpkit.torch.core.module_call import ModuleCall, OriginalCall
from smpkit.torch.core.offloader import KEEPING, Offloader
from smpkit.torch.core.tensor_spec import NON_TENSOR_TYPES, map_tensors, tensors_in, version_of
from smpkit.torch.core.tree import children
from smpkit.torch.distributed.objects import gather_objects
from smpkit.torch.offload.engine import ActivationEngine, make_engine
from smpkit.torch.offload_model.engine import DEADLINE_SECONDS, Engine, sources
from smpkit.torch.offload_model.slices import (
    Balance,
    Slice,
    check_layers,
    cut_layers,
    is_batched,
    join,
    make_slices,
    split,
)
from smpkit.torch.placement.blocks import repeated_blocks
from smpkit.torch.recompute.api import is_plain
from smpkit.torch.recompute.layer import ModuleCheckpoint
from smpkit.torch.recompute.surroundings import all_modules
from smpkit.torch.recompute.torch_checkpoint import patch_torch_checkpoint

_CPU = torch.device("cpu")


class ModelShard(nn.Module):
    """A slice, under the names that FairScale gives its layers."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.model_shard = layers

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the layers."""
        return self.model_shard(*inputs, **kwargs)


class _Layers(nn.Sequential):
    """Neighbouring layers of a Sequential; the first may take several arguments."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        first, *others = self  # not `children()`, which lists a layer only once
        value = first(*inputs, **kwargs)
        for layer in others:
            value = layer(value)
        return value


class OffloadModel(nn.Module):
    """Keeps weights, gradients and optimizer state on the CPU, and on the device only the slice of layers that runs.

    It replaces FairScale's class of this name; changing the import is enough::

        model = OffloadModel(nn.Sequential(...), torch.device("cuda"), num_slices=8, checkpoint_activation=True)
        optimizer = torch.optim.AdamW(model.parameters())  # runs on the CPU; OffloadOptimizer is faster
        loss = criterion(model(inputs), targets.cuda())
        loss.backward()
        optimizer.step()

    Losses, gradients, buffers and weights are those of the plain model. The output and the buffers are on `device`,
    parameters and their gradients on the CPU. Weights are copied to the device about twice a step, the next slice while
    one computes, and gradients come back once. What no slice has alone (an embedding tied to the head, a norm behind
    the blocks) is on the device for the whole step.

    Args:
        model: an `nn.Sequential`; a list of modules, each of which is a slice; or any module with repeated blocks, such
            as the models of Hugging Face, whose own forward runs. Its parameters are moved to the CPU.
        device: where slices run. On `cpu` nothing is copied: slices compute with the weights where they are.
        offload_device: where weights and the inputs of checkpointed slices are kept; the CPU.
        num_slices: at most one per layer. More slices take less memory on the device; a slice's computation should
            take longer than its copy.
        checkpoint_activation: keep only the slices' inputs (of a model with blocks: the blocks'), on the CPU, and run
            them again in backward. Without it everything that autograd saves stays on the device, except weights.
        num_microbatches: pieces of the batch that pass through a slice one after the other while it is on the device;
            for a Sequential or a list. Batches are split along dimension 0 of all input tensors; a batch with fewer
            rows makes fewer pieces. Tensors with one row or none (masks, positions) go to every piece whole.
        layers: paths of the modules that are cut into slices, for a model whose blocks are not found; a path to a
            `ModuleList` or `Sequential` stands for its members.
        dtype: of the computation with floating-point weights, for example `torch.bfloat16`; parameters keep their own.
            Inputs and buffers are not converted: without autocast, pass floating-point ones in this dtype.
        prefetch: load the next slice while one computes.
        balance: what slices have equal shares of: "params" or "bytes".
        host_budget_bytes: the most host memory for inputs of checkpointed slices; what does not fit stays on the
            device. None: three quarters of what is free.
        process_group: processes that train the same model on other batches; gradients are averaged over it. All begin
            with the same weights, and a parameter without a gradient is an error.

    Raises:
        TypeError: no model, no device, or a model in which no blocks are found.
        UsageError: an argument of a wrong type or value, paths that lead nowhere.
        UnsupportedError: an `offload_device` other than the CPU, a device that does not exist, a layer that writes to
            its weights in forward.
    """

    def __init__(
        self,
        model: Any,
        device: torch.device | str,
        offload_device: torch.device | str = _CPU,
        num_slices: int = 3,
        checkpoint_activation: bool = False,
        num_microbatches: int = 1,
        *,
        layers: Sequence[str] | None = None,
        dtype: torch.dtype | None = None,
        prefetch: bool = True,
        balance: Balance = "params",
        host_budget_bytes: int | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        if not model and (isinstance(model, nn.Sequential) or not isinstance(model, nn.Module)):
            raise TypeError("`model` argument to `OffloadModel` cannot be None.")
        self.device = _known_device(_as_device("device", device))
        self.offload_device = _as_device("offload_device", offload_device)
        if self.offload_device.type != "cpu":
            raise UnsupportedError(f"offload_device is {offload_device}; weights rest on the CPU")
        check_sizes("OffloadModel", num_slices=num_slices, num_microbatches=num_microbatches)
        check_bool("checkpoint_activation", checkpoint_activation)
        check_bool("prefetch", prefetch)
        check_num_bytes("host_budget_bytes", host_budget_bytes, of_none="three quarters of what is free")
        _check_dtype(dtype)
        self._num_microbatches = num_microbatches
        self._unpacks = isinstance(model, list)
        """Whether a tuple that one slice returns becomes the positional arguments of the next, as in FairScale's
        lists; the layers of an `nn.Sequential` get what the layer before returned as one argument."""
        self._is_chain = self._unpacks or (layers is None and _only_calls_its_layers(model))
        if num_microbatches > 1 and not self._is_chain:
            raise UsageError(
                f"num_microbatches={num_microbatches} needs a chain: a list, or an nn.Sequential without `layers`, and"
                f" without a forward, weights or hooks of its own; this is a {type(model).__name__}",
                hint="add up the gradients of several smaller batches instead (`(loss / count).backward()` for each)",
            )
        blocks = _layers_of(model, layers)
        check_layers(model if isinstance(model, nn.Module) else nn.ModuleList(blocks))
        # A slice is run again with its input, which its first layer must leave alone.
        may_begin = _leaves_its_input if checkpoint_activation and self._is_chain else lambda _: True
        groups = [[block] for block in blocks] if self._unpacks else cut_layers(blocks, num_slices, balance, may_begin)
        if self._is_chain:
            shards = [group[0] if self._unpacks else _Layers(*group) for group in groups]
            self.model_slices: list[nn.Module] = [ModelShard(shard) for shard in shards]
            model = nn.Sequential(*self.model_slices)
        else:
            self.model_slices = [nn.ModuleList(group) for group in groups]
        if any(isinstance(module, OffloadModel) for module in model.modules()):
            raise UsageError(f"a slice of another OffloadModel is in this {type(model).__name__}; only one can move it")
        self._model = model
        for module in model.modules():  # buffers stay on the device: they are small, and forward changes them
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(self.device)
        slices = make_slices(model, groups, dtype, self.device)
        in_place = is_the_host(self.device) and not any(piece.is_rounded for piece in slices)
        self._engine = Engine(slices, self.device, in_place=in_place, prefetch=prefetch, group=process_group)
        self._keeper: Offloader = KEEPING
        if checkpoint_activation and not in_place:
            # One load ahead: a slice computes longer than its input travels.
            self._keeper = make_engine(
                self.device, lead=1, host_budget_bytes=host_budget_bytes, deadline_seconds=DEADLINE_SECONDS
            )
        if process_group is not None:
            _check_equal(slices, process_group)
        undo = contextlib.ExitStack()
        _hook_state_dicts(model, self._engine, undo)
        undo.callback(register_optimizer_step_post_hook(functools.partial(_note_step, slices)).remove)
        # `use_reentrant=True` around a block hides from us what the block returns, until it has run again in backward.
        patch_torch_checkpoint()
        keeper = self._keeper if checkpoint_activation else None
        for index, group in enumerate([[piece] for piece in self.model_slices] if self._is_chain else groups):
            for block in group:
                _surround(block, self._engine, index, keeper, undo)
        weakref.finalize(self, undo.close)

    def __repr__(self) -> str:
        return f"OffloadModel({len(self.model_slices)} slices, run on {self.device})"

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model with tensors from wherever they are; return what it returns, on `device`.

        A Sequential or a list gets all arguments in its first layer.

        Raises:
            UsageError: several microbatches, and inputs of different batch sizes or an output without a batch; a layer
                has written to a weight.
        """
        if torch.compiler.is_compiling():
            # The weights in the buffers change from slice to slice: torch.compile can trace layers only, one by one.
            disable: Any = torch.compiler.disable
            return disable(self._forward)(inputs, kwargs)
        return self._forward(inputs, kwargs)

    def _forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None) is not None:
            raise UsageError(
                "DistributedDataParallel cannot average the gradients of an OffloadModel, whose parameters move",
                hint="give OffloadModel(..., process_group=torch.distributed.group.WORLD), and do not wrap it",
            )
        to_device = functools.partial(devices.to_device, device=self.device)
        inputs = tuple([map_tensors(to_device, value) for value in inputs])
        kwargs = {key: map_tensors(to_device, value) for key, value in kwargs.items()}
        if isinstance(self._keeper, ActivationEngine):
            self._keeper.end_step()
        self._engine.begin_forward()
        before = sources(tensors_in((inputs, kwargs)))
        # Under autocast each use casts a weight anew: kept casts of all slices would fill the device.
        caches = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            result = self._run_chain(inputs, kwargs) if self._is_chain else self._model(*inputs, **kwargs)
        finally:
            torch.set_autocast_cache_enabled(caches)
            self._engine.end_forward()
        self._engine.watch(None, tensors_in(result), before)
        return result

    def _run_chain(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one slice after the other, all microbatches in each."""
        pieces = split((inputs, kwargs), self._num_microbatches)
        shared = [(tensor, version_of(tensor)) for tensor in tensors_in((inputs, kwargs)) if not is_batched(tensor)]
        values: list[Any] = list(pieces)
        for index, shard in enumerate(self.model_slices):
            for number, value in enumerate(values):
                if index == 0:
                    args, keywords = value
                else:
                    args, keywords = (value if self._unpacks and isinstance(value, tuple) else (value,)), {}
                values[number] = shard(*args, **keywords)
        if len(pieces) > 1 and any(version_of(tensor) != version for tensor, version in shared):
            raise UsageError(
                "a layer changed in place a tensor that all microbatches get whole, so the later ones got another",
                hint="write `mask = mask * 2` instead of `mask *= 2`, or give num_microbatches=1",
            )
        return join(values, pieces)

    def synchronize(self) -> None:
        """Wait until an `OffloadOptimizer` has brought all parameters up to date; then you may read and write them.

        `parameters()`, `state_dict()` and `eval()` of the model do so themselves.
        """
        self._engine.synchronize()
        for piece in self._engine.slices:
            piece.is_stale = True

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names and parameters, up to date; see `torch.nn.Module.named_parameters`."""
        self.synchronize()
        return super().named_parameters(prefix, recurse, remove_duplicate)

    def train(self, mode: bool = True) -> OffloadModel:
        """Switch between training and evaluation; see `torch.nn.Module.train`."""
        if mode != self.training:
            self.synchronize()
        super().train(mode)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the parameters' gradients; see `torch.nn.Module.zero_grad`."""
        for parameter in self._engine.parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()

    def __getstate__(self) -> dict[str, Any]:
        """Refuse copies and pickles, which would share buffers and streams with this model."""
        raise UsageError(
            "an OffloadModel is not copied or pickled",
            hint="copy or average the plain model before it is wrapped, or save the state_dict()",
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OffloadModel:
        """Accept what changes nothing; see `torch.nn.Module.to`.

        Raises:
            UsageError: another device or another dtype.
        """
        del recurse
        dtypes = {tensor.dtype for tensor in (*self._engine.parameters, *self.buffers())}
        results = {dtype: fn(torch.empty(0, dtype=dtype, device=_CPU)) for dtype in dtypes}
        elsewhere = [result.device for result in results.values() if result.device not in (_CPU, self.device)]
        if elsewhere:
            raise UsageError(
                f"an OffloadModel cannot be moved to {elsewhere[0]}",
                hint="give OffloadModel(..., device=...) where its slices are to run",
            )
        if any(result.dtype != dtype for dtype, result in results.items()):
            raise UsageError(
                "an OffloadModel cannot be converted to another type",
                hint="convert the plain model before it is wrapped, or give dtype=torch.bfloat16 to compute in it",
            )
        return self


def _note_step(slices: Sequence[Slice], optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Publish what an optimizer has updated, perhaps through `.data`, as torch_optimizer's do: no version tells."""
    updated = {param for group in optimizer.param_groups for param in group["params"] if param.grad is not None}
    for piece in slices:
        if not updated.isdisjoint(piece.parameters):  # not those of the optimizers in an OffloadOptimizer's thread
            piece.is_stale = True


def _hook_state_dicts(model: nn.Module, engine: Engine, undo: contextlib.ExitStack) -> None:
    """Wait for updates before the state dict of a module in `model` is read or loaded, until `undo` is closed."""
    reference = weakref.ref(engine)

    def wait(module: nn.Module, *details: Any) -> None:  # (prefix, keep_vars), or (state, prefix, metadata, ...)
        if (engine := reference()) is None:
            return
        if len(details) > 2 and details[2].get("assign_to_params_buffers"):
            raise UsageError(
                f"load_state_dict(assign=True) would take the parameters of this {type(module).__name__} out of its"
                " OffloadModel",
                hint="load without assign: values are copied into the parameters",
            )
        engine.synchronize()

    for module in model.modules():
        undo.callback(module.register_state_dict_pre_hook(wait).remove)  # type: ignore[no-untyped-call]
        undo.callback(module.register_load_state_dict_pre_hook(wait).remove)  # type: ignore[no-untyped-call]


def _surround(
    block: nn.Module, engine: Engine, index: int, keeper: Offloader | None, undo: contextlib.ExitStack
) -> None:
    """Bring the slice of a block for its calls in the model's forward, until `undo` is closed.

    The block is a layer of the user's model, or in a chain all of a slice. With a `keeper` of its input it is
    checkpointed.
    """
    # A call of its own: without it the block is as it was, and goes with the last reference to it.
    before, call = block._compiled_call_impl, copy.copy(ModuleCall.of(block))
    inner = call.checkpointing or (None if keeper is None else ModuleCheckpoint(block, keeper=keeper))

    def around(original: OriginalCall) -> OriginalCall:
        return functools.partial(_run_block, block, engine, index, original if inner is None else inner(original))

    call.checkpointing = around
    block._compiled_call_impl = call
    undo.callback(setattr, block, "_compiled_call_impl", before)


def _run_block(block: nn.Module, engine: Engine, index: int, run: OriginalCall, *args: Any, **kwargs: Any) -> Any:
    """Run a block; its backward begins with the gradient of any tensor that it returns, sets or shows to hooks.

    A variational autoencoder sets a part of its loss as an attribute, which is computed last and comes first in
    backward. A perceptual loss may be of features alone that hooks have taken from the middle of a layer.
    """
    if not engine.is_in_forward:
        return run(*args, **kwargs)
    engine.switch_to(index)
    before = sources([*tensors_in((args, kwargs)), *_attributes(block)])
    shown: list[Tensor] = []
    with contextlib.ExitStack() as handles:
        for module in all_modules([block]):
            if module._forward_hooks or module._forward_pre_hooks:
                hook = module.register_forward_hook(lambda _, *values: shown.extend(tensors_in(values)), prepend=True)
                handles.callback(hook.remove)
        result = run(*args, **kwargs)
    engine.watch(index, [*_outputs(block, result), *_attributes(block), *shown], before)
    return result


def _attributes(layer: nn.Module) -> list[Tensor]:
    values = [value for module in all_modules([layer]) for value in vars(module).values()]
    return [value for value in values if isinstance(value, Tensor)]


def _outputs(layer: nn.Module, result: Any) -> list[Tensor]:
    """Return the tensors in what a layer has returned, whose gradients tell when its backward begins."""
    tensors = tensors_in(result)
    if not tensors and torch.is_grad_enabled() and type(result) not in NON_TENSOR_TYPES and children(result) is None:
        raise UnsupportedError(
            f"a {type(layer).__name__} returned an object of type `{type(result).__name__}`, in which an OffloadModel"
            " sees no tensors: it would not know when that layer's backward begins",
            hint="return tensors, also in tuples, lists, dicts and dataclasses",
        )
    return tensors


def _only_calls_its_layers(model: Any) -> bool:
    """Return whether a model is an nn.Sequential whose call does nothing but to call its layers in order."""
    if not isinstance(model, nn.Sequential) or not is_plain(model):
        return False
    hooks = model._forward_pre_hooks, model._forward_hooks, model._backward_pre_hooks, model._backward_hooks
    return not any((model._parameters, model._buffers, *hooks))


def _layers_of(model: Any, paths: Sequence[str] | None) -> list[nn.Module]:
    """Return the modules that are cut into slices."""
    if paths is not None:
        return _layers_at(model, paths)
    if isinstance(model, list):
        wrong = next((module for module in model if not isinstance(module, nn.Module)), None)
        if wrong is not None:
            raise TypeError(
                "`model` argument to `OffloadModel` must be of type `nn.Sequential`. It is a list with"
                f" {wrong!r} in it."
            )
        return model
    if isinstance(model, nn.Sequential):
        return list(model)
    blocks = repeated_blocks(model) if isinstance(model, nn.Module) else []
    if not blocks:
        raise TypeError(
            f"`model` argument to `OffloadModel` must be of type `nn.Sequential`. It is a {type(model).__name__} in"
            " which no list repeats blocks: give the paths of its layers (layers=[...]), or a list of modules."
        )
    return blocks


def _layers_at(model: Any, paths: Sequence[str]) -> list[nn.Module]:
    if not isinstance(model, nn.Module) or isinstance(paths, str) or not paths:
        raise UsageError(
            f"layers is {paths!r} of a {type(model).__name__}; it must be a list of module paths of a module",
            hint='for example layers=["embedding", "blocks", "head"]',
        )
    layers: list[nn.Module] = []
    for path in paths:
        try:
            module = model.get_submodule(path)
        except AttributeError as error:
            names = ", ".join(name for name, _ in model.named_children())
            raise UsageError(f"layers names `{path}`, but {error}", hint=f"the model's children are {names}") from None
        layers += module if isinstance(module, nn.ModuleList | nn.Sequential) else [module]
    if not layers:
        raise UsageError(f"layers names {list(paths)}, which hold no modules")
    return layers


def _leaves_its_input(layer: nn.Module) -> bool:
    """Return whether a layer does not change its input in place, as far as its first leaf says."""
    first = next(module for module in layer.modules() if not any(module.children()))
    return not getattr(first, "inplace", False)


def _check_dtype(dtype: object) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UsageError(
            f"dtype is {dtype!r}; weights are computed in a floating-point type",
            hint="for example dtype=torch.bfloat16; None keeps each weight's own",
        )


def _check_equal(slices: Sequence[Slice], group: dist.ProcessGroup) -> None:
    """Raise UsageError unless all processes begin with the same weights."""
    own = [float(master.double().sum()) for piece in slices for master in piece.masters]
    sums = gather_objects(own, group, "OffloadModel(..., process_group=...)")
    if any(other != sums[0] for other in sums):
        raise UsageError(
            "the processes of process_group begin with different weights",
            hint="seed all of them alike (torch.manual_seed) before the model is made, or load the same state dict",
        )


class _NoGpuError(UnsupportedError, TypeError):
    """Also a TypeError, which FairScale raises here."""


def is_the_host(device: torch.device) -> bool:
    """Return whether the device computes with the host's memory, so that nothing must be copied."""
    return device.type == "cpu"


def _as_device(name: str, device: object) -> torch.device:
    if device is None or device == "":
        raise TypeError(f"`{name}` argument to `OffloadModel` cannot be None.")
    try:
        result = torch.device(cast("torch.device", device))
    except (RuntimeError, TypeError) as error:
        raise UsageError(
            f'{name} is {device!r}; it must be "cpu" or a device that torch sees, such as "cuda"'
        ) from error
    if result.type == "cpu" and result.index:
        raise UsageError(f"{name} is {device!r}, but a machine has one CPU for torch", hint='it is called "cpu"')
    return result


def _known_device(device: torch.device) -> torch.device:
    if device.type == "cpu":
        return device
    if not devices.has_streams(device):
        raise UnsupportedError(f"device is {device}; slices run on cuda or cpu, or on another device with streams")
    if not devices.is_available(device):
        raise _NoGpuError(f"device is {device}, but torch sees no GPU", hint="on a machine without one use device=cpu")
    return torch.zeros(0, device=device).device  # with an index, as tensors have it
