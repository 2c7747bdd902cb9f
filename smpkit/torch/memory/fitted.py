"""Train a model within a given memory: each layer keeps its activations, offloads its input, or is recomputed.

One process, any model and any trainer: a step begins with the first forward after all backwards of the step before
(`graphs.py`). What a step is for, and the choice, are `chooser.py`'s.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from smpkit.errors import UsageError
from smpkit.plan.tune.chain import Choice
from smpkit.torch.core import devices
from smpkit.torch.core.arguments import check_module, check_num_bytes
from smpkit.torch.core.module_call import ModuleCall, OriginalCall
from smpkit.torch.core.runtime import state
from smpkit.torch.distributed.deadline import waiting
from smpkit.torch.memory.chooser import Chooser, Phase, Site
from smpkit.torch.memory.facts import gib
from smpkit.torch.memory.graphs import LiveGraphs
from smpkit.torch.memory.limits import device_limit
from smpkit.torch.offload.engine import make_engine
from smpkit.torch.offload.link import Link
from smpkit.torch.offload.order import Lead, check_lead
from smpkit.torch.offload.report import OffloadReport
from smpkit.torch.offloading import device_of
from smpkit.torch.recompute.layer import ChosenCheckpoint

_LISTS = (nn.ModuleList, nn.Sequential)

__all__ = ["FitReport", "Fitted", "LayerFit", "fit"]

_GIB: Final = 2**30


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
    it measures.

    Args:
        model: all of it on one device. Turn off its own checkpointing (`gradient_checkpointing_disable()`).
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
    return Fitted(
        model,
        device_gib=device_gib,
        host_gib=host_gib,
        layers=layers,
        lead=lead,
        min_bytes=min_bytes,
        link=link,
        group=group,
        deadline_seconds=deadline_seconds,
    )


@dataclass(frozen=True)
class LayerFit:
    """A layer, what it was measured to cost in a step, and what was chosen for it."""

    name: str
    choice: Choice
    forward_seconds: float
    saved_bytes: int
    """What autograd keeps of it if it is kept."""
    input_bytes: int
    """What is kept, or offloaded, if it is recomputed."""


@dataclass(frozen=True)
class FitReport:
    """What was chosen, why, and what came of it; bytes are those of this process."""

    layers: tuple[LayerFit, ...]
    limit_bytes: int
    """That the device may hold."""
    other_bytes: int
    """Of the limit: weights, gradients, optimizer states, and what the model computes outside its layers."""
    device_bytes: int
    """The peak on the device, predicted."""
    host_bytes: int
    """Of activations on the host, predicted."""
    step_seconds: float
    """Predicted, from one forward to that of the next step."""
    least_seconds: float
    """Measured, with every layer holding as little as it can: the median of the steps before the choice."""
    kept_seconds: float
    """Predicted, if every layer kept all that autograd saves, which needs more memory."""
    measured_bytes: int | None
    """The peak of an early step as chosen; None: not known, or not counted by the device."""
    measured_seconds: float | None
    gap: float
    """By which share of its time the best choice could be faster; 0: this one is the best."""
    fits: bool
    """Whether the device holds it, as predicted."""
    offload: OffloadReport

    def __str__(self) -> str:
        counts = {choice: [each.name for each in self.layers if each.choice is choice] for choice in Choice}
        words = {Choice.KEEP: "kept", Choice.OFFLOAD: "offloaded", Choice.RECOMPUTE: "recomputed"}
        parts = ", ".join(f"{len(names)} {words[choice]}" for choice, names in counts.items() if names)
        lines = [f"{len(self.layers)} layers: {parts or 'not measured yet, each holds as little as it can'}"]
        peak = f"device: {gib(self.device_bytes)} of {gib(self.limit_bytes)} planned"
        if self.measured_bytes is not None:
            peak += f", {gib(self.measured_bytes)} measured"
        lines.append(f"{peak}; {gib(self.other_bytes)} of it outside the layers; host: {gib(self.host_bytes)}")
        step = f"step: {1e3 * self.step_seconds:.1f} ms planned"
        if self.measured_seconds is not None:
            step += f", {1e3 * self.measured_seconds:.1f} ms measured"
        least, kept = f"{1e3 * self.least_seconds:.1f} ms", f"{1e3 * self.kept_seconds:.1f} ms"
        lines.append(f"{step}; {least} with every layer holding as little as it can, {kept} with all kept")
        if not self.fits:
            lines.append("the device cannot hold this: nothing that the layers could do holds less")
        return "\n".join(lines)


class Fitted:
    """A model that `fit` takes care of."""

    def __init__(
        self,
        model: nn.Module,
        *,
        device_gib: float | None,
        host_gib: float | None,
        layers: Sequence[nn.Module] | None,
        lead: Lead,
        min_bytes: int | None,
        link: Link | None,
        group: dist.ProcessGroup | None,
        deadline_seconds: float,
    ) -> None:
        check_module("fit", model)
        check_lead(lead)
        check_num_bytes("min_bytes", min_bytes, of_none="1 MiB on a GPU, 0 on the CPU")
        found = _layers(model, layers)
        device = device_of(model) if link is None else link.device
        limit = device_limit("device_gib", device, _positive("device_gib", device_gib))
        for_host = _positive("host_gib", host_gib)
        host_bytes = None if for_host is None else int(for_host * _GIB)
        self._model, self._device, self._group = model, device, group
        self._engine = make_engine(
            device,
            lead=lead,
            min_bytes=min_bytes,
            host_budget_bytes=host_bytes,
            link=link,
            deadline_seconds=deadline_seconds,
        )
        self._graphs = LiveGraphs()
        self._has_begun = self._in_forward = False
        offloads = link is not None or devices.has_streams(device)
        site = Site(
            device,
            self._engine.link,
            self._engine,
            None if lead == "auto" else lead,
            limit,
            frozenset(Choice) if offloads else frozenset({Choice.KEEP, Choice.RECOMPUTE}),
            model.parameters,
            model.buffers,
        )
        checkpoints = {name: ChosenCheckpoint(layer, keeper=self._engine) for name, layer in found.items()}
        self._chooser = Chooser(checkpoints, site, self._worst, lambda: max(1, self._graphs.most))
        self._limit = limit
        for checkpoint in checkpoints.values():
            ModuleCall.on(checkpoint.module).checkpointing = checkpoint
        ModuleCall.on(model).checkpointing = self._around_model

    # --- what users call ---------------------------------------------------------------------------------------------

    @property
    def choices(self) -> dict[str, Choice]:
        """What each layer does, by its path in the model."""
        return self._chooser.choices

    def report(self) -> FitReport:
        """Return what was chosen, and what came of it.

        Raises:
            UsageError: nothing has been chosen yet.
        """
        facts, chosen = self._chooser.facts, self._chooser.chosen
        if facts is None or chosen is None:
            raise UsageError(
                "nothing has been chosen yet", hint="ask again some steps after the first update, or in the next run"
            )
        cost, choices = chosen.pick.cost, self.choices
        other = int(facts.other_bytes)
        return FitReport(
            layers=tuple(
                LayerFit(name, choices[name], each.forward_seconds, each.saved_bytes, each.input_bytes)
                for name, each in zip(facts.names, facts.layers, strict=True)
            ),
            limit_bytes=self._limit,
            other_bytes=other,
            device_bytes=other + int(cost.device_bytes),
            host_bytes=int(cost.host_bytes),
            step_seconds=facts.step_seconds(chosen),
            least_seconds=facts.busy_seconds + facts.stall_seconds,
            kept_seconds=facts.kept_seconds,
            measured_bytes=self._chooser.measured[0],
            measured_seconds=self._chooser.measured[1],
            gap=chosen.pick.gap,
            fits=cost.device_bytes <= self._limit - other,
            offload=self._engine.stats.report(),
        )

    @property
    def has_chosen(self) -> bool:
        """Whether layers do what was chosen for them, by measurement or by `load_state_dict`."""
        return self._chooser.chosen is not None or self._chooser.phase is Phase.DONE

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
        if not self._graphs:
            self._begin_step()
        self._in_forward = True
        try:
            output = original(*args, **kwargs)
        except BaseException:
            self._graphs.clear()
            self._engine.abandon_step()
            raise
        finally:
            self._in_forward = False
            last, self._chooser.last_output = self._chooser.last_output, None
        self._graphs.add(output, last)
        return output

    def _begin_step(self) -> None:
        """Begin a step: the first forward after all backwards of the step before."""
        # A forward without a backward, or one that an exception ended, is no step: measure the next one in its place.
        anew = self._has_begun and not self._graphs.num_backwards
        if not anew:
            self._has_begun = True
            self._graphs.num_backwards = 0
            self._engine.end_step()
        self._chooser.begin_step(anew=anew)

    def _worst(self, numbers: Sequence[float]) -> Sequence[float]:
        """Return the largest of each number among all ranks that must choose alike."""
        if self._group is None:
            return numbers
        shared = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        with waiting("the choice of `smpkit.fit`", self._group):
            dist.all_reduce(shared, dist.ReduceOp.MAX, group=self._group)
        found: list[float] = shared.tolist()
        return found


def _layers(model: nn.Module, given: Sequence[nn.Module] | None) -> dict[str, nn.Module]:
    """Return the layers to choose for, by path.

    Raises:
        UsageError: there are none, or something else takes care of them.
    """
    kind = type(model).__name__
    wrapped: object = state.model
    if wrapped is not None and any(each is wrapped for each in model.modules()):
        raise UsageError(
            "fit takes a plain model, not one of smp.DistributedModel",
            hint="call smp.set_activation_checkpointing, and set `offload_activations: true`",
        )
    names = {module: name for name, module in model.named_modules()}
    found = dict(layers_of(model)) if given is None else {names.get(each, ""): each for each in given}
    compiled = [name for module, name in names.items() if _is_compiled(module)]
    if compiled:
        raise UsageError(f"`{compiled[0] or kind}` is compiled", hint="fit the model without torch.compile")
    if not found:
        raise UsageError(f"{kind} has no list of layers", hint="name them: fit(model, layers=[model.first, ...])")
    if "" in found:
        raise UsageError(f"a layer is no part of {kind}, or is all of it", hint="give modules inside the model")
    for name, module in found.items():
        inside = set(module.modules()) - {module}
        if not inside.isdisjoint(found.values()):
            raise UsageError(f"`{name}` contains another of the layers", hint="give layers side by side")
        if ModuleCall.of(module).checkpointing is not None or ModuleCall.of(model).checkpointing is not None:
            raise UsageError(f"`{name}` of {kind} is checkpointed, or fitted, already", hint="do one of the two")
    own = next((name for name, each in model.named_modules() if getattr(each, "gradient_checkpointing", False)), None)
    if own is not None:
        raise UsageError(
            f"`{own or kind}` checkpoints its layers itself", hint="call model.gradient_checkpointing_disable() first"
        )
    return found


def layers_of(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost items of lists of modules, with their paths."""
    # Not those of compiled modules: a hook on a module that torch.compile has traced would make it trace again.
    if hasattr(module, "_orig_mod") or ModuleCall.of(module).is_compiled:
        return
    for name, child in module.named_children():
        if isinstance(module, _LISTS):
            yield prefix + name, child
        else:
            yield from layers_of(child, f"{prefix}{name}.")


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or ModuleCall.of(module).is_compiled


def _positive(name: str, value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UsageError(f"{name} is {value!r}; it must be a number of GiB above 0", hint="for example 24")
    return float(value)
