"""Train a model within a given memory: each layer keeps its activations, offloads its input, or is recomputed.

::

    phase       STARTING          MEASURED       CHOSEN       COMPARED             DONE
    a step      each until the    sizes,         one          its peak beside      all others
                first update      times, peak                 the predicted one
    layers      hold as little as they can     │ as chosen                       │ as chosen with that

Until they are chosen for, layers hold as little as they can, which fits if the model can train at all. The first update
makes the optimizer's states, so nothing before it is measured. Each choice gives the same gradients to the bit: only
time and memory differ.

[Note: what the rest takes] The device holds weights, gradients, optimizer states, and what the model computes outside
its layers (logits, the loss). Where the device counts its memory, that is the measured peak without what the layers
hold. The CPU counts nothing: there it is weights, gradients and the states of optimizers that updated the model.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import Enum
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from smpkit.errors import UsageError
from smpkit.plan.offload.work import LinkSpeed
from smpkit.plan.tune.chain import ChainChoice, ChainLayer, ChainLimits, Choice, choose, cost_of, smallest_bytes
from smpkit.torch.core import devices
from smpkit.torch.core.arguments import check_module, check_num_bytes
from smpkit.torch.core.module_call import CallWrapper, ModuleCall, OriginalCall
from smpkit.torch.core.runtime import state
from smpkit.torch.core.warn import warn_user
from smpkit.torch.distributed.deadline import waiting
from smpkit.torch.memory.graphs import LiveGraphs
from smpkit.torch.memory.measure import Probe, input_bytes
from smpkit.torch.offload.engine import make_engine
from smpkit.torch.offload.link import Link
from smpkit.torch.offload.prefetch import Lead, check_lead
from smpkit.torch.offload.public import device_of, layers_of
from smpkit.torch.offload.report import OffloadReport
from smpkit.torch.recompute.api import ModuleCheckpoint

__all__ = ["FitReport", "Fitted", "LayerFit", "fit"]

_GIB: Final = 2**30
_USABLE: Final = 0.95
"""Of the device: its driver, its libraries and the allocator's fragments have the rest."""
_LAST_START: Final = 64
"""Steps to wait for the first update: only optimizers of torch's class tell."""
_MOST_COMPARED: Final = 2
_LOOSE: Final = 0.05
"""A choice stands if the share of the device that it leaves free by mistake is smaller."""


class _Phase(Enum):
    """What the current step is for."""

    STARTING = "wait for the first update"
    MEASURED = "measure"
    CHOSEN = "let the allocator get used to what was chosen"
    COMPARED = "compare the peak with the predicted one"
    DONE = "train"


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

    Layers are the items of the model's `ModuleList`s and `Sequential`s. The step after the first update measures them;
    from then on each layer keeps its activations, has its input copied to the host and is recomputed, or is only
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
    """Measured, with every layer holding as little as it can."""
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
        peak = f"device: {_gib(self.device_bytes)} of {_gib(self.limit_bytes)} planned"
        if self.measured_bytes is not None:
            peak += f", {_gib(self.measured_bytes)} measured"
        lines.append(f"{peak}; {_gib(self.other_bytes)} of it outside the layers; host: {_gib(self.host_bytes)}")
        step = f"step: {1e3 * self.step_seconds:.1f} ms planned"
        if self.measured_seconds is not None:
            step += f", {1e3 * self.measured_seconds:.1f} ms measured"
        lines.append(f"{step}; {1e3 * self.least_seconds:.1f} ms with every layer holding as little as it can")
        if not self.fits:
            lines.append("the device cannot hold this: nothing that the layers could do holds less")
        return "\n".join(lines)


@dataclass(frozen=True)
class _Facts:
    """What was measured of a step, and of where it ran."""

    names: tuple[str, ...]
    layers: tuple[ChainLayer, ...]
    first_bytes: int
    """Of the inputs of the first layer: as much larger as they become, so does all that depends on the batch."""
    static_bytes: int
    """Of weights, gradients and states, whatever the batch."""
    dynamic_bytes: float
    """What the model computes outside its layers."""
    step_seconds: float
    live: int
    limit_bytes: float
    host_bytes: float
    link: LinkSpeed
    window_layers: int

    @property
    def limits(self) -> ChainLimits:
        """What there is for the layers."""
        room = max(0.0, self.limit_bytes - self.static_bytes - self.dynamic_bytes)
        return ChainLimits(self.live, room, self.host_bytes, self.link, self.window_layers, overlaps=False)

    def scaled(self, factor: float) -> _Facts:
        """Return the facts of a batch that is so much larger."""
        layers = tuple(
            ChainLayer(
                each.forward_seconds * factor,
                each.backward_seconds * factor,
                math.ceil(each.saved_bytes * factor),
                math.ceil(each.input_bytes * factor),
            )
            for each in self.layers
        )
        return replace(
            self, layers=layers, dynamic_bytes=self.dynamic_bytes * factor, step_seconds=self.step_seconds * factor
        )


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
        limit = _limit(device, device_gib)
        host_bytes = None if host_gib is None else int(_positive("host_gib", host_gib) * _GIB)
        self._model, self._device, self._group, self._limit = model, device, group, limit
        self._engine = make_engine(
            device,
            lead=lead,
            min_bytes=min_bytes,
            host_budget_bytes=host_bytes,
            link=link,
            deadline_seconds=deadline_seconds,
        )
        offloads = link is not None or devices.has_streams(device)
        self._allowed = frozenset(Choice) if offloads else frozenset({Choice.KEEP, Choice.RECOMPUTE})
        self._least = Choice.OFFLOAD if offloads else Choice.RECOMPUTE
        self._layers = {name: _Layer(self, name, layer) for name, layer in found.items()}
        for layer in self._layers.values():
            ModuleCall.on(layer.module).checkpointing = layer
        ModuleCall.on(model).checkpointing = self._around_model
        self._graphs = LiveGraphs()
        self._updates = _Updates(model, device)
        self._phase = _Phase.STARTING
        self._num_steps = self._num_compared = 0
        self._static = 0
        self._began: Any = None
        self._first: str | None = None
        self._first_bytes = self._largest_bytes = 0
        self._scale = 1.0
        self._facts: _Facts | None = None
        self._chosen: tuple[ChainLimits, ChainChoice] | None = None
        self._measured: tuple[int | None, float | None] = (None, None)
        self.probe: Probe | None = None
        self.last_output: Any = None
        """Of the latest layer of the forward that runs."""

    # --- what users call ---------------------------------------------------------------------------------------------

    @property
    def choices(self) -> dict[str, Choice]:
        """What each layer does, by its path in the model."""
        return {name: layer.choice for name, layer in self._layers.items()}

    def report(self) -> FitReport:
        """Return what was chosen, and what came of it.

        Raises:
            UsageError: nothing has been chosen yet.
        """
        if self._facts is None or self._chosen is None:
            raise UsageError(
                "nothing has been chosen yet", hint="ask again two steps after the first update, or in the next run"
            )
        facts, (limits, chosen) = self._facts.scaled(self._scale), self._chosen
        least = cost_of(facts.layers, [self._least] * len(facts.layers), limits)
        other = int(facts.static_bytes + facts.dynamic_bytes)
        layers = zip(facts.names, facts.layers, strict=True)
        return FitReport(
            layers=tuple(
                LayerFit(name, self._layers[name].choice, each.forward_seconds, each.saved_bytes, each.input_bytes)
                for name, each in layers
            ),
            limit_bytes=self._limit,
            other_bytes=other,
            device_bytes=other + int(chosen.cost.device_bytes),
            host_bytes=int(chosen.cost.host_bytes),
            step_seconds=max(0.0, facts.step_seconds - least.seconds) + chosen.cost.seconds,
            least_seconds=facts.step_seconds,
            measured_bytes=self._measured[0],
            measured_seconds=self._measured[1],
            gap=chosen.gap,
            fits=chosen.cost.device_bytes <= self._limit - other,
            offload=self._engine.stats.report(),
        )

    def state_dict(self) -> dict[str, str]:
        """Return the choices, by layer: put them into a checkpoint, so that a resumed run does the same at once."""
        return {name: str(choice) for name, choice in self.choices.items()}

    def load_state_dict(self, state_dict: Mapping[str, str]) -> None:
        """Take choices of an earlier run, and measure nothing.

        Raises:
            UsageError: they are for other layers.
        """
        if state_dict.keys() != self._layers.keys():
            other = sorted(state_dict.keys() ^ self._layers.keys())
            raise UsageError(f"these choices are for other layers: {', '.join(other[:3])}", hint="fit the same model")
        for name, word in state_dict.items():
            self._layers[name].choice = Choice(word)
        self._phase = _Phase.DONE

    def remove(self) -> None:
        """Leave the model as it was, and free the host memory; no graph of it may be needed any more."""
        for module in (self._model, *(layer.module for layer in self._layers.values())):
            ModuleCall.on(module).checkpointing = None
        self._updates.remove()
        self._engine.close()

    # --- the life of a step ------------------------------------------------------------------------------------------

    def _around_model(self, original: OriginalCall) -> OriginalCall:
        return functools.partial(self._run_model, original)

    def _run_model(self, original: OriginalCall, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return original(*args, **kwargs)
        if not self._graphs:
            self._begin_step()
        try:
            output = original(*args, **kwargs)
        except BaseException:
            self._graphs.clear()
            self._engine.abandon_step()
            raise
        finally:
            last, self.last_output = self.last_output, None
        self._graphs.add(output, last)
        return output

    def _begin_step(self) -> None:
        """Begin a step: the first forward after all backwards of the step before."""
        # A forward without a backward, or one that an exception ended, is no step: measure the next one in its place.
        if self._graphs.num_backwards or not self._num_steps:
            self._graphs.num_backwards = 0
            self._num_steps += 1
            self._engine.end_step()
            self._engine.exclude((*self._model.parameters(), *self._model.buffers()))
            self._phase = self._next_phase()
        self.probe = None
        if self._phase is _Phase.MEASURED:
            self.probe = Probe(self._engine.link, (*self._model.parameters(), *self._model.buffers()))
            self._first_bytes = 0
        if self._phase in {_Phase.MEASURED, _Phase.COMPARED}:
            self._static = self._static_bytes()
            self._began = self._engine.link.stamp()
            devices.reset_peak(self._device)
            self._updates.peak_bytes = 0

    def _next_phase(self) -> _Phase:
        """Return what the step that begins is for; draw the conclusions of the one that has ended."""
        if self._phase is _Phase.STARTING:
            is_over = self._updates.num_updates or self._num_steps > _LAST_START
            return _Phase.MEASURED if is_over else _Phase.STARTING
        if self._phase is _Phase.MEASURED:
            self._decide()
            return _Phase.CHOSEN
        if self._phase is _Phase.CHOSEN:
            return _Phase.COMPARED
        if self._phase is _Phase.COMPARED:
            before = self.choices
            self._compare()
            if self.choices != before and self._num_compared < _MOST_COMPARED:
                return _Phase.CHOSEN
        self._updates.remove()
        return _Phase.DONE

    def begin_layer(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take note of the size of what enters the first layer; if it is larger than any before, choose anew."""
        if self._first is None:
            self._first = name
        if name != self._first:
            return
        num_bytes = input_bytes(args, kwargs)
        self._first_bytes = max(self._first_bytes, num_bytes)
        if num_bytes <= self._largest_bytes:
            return
        self._largest_bytes = num_bytes
        if self._facts is not None:
            self._choose()

    # --- the choice --------------------------------------------------------------------------------------------------

    def _static_bytes(self) -> int:
        """Return what weights, gradients and optimizer states take, where no forward is alive."""
        parameters = list(self._model.parameters())
        missing = sum(_num_bytes(each) for each in parameters if each.requires_grad and each.grad is None)
        if devices.is_asynchronous(self._device):
            return devices.memory_bytes(self._device) + missing
        gradients = sum(_num_bytes(each.grad) for each in parameters if each.grad is not None)
        weights = sum(map(_num_bytes, (*parameters, *self._model.buffers())))
        return weights + gradients + missing + self._updates.state_bytes

    def _peak_bytes(self) -> int | None:
        """Return the most that the device held in the last step; None on the CPU."""
        peak = devices.peak_bytes(self._device)
        return None if peak is None else max(peak, self._updates.peak_bytes)

    def _decide(self) -> None:
        """Take what the last step has measured, and choose."""
        assert self.probe is not None
        now = self._engine.link.stamp()
        devices.wait_for_stream(self._device)
        peak = self._peak_bytes()
        link = self._engine.link
        seconds = link.seconds_between(self._began, now) or 0.0
        names = tuple(self.probe.calls)
        sizes = [(calls.saved_bytes, calls.input_bytes) for calls in self.probe.calls.values()]
        kinds = [(type(self._layers[name].module), *each) for name, each in zip(names, sizes, strict=True)]
        forwards = _medians(kinds, [self.probe.seconds(name) for name in names])
        dynamic = max(0.0, (peak or 0) - self._static - self._kept_bytes(sizes))
        flat = [float(size) for pair in sizes for size in pair]
        budget = self._engine.arena.budget_bytes
        host_bytes = math.inf if budget is None else float(budget)
        window = self._engine.tuner.lead + (3 if link.is_stream_ordered else 2)
        speeds = 1 / link.out_bytes_per_second, 1 / link.back_bytes_per_second
        worst = self._worst(
            [*forwards, *flat, dynamic, self._static, seconds, -self._limit, -host_bytes, window, *speeds]
        )
        forwards, flat, rest = worst[: len(names)], worst[len(names) : 3 * len(names)], worst[3 * len(names) :]
        dynamic, static, seconds, limit, host_bytes, num_layers, out, back = rest
        self._facts = _Facts(
            names=names,
            # A backward takes about two forwards; it matters only for how many loads hide behind it.
            layers=tuple(
                ChainLayer(forward, 2 * forward, int(saved), int(inputs))
                for forward, saved, inputs in zip(forwards, flat[::2], flat[1::2], strict=True)
            ),
            first_bytes=max(1, self._first_bytes),
            static_bytes=int(static),
            dynamic_bytes=dynamic,
            step_seconds=seconds,
            live=max(1, self._graphs.most),
            limit_bytes=-limit,
            host_bytes=-host_bytes,
            link=LinkSpeed(1 / out if out else math.inf, 1 / back if back else math.inf),
            window_layers=int(num_layers),
        )
        self._choose()

    def _kept_bytes(self, sizes: Sequence[tuple[int, int]]) -> float:
        """Return what layers hold that hold as little as they can, for all microbatches."""
        # The window of loads and one recomputation are part of the measured peak, too. They count again with the
        # choice: where the peak is in the head, and not in a layer, it holds beside them what the layers keep.
        return 0.0 if self._least is Choice.OFFLOAD else max(1, self._graphs.most) * sum(each[1] for each in sizes)

    def _worst(self, numbers: list[float]) -> list[float]:
        """Return the largest of all ranks that must choose alike."""
        if self._group is None:
            return numbers
        shared = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        with waiting("the choice of `smpkit.fit`", self._group):
            dist.all_reduce(shared, dist.ReduceOp.MAX, group=self._group)
        return list(shared.tolist())

    def _compare(self) -> None:
        """Compare the peak of a step as chosen with the prediction; where they differ, choose again."""
        assert self._facts is not None
        assert self._chosen is not None
        now = self._engine.link.stamp()
        devices.wait_for_stream(self._device)
        seconds = self._engine.link.seconds_between(self._began, now)
        peak = self._peak_bytes()
        self._measured = (peak, seconds)
        self._num_compared += 1
        if peak is None or self._first_bytes != self._facts.first_bytes or self._scale != 1.0:
            return  # of another batch
        peak = int(self._worst([peak])[0])
        limits, chosen = self._chosen
        dynamic = max(0.0, peak - self._facts.static_bytes - chosen.cost.device_bytes)
        by_mistake = self._facts.dynamic_bytes - dynamic
        if 0 <= by_mistake < _LOOSE * self._limit:
            return
        strict, self._facts = self._facts, replace(self._facts, dynamic_bytes=dynamic)
        self._choose()
        if set(self.choices.values()) == {Choice.KEEP} and self._chosen is not None:
            # If the peak was in the head and not in a layer, the window and the recomputation that this choice does
            # without had no part in it, and going without them saves nothing.
            once = chosen.cost.device_bytes - self._sum_of(chosen, limits.live)
            if self._facts.static_bytes + dynamic + self._chosen[1].cost.device_bytes + once > self._limit:
                self._facts = strict
                self._choose()

    def _sum_of(self, chosen: ChainChoice, live: float) -> float:
        """Return what adds up of what layers hold: not what one layer holds at a time."""
        assert self._facts is not None
        sizes = {Choice.KEEP: "saved_bytes", Choice.RECOMPUTE: "input_bytes"}
        pairs = zip(self._facts.layers, chosen.choices, strict=True)
        return live * sum(int(getattr(layer, sizes[choice])) for layer, choice in pairs if choice in sizes)

    def _choose(self) -> None:
        """Choose for the largest batch so far, and let the layers do it."""
        assert self._facts is not None
        self._scale = max(1.0, self._largest_bytes / self._facts.first_bytes)
        facts = self._facts.scaled(self._scale)
        limits = replace(facts.limits, allowed=self._allowed)
        chosen = choose(facts.layers, limits)
        if chosen is None:
            least = smallest_bytes(facts.layers, limits)
            other = facts.static_bytes + facts.dynamic_bytes
            warn_user(
                f"the model does not fit: its layers hold at least {_gib(least)}, the rest takes {_gib(other)}, and "
                f"the device may hold {_gib(facts.limit_bytes)}; every layer holds as little as it can "
                "(use smaller batches, or shard states with more ranks)"
            )
            chosen = choose(facts.layers, replace(limits, device_bytes=least))
            assert chosen is not None, "the smallest choice fits into what it takes"
        self._chosen = limits, chosen
        chosen_for = dict(zip(facts.names, chosen.choices, strict=True))
        if any(self._layers[name].choice is not choice for name, choice in chosen_for.items()):
            self._measured = (None, None)
        for name, choice in chosen_for.items():
            self._layers[name].choice = choice


class _Layer:
    """Runs each call of a layer as it was chosen (what `ModuleCall` wraps it in)."""

    def __init__(self, fitted: Fitted, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module
        self.choice = fitted._least
        self._fitted = fitted
        self._checkpoints: dict[Choice, CallWrapper] = {
            Choice.OFFLOAD: ModuleCheckpoint(module, True, lambda _: fitted._engine.offload_inputs(name)),
            Choice.RECOMPUTE: ModuleCheckpoint(module, True, _offload_nothing),
        }

    def __call__(self, original: OriginalCall) -> OriginalCall:
        return functools.partial(self._run, original)

    def _run(self, original: OriginalCall, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return original(*args, **kwargs)
        self._fitted.begin_layer(self.name, args, kwargs)
        if self._fitted.probe is not None:
            original = self._fitted.probe.around(self.name, original)
        if self.choice is not Choice.KEEP:
            original = self._checkpoints[self.choice](original)
        output = self._fitted.last_output = original(*args, **kwargs)
        return output


class _Updates:
    """What the device holds when an optimizer has updated the model: at the end of a step, before the script goes on.

    The script may begin the statistics of the device anew at any time between two steps.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._sizes: dict[int, int] = {}
        self.num_updates = 0
        self.peak_bytes = 0
        """The most that the device held until then; 0: not known, or the CPU."""
        self._hook = register_optimizer_step_post_hook(self._on_step)

    @property
    def state_bytes(self) -> int:
        """Of the states of all optimizers that have made a step."""
        return sum(self._sizes.values())

    def remove(self) -> None:
        """Stop listening."""
        self._hook.remove()

    def _on_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        own = set(map(id, self._model.parameters()))  # now: `fully_shard` has put others in their place
        if not any(id(each) in own for group in optimizer.param_groups for each in group["params"]):
            return  # of another model
        owned = [values for parameter, values in optimizer.state.items() if id(parameter) in own]
        self.num_updates += 1
        self.peak_bytes = max(self.peak_bytes, devices.peak_bytes(self._device) or 0)
        tensors = (each for values in owned for each in values.values() if isinstance(each, Tensor))
        self._sizes[id(optimizer)] = sum(map(_num_bytes, tensors))


def _medians(kinds: Sequence[Hashable], values: Sequence[float]) -> list[float]:
    """Return for each value the median of those of its kind: one step's times differ where the layers do not."""
    groups: dict[Hashable, list[float]] = {}
    for kind, value in zip(kinds, values, strict=True):
        groups.setdefault(kind, []).append(value)
    return [median(groups[kind]) for kind in kinds]


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


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or ModuleCall.of(module).is_compiled


def _limit(device: torch.device, device_gib: float | None) -> int:
    """Return how many bytes the device may hold."""
    total = devices.total_bytes(device)
    if device_gib is None:
        if total is None:
            raise UsageError(f"{device} does not tell how much memory it has", hint="give `device_gib`")
        return int(_USABLE * total)
    limit = int(_positive("device_gib", device_gib) * _GIB)
    if total is not None and limit > total:
        raise UsageError(f"device_gib is {device_gib:g}, and {device} has {_gib(total)}", hint="give at most that")
    return limit


def _positive(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UsageError(f"{name} is {value!r}; it must be a number of GiB above 0", hint="for example 24")
    return float(value)


def _offload_nothing(_name: str) -> AbstractContextManager[object]:
    return contextlib.nullcontext()


def _num_bytes(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.2f} GiB" if num_bytes >= _GIB / 10 else f"{num_bytes / 2**20:.2f} MiB"
