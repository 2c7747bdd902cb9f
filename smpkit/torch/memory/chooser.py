"""Measure steps, choose for each layer, and compare what comes of it with what was predicted.

::

    phase       STARTING          MEASURED       CHOSEN       COMPARED             DONE
    a step      each until the    three: sizes,  one          its peak beside      all others
                first update      times, peaks                the predicted one
    layers      hold as little as they can     │ as chosen                       │ as chosen with that

Until they are chosen for, layers hold as little as they can, which fits if the model can train at all. The first update
makes the optimizer's states, and the first calls of a checkpointed layer copy what it might change: measurements begin
after that. Each choice gives the same gradients to the bit: only time and memory differ.

`smpkit.fit` and a `DistributedModel` choose with this: they say when a step begins, and which ranks must agree.

[Note: one step is not enough] A choice is for good, and now and then a step is slow: by another program, by memory that
the system has yet to hand out. So several are measured, and the median of each time counts: of a layer over all layers
of its kind in all these steps, of the rest over the steps. Noise only adds, so the least would be nearer to what the
work itself takes; but the steps to come have noise as well, and the prediction is for them. What compute waited for
copies is no part of these times. It depends on the choice, and what comes of that the simulated engine says.

[Note: what the rest takes] The device holds weights, gradients, optimizer states, and what the model computes outside
its layers (logits, the loss). Where the device counts its memory, that is the measured peak without what the layers
hold. The CPU counts nothing: there it is weights, gradients and the states of optimizers that updated the model.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain, islice
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor, nn

from smpkit.errors import UsageError
from smpkit.plan.offload.work import LinkSpeed
from smpkit.plan.tune.chain import ChainLayer, Choice, cost_of
from smpkit.plan.tune.simulated import LoneEngine
from smpkit.torch.core import devices
from smpkit.torch.core.buffers import FIRST_CALLS
from smpkit.torch.core.module_call import OriginalCall
from smpkit.torch.core.warn import warn_user
from smpkit.torch.memory.facts import Chosen, StepFacts, engine_rules
from smpkit.torch.memory.graphs import LiveGraphs
from smpkit.torch.memory.measure import Calls, Probe, input_bytes
from smpkit.torch.memory.updates import Updates, num_bytes_of
from smpkit.torch.offload.engine import ActivationEngine
from smpkit.torch.offload.link import Link
from smpkit.torch.recompute.layer import ChosenCheckpoint

__all__ = ["Agree", "Chooser", "Phase", "Site"]

_LAST_START: Final = 64
"""Steps to wait for the first update: only optimizers of torch's class tell."""
_NUM_MEASURED: Final = 3
"""Steps. See [Note: one step is not enough]."""
_MOST_COMPARED: Final = 2
_LOOSE: Final = 0.05
"""A choice stands if the share of the device that it leaves free by mistake is smaller."""

Agree = Callable[[Sequence[float]], Sequence[float]]
"""Returns the largest of each number among all ranks that must choose alike."""
_UNKNOWN: Final = (-math.inf,) * 4
"""The numbers of a layer that this rank has not called."""


class Phase(Enum):
    """What the current step is for."""

    STARTING = "wait for the first update"
    MEASURED = "measure"
    CHOSEN = "let the allocator get used to what was chosen"
    COMPARED = "compare the peak with the predicted one"
    DONE = "train"


@dataclass(frozen=True)
class Site:
    """Where a model trains."""

    device: torch.device
    link: Link
    """Whose clock is used."""
    engine: ActivationEngine | None
    """That offloads; None: nothing does."""
    lead: int | None
    """That the engine was given; None: it learns."""
    limit_bytes: int
    """That the device may hold."""
    allowed: frozenset[Choice]
    parameters: Callable[[], Iterable[nn.Parameter]]
    """Of this process, as they are now."""
    buffers: Callable[[], Iterable[Tensor]]
    any_optimizer: bool = False
    """As for `Updates`."""
    microbatches: int = 1
    """In a step."""
    planned_live: float = 0.0
    """How many microbatches the schedule may hold at a time; 0: as many as there are seen to be."""
    overlaps: bool = False
    """As in `StepFacts`."""

    @property
    def least(self) -> Choice:
        """What holds least on the device."""
        return Choice.OFFLOAD if Choice.OFFLOAD in self.allowed else Choice.RECOMPUTE

    @property
    def host_bytes(self) -> float:
        """For activations on the host."""
        budget = None if self.engine is None else self.engine.arena.budget_bytes
        return math.inf if budget is None else float(budget)

    @property
    def window_layers(self) -> int:
        """How many offloaded inputs are on the device all the same."""
        if self.engine is None:
            return 0
        return self.engine.tuner.lead + (3 if self.link.runs_ahead else 2)


@dataclass(frozen=True)
class _MeasuredStep:
    """What one step has told of itself; of layers for one microbatch."""

    first_bytes: int
    """Given to the first layer."""
    sizes: Mapping[str, tuple[int, int]]
    """What each layer saves and is given."""
    seconds: Mapping[str, tuple[float, float]]
    """Of each layer's forward, and of its recomputation; 0: it was not recomputed."""
    busy_seconds: float
    stall_seconds: float
    static_bytes: int
    peak_bytes: int
    """0: not known."""
    live: float


class Chooser:
    """Chooses for the layers of one process.

    Args:
        layers: by name, what runs their calls.
        agree: see `Agree`.
        live: returns how many microbatches have been held at a time; None: count them by the first layer.
    """

    def __init__(
        self,
        layers: Mapping[str, ChosenCheckpoint],
        site: Site,
        agree: Agree,
        live: Callable[[], float] | None = None,
    ) -> None:
        self.layers, self._site, self._live, self._agree = layers, site, live, agree
        self._names = {layer: name for name, layer in layers.items()}
        for layer in layers.values():
            layer.choice, layer.watch = site.least, self
        self.updates = Updates(site.parameters, site.device, any_optimizer=site.any_optimizer)
        self.phase = Phase.STARTING
        self._graphs = LiveGraphs()
        self._num_steps = self._num_compared = self._num_calls = 0
        self._static = 0
        self._began: Any = None
        self._ended: Any = None
        """The stamp at the end of the step that is measured, once it is over."""
        self._peak: int | None = None
        self._first: str | None = None
        self._first_bytes = self._largest_bytes = 0
        """Given to the first layer: at most in this step, and in all so far."""
        self._own_bytes = 0
        """The same, at most in the steps that were measured, on this rank."""
        self._steps: list[_MeasuredStep] = []
        self._stalled = 0.0
        """How long compute had waited for copies when the step began."""
        self._scale = 1.0
        self._facts: StepFacts | None = None
        self.chosen: Chosen | None = None
        self.measured: tuple[int | None, float | None] = (None, None)
        """Peak and seconds of an early step as chosen."""
        self.probe: Probe | None = None
        self.last_output: Any = None
        """Of the latest layer of the forward that runs."""

    @property
    def facts(self) -> StepFacts | None:
        """What the choice was made from, for the largest batch so far; None: nothing has been chosen yet."""
        return None if self._facts is None else self._facts.scaled(self._scale)

    @property
    def choices(self) -> dict[str, Choice]:
        """What each layer does."""
        return {name: layer.choice for name, layer in self.layers.items()}

    def take(self, choices: Mapping[str, Choice]) -> None:
        """Do what was chosen before, and measure nothing.

        Raises:
            UsageError: the choices are for other layers.
        """
        if choices.keys() != self.layers.keys():
            other = sorted(choices.keys() ^ self.layers.keys())
            raise UsageError(f"these choices are for other layers: {', '.join(other[:3])}", hint="fit the same model")
        for name, choice in choices.items():
            self.layers[name].choice = choice
        self._facts, self.chosen = None, None
        self._end()

    def remove(self) -> None:
        """Look at nothing any more."""
        for layer in self.layers.values():
            layer.watch = None
        self.updates.remove()

    # --- the life of a step ------------------------------------------------------------------------------------------

    def begin_step(self, *, anew: bool = False) -> None:
        """Begin a step that trains, and draw the conclusions of the one before.

        Args:
            anew: the one before was none: one without a backward, or one that an exception ended.
        """
        if self.phase is Phase.DONE:
            return
        self.end_step()
        if not anew:
            self._num_steps += 1
            if self.phase is Phase.MEASURED:
                self._steps.append(self._measured_step())
            self.phase = self._next_phase()
        self.probe, self._ended = None, None
        if self.phase is Phase.MEASURED:
            self.probe = Probe(self._site.link, (*self._site.parameters(), *self._site.buffers()))
        if self.phase in {Phase.MEASURED, Phase.COMPARED}:
            devices.wait_for_stream(self._site.device)  # for the waits of the step before
            self._stalled = self._stall_seconds()
            self._first_bytes = 0
            self._static = self._static_bytes()
            self._graphs = LiveGraphs()
            self._began = self._site.link.stamp()
            devices.reset_peak(self._site.device)
            self.updates.peak_bytes = 0

    def end_step(self) -> None:
        """End what is measured: what follows is no part of the step."""
        if self.phase not in {Phase.MEASURED, Phase.COMPARED} or self._ended is not None:
            return
        self._ended = self._site.link.stamp()
        devices.wait_for_stream(self._site.device)
        peak = devices.peak_bytes(self._site.device)
        self._peak = None if peak is None else max(peak, self.updates.peak_bytes)

    def _next_phase(self) -> Phase:
        """Return what the step that begins is for."""
        if self.phase is Phase.STARTING:
            # Replicas may skip layers in other steps, and those without a part of the optimizer's state update nothing.
            waits, updates = self._agree((self._num_calls < FIRST_CALLS, self.updates.num_updates))
            is_over = (updates and not waits) or self._num_steps > _LAST_START
            return Phase.MEASURED if is_over else Phase.STARTING
        if self.phase is Phase.MEASURED:
            if len(self._steps) < _NUM_MEASURED:
                return Phase.MEASURED
            self._decide()
            return Phase.CHOSEN
        if self.phase is Phase.CHOSEN:
            return Phase.COMPARED
        before = self.choices
        is_other = self._compare() and self.choices != before and self._num_compared < _MOST_COMPARED
        (again,) = self._agree((is_other,))  # or one rank would compare for the second time, alone
        if again:
            return Phase.CHOSEN
        if devices.is_asynchronous(self._site.device):  # only the peak as chosen says what fits
            self._warn_if_too_large()
        self._end()
        return Phase.DONE

    def _end(self) -> None:
        self.phase, self.probe = Phase.DONE, None
        self.updates.remove()

    def begin_call(
        self, layer: ChosenCheckpoint, original: OriginalCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> OriginalCall:
        """Take note of the size of what enters the first layer; if it is larger than any before, choose anew."""
        name = self._names[layer]
        if self._first is None:
            self._first = name
        if name == self._first:
            self._num_calls += 1
            self._note_size(input_bytes(args, kwargs))
        return original if self.probe is None else self.probe.around(name, original)

    def end_call(self, layer: ChosenCheckpoint, output: Any) -> None:
        """Remember what the latest layer has returned; count graphs in a step that is measured."""
        if self._live is not None:
            self.last_output = output
        elif self.phase in {Phase.MEASURED, Phase.COMPARED} and self._names[layer] == self._first:
            self._graphs.add(output, None)

    def _seen_live(self) -> float:
        """Return how many microbatches were held at a time."""
        if self._live is not None:
            return self._live()
        # A layer that is called twice in a microbatch has two graphs for each.
        calls = max(1.0, self._graphs.num_forwards / self._site.microbatches)
        return max(1.0, self._graphs.most / calls)

    def _note_size(self, num_bytes: int) -> None:
        self._first_bytes = max(self._first_bytes, num_bytes)
        if num_bytes <= self._largest_bytes:
            return
        self._largest_bytes = num_bytes
        if self._facts is not None:
            self._choose()
            self._warn_if_too_large()

    # --- the choice --------------------------------------------------------------------------------------------------

    def _static_bytes(self) -> int:
        """Return what weights, gradients and optimizer states take, where no forward is alive."""
        parameters = list(self._site.parameters())
        missing = sum(num_bytes_of(each) for each in parameters if each.requires_grad and each.grad is None)
        if devices.is_asynchronous(self._site.device):
            return devices.memory_bytes(self._site.device) + missing
        gradients = sum(num_bytes_of(each.grad) for each in parameters if each.grad is not None)
        weights = sum(map(num_bytes_of, (*parameters, *self._site.buffers())))
        return weights + gradients + missing + self.updates.state_bytes

    def _stall_seconds(self) -> float:
        return 0.0 if self._site.engine is None else self._site.engine.stats.stall_seconds

    def _measured_step(self) -> _MeasuredStep:
        """Return what was measured of the step that has ended."""
        assert self.probe is not None
        probe, rounds = self.probe, self._site.microbatches
        whole = self._site.link.seconds_between(self._began, self._ended) or 0.0
        stalled = self._stall_seconds() - self._stalled
        return _MeasuredStep(
            first_bytes=self._first_bytes,
            sizes={name: _of_microbatch(calls, rounds) for name, calls in probe.calls.items()},
            seconds={name: _divided(probe.seconds(name), rounds) for name in probe.calls},
            busy_seconds=whole - stalled,
            stall_seconds=stalled,
            static_bytes=self._static,
            peak_bytes=self._peak or 0,
            live=self._seen_live(),
        )

    def _decide(self) -> None:
        """Take what was measured with the largest batch, and choose."""
        site, rounds = self._site, self._site.microbatches
        self._own_bytes = max(each.first_bytes for each in self._steps)
        steps = [each for each in self._steps if each.first_bytes == self._own_bytes]
        self._steps = []
        sizes = _largest_sizes(steps)
        seconds = self._seconds_of_layers(steps, sizes)
        measured = {name: (*seconds[name], *each) for name, each in sizes.items()}
        live, fullest = max(each.live for each in steps), max(steps, key=lambda step: step.peak_bytes)
        # The window of loads and one recomputation are part of the measured peak, too. They count again with the
        # choice: where the peak is in the head, and not in a layer, it holds beside them what the layers keep.
        kept = 0.0 if site.least is Choice.OFFLOAD else live * sum(inputs for _, inputs in sizes.values())
        dynamic = max(0.0, fullest.peak_bytes - fullest.static_bytes - kept)
        times = median(each.busy_seconds for each in steps), median(each.stall_seconds for each in steps)
        speeds = 1 / site.link.out_bytes_per_second, 1 / site.link.back_bytes_per_second
        limits = -site.limit_bytes, -site.host_bytes, site.window_layers
        rest = (dynamic, fullest.static_bytes, *times, self._own_bytes, live, *limits, *speeds)
        # A rank may have called other layers than its replicas, so all send the numbers of all, in the same order.
        found = iter(self._agree([*rest, *chain.from_iterable(measured.get(name, _UNKNOWN) for name in self.layers)]))
        dynamic, static, busy, stalled, first_bytes, live, limit, host_bytes, window, out, back = islice(
            found, len(rest)
        )
        agreed = {name: (next(found), next(found), next(found), next(found)) for name in self.layers}
        # In the order of the calls here, which the choice depends on.
        layers = {name: agreed[name] for name in (*measured, *agreed) if agreed[name] != _UNKNOWN}
        self._largest_bytes = max(self._largest_bytes, int(first_bytes))
        self._facts = StepFacts(
            names=tuple(layers),
            # A backward takes about two forwards; it matters only for how many loads hide behind it.
            layers=tuple(
                ChainLayer(forward, 2 * forward, int(saved), int(inputs), self.layers[name].may_keep, again)
                for name, (forward, again, saved, inputs) in layers.items()
            ),
            first_bytes=max(1, int(first_bytes)),
            static_bytes=int(static),
            dynamic_bytes=dynamic,
            busy_seconds=busy,
            stall_seconds=stalled,
            microbatches=rounds,
            live=max(live, site.planned_live),
            limit_bytes=-limit,
            host_bytes=-host_bytes,
            link=LinkSpeed(1 / out if out else math.inf, 1 / back if back else math.inf),
            window_layers=int(window),
            allowed=site.allowed,
            overlaps=site.overlaps,
            engine=LoneEngine(site.lead, engine_rules(runs_ahead=site.link.runs_ahead)),
        )
        self._choose()
        if not devices.is_asynchronous(site.device):
            self._warn_if_too_large()

    def _seconds_of_layers(
        self, steps: Sequence[_MeasuredStep], sizes: Mapping[str, tuple[int, int]]
    ) -> dict[str, tuple[float, float]]:
        """Return for each layer the medians of its forwards and recomputations, over all layers of its kind."""
        kinds = {name: (type(self.layers[name].module), *each) for name, each in sizes.items()}
        firsts, repeated = defaultdict[Hashable, list[float]](list), defaultdict[Hashable, list[float]](list)
        for step in steps:
            for name, (first, again) in step.seconds.items():
                firsts[kinds[name]].append(first)
                # One without a recomputation would take as long again.
                repeated[kinds[name]].append(again or first)
        return {name: (median(firsts[kind]), median(repeated[kind])) for name, kind in kinds.items()}

    def _compare(self) -> bool:
        """Compare the peak of a step as chosen with the prediction; return whether another choice was made."""
        assert self._facts is not None
        assert self.chosen is not None
        seconds = self._site.link.seconds_between(self._began, self._ended)
        self.measured = (self._peak, seconds)
        self._num_compared += 1
        # What this rank cannot tell does not hold the others up: -1 is smaller than any peak.
        is_alike = self._first_bytes == self._own_bytes and self._scale == 1.0
        told = -1 if self._peak is None or not is_alike else self._peak
        if not devices.is_asynchronous(self._site.device):
            return False
        worst, differs, live = self._agree((told, told < 0, self._seen_live()))
        if differs:
            return False  # of another batch
        limit, limits, pick = self._facts.limit_bytes, self.chosen.limits, self.chosen.pick
        held = cost_of(self._facts.layers, pick.choices, replace(limits, live=live)).device_bytes
        dynamic = max(0.0, worst - self._facts.static_bytes - held)
        by_mistake = self._facts.dynamic_bytes - dynamic
        if 0 <= by_mistake < _LOOSE * limit:
            return False
        strict, self._facts = self._facts, replace(self._facts, dynamic_bytes=dynamic)
        self._choose()
        if set(self.choices.values()) == {Choice.KEEP}:
            # If the peak was in the head and not in a layer, the window and the recomputation that this choice does
            # without had no part in it, and going without them saves nothing.
            once = pick.cost.device_bytes - _sum_of(self._facts.layers, pick.choices, limits.live)
            if self._facts.other_bytes + self.chosen.pick.cost.device_bytes + once > limit:
                self._facts = strict
                self._choose()
        return True

    def _choose(self) -> None:
        """Choose for the largest batch so far, and let the layers do it."""
        assert self._facts is not None
        self._scale = max(1.0, self._largest_bytes / self._facts.first_bytes)
        facts = self._facts.scaled(self._scale)
        self.chosen = facts.choose()
        chosen_for = dict(zip(facts.names, self.chosen.pick.choices, strict=True))
        if any(self.layers[name].choice is not choice for name, choice in chosen_for.items()):
            self.measured = (None, None)
        for name, choice in chosen_for.items():
            self.layers[name].choice = choice

    def _warn_if_too_large(self) -> None:
        if self.chosen is not None and self.chosen.problem is not None:
            warn_user(self.chosen.problem)


def _of_microbatch(calls: Calls, microbatches: int) -> tuple[int, int]:
    """Return what a layer saves and is given in a microbatch."""
    return -(-calls.saved_bytes // microbatches), -(-calls.input_bytes // microbatches)


def _divided(seconds: tuple[float, float], microbatches: int) -> tuple[float, float]:
    return seconds[0] / microbatches, seconds[1] / microbatches


def _largest_sizes(steps: Sequence[_MeasuredStep]) -> dict[str, tuple[int, int]]:
    """Return the most that each layer has saved and was given; a step may leave layers out."""
    found: dict[str, tuple[int, int]] = {}
    for step in steps:
        for name, (saved, inputs) in step.sizes.items():
            before = found.get(name, (0, 0))
            found[name] = max(before[0], saved), max(before[1], inputs)
    return found


def _sum_of(layers: Sequence[ChainLayer], choices: Sequence[Choice], live: float) -> float:
    """Return what adds up of what layers hold: not what one layer holds at a time."""
    sizes = {Choice.KEEP: "saved_bytes", Choice.RECOMPUTE: "input_bytes"}
    pairs = zip(layers, choices, strict=True)
    return live * sum(int(getattr(layer, sizes[choice])) for layer, choice in pairs if choice in sizes)
