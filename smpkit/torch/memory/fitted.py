"""Train a model within a given memory: each layer keeps its activations, offloads its input, or is recomputed.

One process, any model and any trainer: a step begins with the first forward after all backwards of the step before.
What a step is for, and the choice, are `chooser.py`'s.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smpkit.errors import UsageError
from smpkit.plan.tune.chain import Choice
from smpkit.torch.core import devices
from smpkit.torch.core.arguments import check_module, check_num_bytes, check_positive, device_of
from smpkit.torch.core.module_call import ModuleCall, OriginalCall
from smpkit.torch.core.runtime import state
from smpkit.torch.core.tensor_spec import tensors_in
from smpkit.torch.memory.chooser import Chooser, count_choices, largest_of
from smpkit.torch.memory.measure import device_limit
from smpkit.torch.offload.engine import ActivationEngine, make_engine
from smpkit.torch.offload.link import Link
from smpkit.torch.offload.order import Lead, check_lead
from smpkit.torch.recompute.layer import ChosenCheckpoint
from smpkit.units import amount


def fit(
    model: nn.Module,
    *,
    device_gib: float | None = None,
    host_gib: float | None = None,
    layers: Sequence[nn.Module] | None = None,
    lead: Lead = "auto",
    min_bytes: int | None = None,
    link: Link | None = None,
    group: dist.ProcessGroup | None = None,
    deadline_seconds: float = 600.0,
) -> Fitted:
    """Make a model train within this much memory, as fast as it can; nothing else in the script changes.

    ::

        fitted = smpkit.fit(model, device_gib=24, host_gib=64)
        for batch in loader:                 # any loop, any trainer
            model(batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(fitted.report())

    Layers are the items of the model's `ModuleList`s and `Sequential`s. Three steps after the first update measure
    them; from then on each layer keeps its activations, has its input copied to the host and is recomputed, or is only
    recomputed, whichever together is the fastest that fits. Larger inputs than those measured are provided for as they
    come. Losses, gradients and weights are the same bits as without it. Works beside `DistributedDataParallel`,
    `fully_shard` and autocast; call it before they wrap the model.

    It reads the peaks of torch's memory statistics for the device, and resets them at the beginning of the steps that
    it measures, and when it has chosen.

    Args:
        model: all of it on one device. Turn off its own checkpointing, and that of a Trainer's arguments.
        device_gib: what everything may take there, weights and optimizer states included; None: 95 % of the device.
        host_gib: for activations on the host; None: three quarters of what is free.
        layers: what is chosen for, instead of the items of lists; none inside another.
        lead: how many layers ahead of backward loads are issued; "auto" takes the smallest number without a stall.
        min_bytes: smaller inputs stay on the device; None: 1 MiB on a GPU, 0 on the CPU.
        link: another link than the device's own, such as `smpkit.testing.EmulatedLink`. Without one the CPU offloads
            nothing, for its activations are on the host already.
        group: ranks with the same model that must choose alike, such as those that share each layer (tensor
            parallelism); None: this process chooses for itself.
        deadline_seconds: of each wait for a copy.

    Raises:
        UsageError: an argument of a wrong type or value; no layers; layers that are checkpointed or compiled already; a
            model of `smp.DistributedModel`, or on several devices.
    """
    check_module("fit", model)
    check_lead(lead)
    check_num_bytes("min_bytes", min_bytes, of_none="1 MiB on a GPU, 0 on the CPU")
    fitted_layers = _layers(model, layers)
    device = device_of(model) if link is None else link.device
    for name, limit in (("device_gib", device_gib), ("host_gib", host_gib)):
        if limit is not None:
            check_positive(name, limit, "GiB", hint="for example 24")
    limit_bytes = device_limit("device_gib", device, device_gib)
    engine = make_engine(
        device,
        lead=lead,
        min_bytes=min_bytes,
        host_budget_bytes=None if host_gib is None else int(host_gib * 2**30),
        link=link,
        deadline_seconds=deadline_seconds,
    )
    offloads = link is not None or devices.has_streams(device)
    chooser = Chooser(
        {name: ChosenCheckpoint(layer, keeper=engine) for name, layer in fitted_layers.items()},
        lambda: (*model.parameters(), *model.buffers()),
        engine.link,
        engine,
        limit_bytes=limit_bytes,
        allowed=frozenset(Choice) if offloads else frozenset({Choice.KEEP, Choice.RECOMPUTE}),
        agree=functools.partial(largest_of, group=group, device=device, what="the choice of `smpkit.fit`"),
        lead=None if lead == "auto" else lead,
    )
    return Fitted(model, engine, chooser)


@dataclass(frozen=True)
class LayerFit:
    """A layer, what it was measured to cost in a step, and what was chosen for it."""

    name: str
    choice: Choice
    forward_seconds: float = 0.0
    saved_bytes: int = 0
    """What autograd keeps of it if it is kept."""
    input_bytes: int = 0
    """What is kept, or offloaded, if it is recomputed."""


@dataclass(frozen=True)
class FitReport:
    """What was chosen, why, and what came of it; bytes are those of this process."""

    layers: tuple[LayerFit, ...]
    limit_bytes: int
    """How much the device may hold."""
    other_bytes: int = 0
    """The part of it that weights, gradients and optimizer states take, and the most that was there beside what layers
    keep, such as logits or the recomputation of a layer."""
    device_bytes: int = 0
    """The peak on the device, predicted."""
    peak_bytes: int | None = None
    """The peak on the device since the choice; None: the device does not count."""
    host_bytes: int = 0
    """The size of activations on the host, predicted."""
    step_seconds: float = 0.0
    """Predicted, from one forward to that of the next step."""
    least_seconds: float = 0.0
    """Measured, with every layer holding as little as it can: the median of the steps before the choice."""
    kept_seconds: float = 0.0
    """Predicted, if every layer kept all that autograd saves, which needs more memory."""
    unmeasured: str = ""
    """Why nothing has been measured, so that all these numbers but the limit are 0; empty if they are not."""

    @property
    def fits(self) -> bool:
        """Whether the device holds it, as predicted."""
        return self.device_bytes <= self.limit_bytes

    def __str__(self) -> str:
        layers = f"{len(self.layers)} layers: {count_choices(layer.choice for layer in self.layers)}"
        if self.unmeasured:
            return f"{layers}\n{self.unmeasured}"
        peak = "" if self.peak_bytes is None else f", {amount(self.peak_bytes)} so far"
        least, kept = f"{1e3 * self.least_seconds:.1f} ms", f"{1e3 * self.kept_seconds:.1f} ms"
        host, outside = amount(self.host_bytes), f"{amount(self.other_bytes)} of it outside the layers"
        step = f"{1e3 * self.step_seconds:.1f} ms planned; {least} with every layer holding as little as it can"
        lines = [
            layers,
            f"device: {amount(self.device_bytes)} of {amount(self.limit_bytes)} planned{peak}; {outside}; host: {host}",
            f"step: {step}, {kept} with all kept",
        ]
        if not self.fits:
            needed, limit = amount(self.device_bytes), amount(self.limit_bytes)
            lines.append(
                f"does not fit: {needed} needed even with every layer holding as little as it can, {limit} available"
            )
        return "\n".join(lines)


class Fitted:
    """A model that `fit` takes care of."""

    def __init__(self, model: nn.Module, engine: ActivationEngine, chooser: Chooser) -> None:
        self._model, self._engine, self._chooser = model, engine, chooser
        self._live = weakref.WeakSet[_Forward]()
        """Forwards that a backward may still come to."""
        self._last_output: Any = None
        """What the latest layer of the forward that runs has returned."""
        self._had_backward = self._in_forward = False
        for layer in chooser.layers.values():
            layer.watch = self._run_layer
            ModuleCall.on(layer.module).checkpointing = layer
        ModuleCall.on(model).checkpointing = self._around_model

    # --- what users call ---------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        choices = count_choices(self.choices.values()) if self.has_chosen else "not chosen yet"
        return f"Fitted({type(self._model).__name__}, {len(self.choices)} layers: {choices})"

    @property
    def choices(self) -> dict[str, Choice]:
        """What each layer does, by its path in the model."""
        return self._chooser.choices

    @property
    def has_chosen(self) -> bool:
        """Whether layers do what was chosen for them, by measurement or by `load_state_dict`."""
        return self._chooser.is_done

    def report(self) -> FitReport:
        """Return what was chosen, and what came of it; before anything was measured, only what layers do now."""
        facts, pick = self._chooser.facts, self._chooser.pick
        if facts is None or pick is None:
            layers = tuple(LayerFit(name, choice) for name, choice in self.choices.items())
            why = f"`fit` decides after about six steps that update; this run had {self._chooser.num_steps}"
            if self.has_chosen:
                why = "chosen by an earlier run: this one has measured nothing"
            return FitReport(layers, self._chooser.limit_bytes, unmeasured=why)
        return FitReport(
            layers=tuple(
                LayerFit(name, self.choices[name], layer.forward_seconds, layer.saved_bytes, layer.input_bytes)
                for name, layer in zip(facts.names, facts.layers, strict=True)
            ),
            limit_bytes=self._chooser.limit_bytes,
            other_bytes=int(facts.other_bytes),
            device_bytes=int(facts.device_bytes(pick)),
            peak_bytes=devices.peak_bytes(self._engine.link.device),
            host_bytes=int(pick.cost.host_bytes),
            step_seconds=facts.step_seconds(pick),
            least_seconds=facts.busy_seconds + facts.stall_seconds,
            kept_seconds=facts.kept_seconds,
        )

    def as_forward(self, call: OriginalCall) -> OriginalCall:
        """Return a call that counts as a forward of the model, for trainers that call a method of it instead."""
        return functools.wraps(call)(self._around_model(call))

    def state_dict(self) -> dict[str, str]:
        """Return the choices, by layer: put them into a checkpoint, so that a resumed run does the same at once."""
        return {name: str(choice) for name, choice in self.choices.items()}

    def load_state_dict(self, state_dict: Mapping[str, str]) -> None:
        """Take choices of an earlier run, and measure nothing.

        Raises:
            UsageError: they are for other layers.
        """
        self._chooser.take({name: Choice(word) for name, word in state_dict.items()})

    def remove(self) -> None:
        """Leave the model as it was, and free the host memory; no graph of it may be needed any more."""
        for module in (self._model, *(layer.module for layer in self._chooser.layers.values())):
            ModuleCall.on(module).checkpointing = None
        self._chooser.remove()
        self._engine.close()

    # --- the life of a step ------------------------------------------------------------------------------------------

    def _around_model(self, original: OriginalCall) -> OriginalCall:
        return functools.partial(self._run_model, original)

    def _run_model(self, original: OriginalCall, *args: Any, **kwargs: Any) -> Any:
        if self._in_forward or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return original(*args, **kwargs)
        if not self._live:
            self._begin_step()
        self._in_forward = True
        try:
            output = original(*args, **kwargs)
            self._await_backward(output)
        except BaseException:
            self._live.clear()
            self._engine.abandon_step()
            raise
        finally:
            self._in_forward, self._last_output = False, None
        return output

    def _begin_step(self) -> None:
        """Begin a step: the first forward after all backwards of the step before."""
        # A forward without a backward, or one that an exception ended, is no step: measure the next one in its place.
        if self._had_backward:
            self._engine.end_step()
        self._chooser.end_step(had_backward=self._had_backward)
        self._had_backward = False
        if not self._chooser.num_steps:
            _refuse_own_checkpoints(self._model)  # a Trainer switches them on after `fit`, TRL's unless told otherwise
        self._chooser.begin_step()

    def _run_layer(self, layer: ChosenCheckpoint, original: OriginalCall, args: Any, kwargs: Any) -> Any:
        output = self._chooser.run_layer(layer, original, args, kwargs)
        if self._in_forward:
            self._last_output = output
        return output

    def _await_backward(self, output: Any) -> None:
        """Note when the backward of a forward begins, or that its graph is gone."""
        # A model may put its loss into an object that nobody can look into: its last layer's output has a graph, too.
        tensors = _with_graph(output) or _with_graph(self._last_output)
        if not tensors:
            return
        forward = _Forward()

        def begin_backward(_gradient: Tensor) -> None:
            self._live.discard(forward)
            self._had_backward = True

        self._live.add(forward)
        for tensor in tensors:
            tensor.register_hook(begin_backward)  # type: ignore[no-untyped-call]


class _Forward:
    """A forward of the model. Only hooks of its graph hold it, so it goes with the graph."""


def _with_graph(output: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]


def _layers(model: nn.Module, chosen: Sequence[nn.Module] | None) -> dict[str, nn.Module]:
    """Return the layers to choose for, by path; it is an error if something else takes care of them."""
    kind = type(model).__name__
    wrapped: object = state.model
    if wrapped is not None and any(module is wrapped for module in model.modules()):
        raise UsageError(
            "fit takes a plain model, not one of smp.DistributedModel",
            hint="call smp.set_activation_checkpointing, and set `offload_activations: true`",
        )
    names = {module: name for name, module in model.named_modules()}
    layers = dict(_layers_of(model)) if chosen is None else {names.get(layer, ""): layer for layer in chosen}
    for module, name in names.items():
        if hasattr(module, "_orig_mod") or ModuleCall.of(module).is_compiled:
            raise UsageError(f"`{name or kind}` is compiled", hint="fit the model without torch.compile")
    if not layers:
        raise UsageError(f"{kind} has no list of layers", hint="name them: fit(model, layers=[model.first, ...])")
    if "" in layers:
        raise UsageError(f"a layer is no part of {kind}, or is all of it", hint="give modules inside the model")
    for name, layer in layers.items():
        if not (set(layer.modules()) - {layer}).isdisjoint(layers.values()):
            raise UsageError(f"`{name}` contains another of the layers", hint="give layers side by side")
        if ModuleCall.of(layer).checkpointing is not None or ModuleCall.of(model).checkpointing is not None:
            raise UsageError(f"`{name}` of {kind} is checkpointed, or fitted, already", hint="do one of the two")
    _refuse_own_checkpoints(model)
    return layers


def _refuse_own_checkpoints(model: nn.Module) -> None:
    """Refuse what Hugging Face's models do inside of a layer's call: it would recompute what was chosen to be kept."""
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False):
            raise UsageError(
                f"`{name or type(model).__name__}` checkpoints its layers itself, so `fit` cannot choose for them",
                hint="call model.gradient_checkpointing_disable(); in a Trainer's arguments, also TRL's, say"
                " `gradient_checkpointing=False`",
            )


def _layers_of(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost items of lists of modules, with their paths."""
    for name, child in module.named_children():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            yield prefix + name, child
        else:
            yield from _layers_of(child, f"{prefix}{name}.")
