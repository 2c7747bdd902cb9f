"""OffloadModel: train a model that is larger than the device, one slice of layers at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from smpkit.errors import UnsupportedError, UsageError
from smpkit.torch.core import devices
from smpkit.torch.core.arguments import check_bool, check_num_bytes
from smpkit.torch.core.tensor_spec import flatten
from smpkit.torch.offload.link import Link
from smpkit.torch.offload_model.chain import Balance, check_count, slice_model
from smpkit.torch.offload_model.counted_link import Traffic
from smpkit.torch.offload_model.engine import SliceEngine, synchronize_on_state_dict
from smpkit.torch.offload_model.forward_pass import Run

__all__ = ["OffloadModel", "rename_layers"]

_LAYER: Final = re.compile(r"(\d+)\.model_shard\.(\d+)\.")
_CPU = torch.device("cpu")


class OffloadModel(nn.Module):
    """Keeps weights, gradients and optimizer state on the CPU, and on the device only the slice of layers that runs.

    It replaces FairScale's class of this name; changing the import is enough::

        model = OffloadModel(nn.Sequential(...), torch.device("cuda"), num_slices=8, checkpoint_activation=True)
        optimizer = torch.optim.AdamW(model.parameters())  # runs on the CPU; OffloadOptimizer is faster
        loss = criterion(model(inputs), targets.cuda())
        loss.backward()
        optimizer.step()

    Losses, gradients, buffers and weights are those of the plain model. The output and the buffers are on `device`,
    parameters and their gradients on the CPU. Weights are copied to the device about twice a step; the next slice is
    copied while one computes. They come back only where a forward itself writes to them (`nn.Embedding(max_norm=...)`,
    `weight.clamp_()`), which `checkpoint_activation` refuses. Gradients of `nn.Embedding(sparse=True)` are sparse.

    One thread at a time may call it or run its backward; a second one gets an error.

    Args:
        model: an `nn.Sequential`; a list of modules, each of which is a slice; a Hugging Face language model
            (BERT, BLOOM, Falcon, Gemma, GPT-2, GPT-NeoX, Llama, Mistral, Mixtral, OPT, Phi, Qwen2, Qwen3); or any
            module, with `layers`. Its parameters are moved to the CPU.
        device: where slices run. On `cpu` nothing is copied: slices compute with the weights where they are.
        offload_device: where weights and tensors at slice boundaries are kept; the CPU.
        num_slices: at most one per layer. More slices take less memory on the device; a slice's computation should
            take longer than its copy.
        checkpoint_activation: keep only the slices' inputs, on the CPU, and run each slice again in backward. Without
            it everything that autograd saves stays on the device, except weights.
        num_microbatches: pieces of the batch that pass through a slice one after the other while it is on the device.
            Batches are split along dimension 0 of all input tensors; a batch with fewer rows makes fewer pieces.
            Tensors with one row or none (masks, positions) go to every piece whole; if all layers hand them on, they
            are returned once.
        layers: paths of the modules that `model` calls one after the other, each with what the one before returned; a
            path to a `ModuleList` or `Sequential` stands for its members.
        dtype: of the computation with floating-point weights, for example `torch.bfloat16`; parameters keep their own.
            Inputs and buffers are not converted: without autocast, pass floating-point ones in this dtype.
        prefetch: copy the next slice while one computes.
        balance: what slices have equal shares of: "params", "bytes", or a list with the cost of each layer.
        host_budget_bytes: the most host memory for tensors at slice boundaries; what does not fit stays on the device.
            None: three quarters of what is free.
        links: the device's links for weights and for slice boundaries. For tests: with two
            `smpkit.testing.EmulatedLink` the CPU stands in for a device with memory of its own.

    Raises:
        TypeError: no model, no device, or a model that is not known to be a chain of layers.
        UsageError: an argument of a wrong type or value, paths that lead nowhere; two threads call the model at once.
        UnsupportedError: an `offload_device` other than the CPU, or a device that does not exist.
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
        links: tuple[Link, Link] | None = None,
    ) -> None:
        super().__init__()
        if model is None:
            raise TypeError("`model` argument to `OffloadModel` cannot be None.")
        given: Any = device
        if given is None or given == "":
            raise TypeError("`device` argument to `OffloadModel` cannot be None.")
        self.device = _known_device(_as_device("device", device))
        self.offload_device = _as_device("offload_device", offload_device)
        if self.offload_device.type != "cpu":
            raise UnsupportedError(f"offload_device is {offload_device}; weights rest on the CPU")
        check_count("num_microbatches", num_microbatches)
        given = links
        if given is not None and not (isinstance(given, tuple | list) and len(given) == 2):
            raise UsageError(f"links is {links!r}; it must be two links, for weights and for slice boundaries, or None")
        check_bool("checkpoint_activation", checkpoint_activation)
        check_bool("prefetch", prefetch)
        check_num_bytes("host_budget_bytes", host_budget_bytes, of_none="three quarters of what is free")
        given = dtype
        if given is not None and not (isinstance(given, torch.dtype) and given.is_floating_point):
            raise UsageError(
                f"dtype is {dtype!r}; weights are computed in a floating-point type",
                hint="for example dtype=torch.bfloat16; None keeps each weight's own",
            )
        sliced = slice_model(model, layers, num_slices, balance)
        self._model = sliced.module
        self.model_slices = sliced.slices
        self._settings: dict[str, Any] = {
            "unpack_tuple": sliced.unpack_tuple,
            "device": self.device,
            "dtype": dtype,
            "prefetch": prefetch,
            "checkpoint": checkpoint_activation,
            "num_microbatches": num_microbatches,
            "host_budget_bytes": host_budget_bytes,
        }
        self._engine = self._make_engine(links)
        if sliced.slices[0] in sliced.module.children():
            self.register_load_state_dict_pre_hook(_adapt)  # type: ignore[no-untyped-call]

    def _make_engine(self, links: tuple[Link, Link] | None = None) -> SliceEngine:
        engine = SliceEngine(self.model_slices, links=links, **self._settings)
        synchronize_on_state_dict(self.modules(), engine)
        return engine

    def __getstate__(self) -> dict[str, Any]:
        """Return what is copied and pickled: everything but the engine, with its buffers and threads."""
        self.synchronize()
        return {name: value for name, value in self.__dict__.items() if name != "_engine"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a copy, with an engine of its own; it needs an optimizer of its own, too."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._engine = self._make_engine()

    @property
    def traffic(self) -> Traffic:
        """Bytes copied between host and device since the model was made."""
        return self._engine.traffic

    @property
    def device_buffer_bytes(self) -> int:
        """Bytes of weights and gradients on the device: those of two slices, whatever the model's size."""
        return self._engine.device_weights.num_bytes + self._engine.gradients.num_bytes

    def is_weight(self, tensor: Tensor) -> bool:
        """Return whether a tensor on the device is a part of the weights there, for measurements of memory."""
        return self._engine.device_weights.holds(tensor)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model; all arguments go to the first layer, tensors from wherever they are.

        Returns what the last layer returns, on `device`, of all microbatches together.

        Raises:
            UsageError: several microbatches, and inputs of different batch sizes or an output without a batch.
        """
        if torch.compiler.is_compiling():
            # The weights in the buffers change from slice to slice: torch.compile can trace layers only, one by one.
            disable: Any = torch.compiler.disable
            return disable(self._forward)(inputs, kwargs)
        return self._forward(inputs, kwargs)

    def _forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._look_for_replicas()
        tensors, structure = flatten((inputs, kwargs))
        parameters = self._engine.parameters
        training = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*tensors, *parameters))
        run = Run(self._engine, structure, training=training)
        with run.alone():
            if training:
                outputs = _SlicedModelFunction.apply(run, len(parameters), *parameters, *tensors)  # type: ignore[no-untyped-call]
            else:
                outputs, _ = run.forward(tensors)
        return run.outputs.fill(outputs)

    def expect_averaging(self, who: str) -> None:
        """Note that `who` averages the gradients of parameters over processes.

        Raises:
            UsageError: an `OffloadOptimizer` takes them first; also raised when one is made later.
        """
        self._engine.note_averaging(who)

    def _look_for_replicas(self) -> None:
        # The model learns only here that DistributedDataParallel wraps it. Without this check replicas would diverge
        # silently under an OffloadOptimizer.
        wrapper: Any = getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
        if wrapper is not None and torch.distributed.get_world_size(wrapper.process_group) > 1:
            self.expect_averaging("DistributedDataParallel")

    def synchronize(self) -> None:
        """Wait until an `OffloadOptimizer` has brought all parameters up to date.

        `parameters()`, `state_dict()` and `eval()` of the model do so themselves.
        """
        self._engine.synchronize()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names and parameters, up to date; see `torch.nn.Module.named_parameters`."""
        self._engine.invalidate()
        return super().named_parameters(prefix, recurse, remove_duplicate)

    def train(self, mode: bool = True) -> OffloadModel:
        """Switch between training and evaluation; see `torch.nn.Module.train`."""
        if mode != self.training:
            self._engine.invalidate()
        super().train(mode)
        for piece in self.model_slices:  # they are no children of this module if it is sliced by paths
            piece.train(mode)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the parameters' gradients; see `torch.nn.Module.zero_grad`."""
        for parameter in self._engine.parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()
        if (consumer := self._engine.consumer) is not None:
            consumer.zero_grad()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OffloadModel:
        """Convert weights and buffers to another dtype (`half()`, `to(dtype)`); they stay where they are.

        Raises:
            UsageError: another device, or an `OffloadOptimizer` has states for the weights as they are.
        """
        del recurse
        tensors = [*self._engine.parameters, *self.buffers()]
        kinds = {tensor.dtype: fn(torch.empty(0, dtype=tensor.dtype, device=_CPU)) for tensor in tensors}
        elsewhere = [made.device for made in kinds.values() if made.device not in (_CPU, self.device)]
        if elsewhere:
            raise UsageError(
                f"an OffloadModel cannot be moved to {elsewhere[0]}",
                hint="give OffloadModel(..., device=...) where its slices are to run",
            )
        if all(made.dtype == dtype for dtype, made in kinds.items()):
            return self
        if self._engine.consumer is not None:
            raise UsageError(
                "an OffloadModel cannot be converted to another type under an OffloadOptimizer",
                hint="convert the model before the optimizer is made",
            )
        with torch.no_grad():
            for tensor in tensors:
                dtype, gradient = kinds[tensor.dtype].dtype, tensor.grad
                tensor.grad = None  # torch refuses a new dtype for a tensor that has a gradient of the old one
                tensor.data = tensor.data.to(dtype)
                tensor.grad = None if gradient is None else gradient.to(dtype)
        # Buffers have the old dtype's sizes: make all of them anew.
        before, self._engine = self._engine, self._make_engine(self._engine.links)
        if before.averaged_by is not None:
            self._engine.note_averaging(before.averaged_by)
        return self


class _SlicedModelFunction(torch.autograd.Function):
    """The whole model as one node of the user's graph; parameters are inputs of it, so they get gradients as usual."""

    @staticmethod
    def forward(ctx: Any, run: Run, num_parameters: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.run, ctx.num_parameters = run, num_parameters
        # Not `save_for_backward`: hooks that offload what is saved would copy all weights on the CPU.
        ctx.tensors, ctx.versions = tensors, [tensor._version for tensor in tensors]
        ctx.set_materialize_grads(False)  # None, not zeros, for outputs that the loss does not use
        outputs, differentiable = run.forward(tensors[num_parameters:])
        ctx.mark_non_differentiable(
            *(output for output, wanted in zip(outputs, differentiable, strict=True) if not wanted)
        )
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        tensors, run, keep = ctx.tensors, ctx.run, _keeps_graph()
        _check_unchanged(tensors, ctx.versions)
        parameters, inputs = tensors[: ctx.num_parameters], tensors[ctx.num_parameters :]
        try:
            with run.alone(), torch.no_grad():
                of_inputs, of_parameters = run.backward(inputs, parameters, gradients, keep=keep)
        finally:
            if not keep:  # also after an error half way, which has consumed the graphs of the last slices
                ctx.tensors = None
        return None, None, *of_parameters, *of_inputs


def _check_unchanged(tensors: Sequence[Tensor] | None, versions: Sequence[int]) -> None:
    """Raise what torch raises for a graph that is freed, or whose leaves have changed since the forward."""
    if tensors is None:
        raise RuntimeError(
            "Trying to backward through the graph of an OffloadModel a second time; "
            "specify retain_graph=True the first time"
        )
    changed = [tensor for tensor, version in zip(tensors, versions, strict=True) if tensor._version != version]
    if changed:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation since the "
            f"OffloadModel's forward: {len(changed)} weights or inputs, the first of shape {tuple(changed[0].shape)}"
        )


def _keeps_graph() -> bool:
    """Return whether this backward retains its graph; True where torch cannot tell."""
    autograd: Any = torch._C._autograd
    return bool(getattr(autograd, "_get_current_graph_task_keep_graph", lambda: True)())


class _NoGpuError(UnsupportedError, TypeError):
    """Also a TypeError, which FairScale raises here."""


def _as_device(name: str, device: object) -> torch.device:
    try:
        made = torch.device(cast("torch.device", device))
    except (RuntimeError, TypeError) as error:
        raise UsageError(
            f'{name} is {device!r}; it must be "cpu" or a device that torch sees, such as "cuda"'
        ) from error
    if made.type == "cpu" and made.index:
        raise UsageError(f"{name} is {device!r}, but a machine has one CPU for torch", hint='it is called "cpu"')
    return made


def _known_device(device: torch.device) -> torch.device:
    if device.type == "cpu":
        return device
    if not devices.has_streams(device):
        raise UnsupportedError(f"device is {device}; slices run on cuda or cpu, or on another device with streams")
    if not devices.is_available(device):
        raise _NoGpuError(f"device is {device}, but torch sees no GPU", hint="on a machine without one use device=cpu")
    return torch.zeros(0, device=device).device  # with an index, as tensors have it


def _adapt(model: OffloadModel, state: dict[str, Any], prefix: str, *_: Any) -> None:
    rename_layers(state, prefix, list(model._model.state_dict()))


def rename_layers(state: dict[str, Any], prefix: str, wanted: Iterable[str]) -> None:
    """Rename, in place, the layers of `state` to those of `wanted`, if they differ only in how they are sliced.

    Names count layers from 0 in each slice, as FairScale's do (`_model.1.model_shard.0.weight`), so the same layer has
    another name in a model with other slices. The order of layers is the same.

    Args:
        state: a state dict; entries of other modules are left alone.
        prefix: of the OffloadModel in it.
        wanted: the names in this model, below `_model`.
    """
    start = f"{prefix}_model."
    given = _layers(key.removeprefix(start) for key in state if key.startswith(start))
    here = _layers(wanted)
    if given == here or len(given) != len(here):
        return  # equal; or another model, for which torch's error about missing and unexpected keys is best
    moved = {}
    for old, new in zip(given, here, strict=True):
        for key in [key for key in state if key.startswith(start + old)]:
            moved[start + new + key.removeprefix(start + old)] = state.pop(key)
    state.update(moved)


def _layers(names: Iterable[str]) -> list[str]:
    """Return the prefixes that name layers, in the order of the layers."""
    found = {match.group(): (int(match[1]), int(match[2])) for name in names if (match := _LAYER.match(name))}
    return sorted(found, key=lambda name: found[name])
