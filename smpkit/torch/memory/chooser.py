"""Measure three steps, and choose from them what each layer does with its activations.

::

    phase     START                       MEASURE                        DONE
    a step    three, and until the        three: sizes, times, peaks     all others
              first update
    layers    hold as little as they can                               │ as chosen

Until they are chosen for, layers hold as little as they can, which fits if the model can train at all. The first update
makes the optimizer's states, and the first calls of a checkpointed layer are checked: measurements begin after that.
Each choice gives the same gradients to the bit: only time and memory differ.

All ranks that must choose alike count the same steps, and only `begin_step` asks them for numbers. So they agree in the
same step, whichever layers each of them calls, and none waits for another in vain.

[Note: one step is not enough] A choice is for good, and now and then a step is slow: by another program, by memory that
the system has yet to hand out. So several are measured, and the median of each time counts: of a layer over all layers
of its kind in all these steps, of the rest over the steps. What compute waited for copies is no part of these times: it
depends on the choice, and the simulator predicts it.

[Note: what the rest takes] The device holds weights, gradients, optimizer states, and what the model computes outside
its layers (logits, the loss). Where the device counts its memory, that is the measured peak without what the layers
hold. The CPU counts nothing: there it is weights, gradients and the states of optimizers that updated the model.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smpkit.errors import UsageError
from smpkit.plan.offload.simulate import Rules
from smpkit.plan.offload.work import LinkSpeed
from smpkit.plan.tune.chain import (
    ChainChoice,
    ChainLayer,
    ChainLimits,
    Choice,
    LoneEngine,
    choose,
    choose_by_simulation,
    smallest_bytes,
)
from smpkit.torch.core import devices
from smpkit.torch.core.module_call import OriginalCall
from smpkit.torch.core.warn import warn_user
from smpkit.torch.distributed.deadline import waiting
from smpkit.torch.memory.measure import Probe, Updates, input_bytes, num_bytes_of
from smpkit.torch.offload.engine import ActivationEngine
from smpkit.torch.offload.link import Link
from smpkit.torch.recompute.layer import ChosenCheckpoint
from smpkit.units import amount

_NUM_START: Final = 3
"""Steps at least, before any is measured."""
_LAST_START: Final = 64
"""Steps to wait for the first update: only optimizers of torch's class tell."""
_NUM_MEASURED: Final = 3
"""Steps. See [Note: one step is not enough]."""
_NOT_CALLED: Final = (-1.0,) * 4
"""The numbers of a layer that this rank has not called."""


class Chooser:
    """Chooses for the layers of one process.

    Args:
        layers: by name, what runs their calls.
        tensors: returns weights and buffers of this process, as they are now.
        link: whose clock is used, and over which inputs leave.
        engine: that offloads; None: nothing does.
        agree: returns the largest of each number among all ranks that must choose alike.
        lead: that the engine was given; None: it learns.
        live: how many microbatches are held at a time.
        any_optimizer: as for `Updates`.
    """

    def __init__(
        self,
        layers: Mapping[str, ChosenCheckpoint],
        tensors: Callable[[], Iterable[Tensor]],
        link: Link,
        engine: ActivationEngine | None,
        *,
        limit_bytes: int,
        allowed: frozenset[Choice],
        agree: Callable[[Sequence[float]], Sequence[float]] = tuple,
        lead: int | None = None,
        microbatches: int = 1,
        live: int = 1,
        any_optimizer: bool = False,
    ) -> None:
        self.layers, self._tensors, self._link, self._engine = layers, tensors, link, engine
        self.limit_bytes, self._allowed, self._agree, self._lead = limit_bytes, allowed, agree, lead
        self._microbatches, self._live = microbatches, live
        self._least = Choice.OFFLOAD if Choice.OFFLOAD in allowed else Choice.RECOMPUTE
        self._names = {layer: name for name, layer in layers.items()}
        for layer in layers.values():
            layer.choice, layer.watch = self._least, self.run_layer
        self.updates = Updates(tensors, link.device, any_optimizer=any_optimizer)
        self.is_done = False
        """Whether layers do what was chosen for them."""
        self._is_measuring = False
        self.num_steps = 0
        self._probe: Probe | None = None
        self._probes: list[Probe] = []
        self._static_bytes = self._forward_bytes = self._peak_bytes = 0
        """The most in any step that was measured: at its beginning, until its first recomputation, and to its end."""
        self._first: ChosenCheckpoint | None = None
        self._largest_bytes = 0
        """The most that the first layer was given."""
        self.facts: StepFacts | None = None
        """What the choice was made from, for the largest batch so far; None: nothing was measured."""
        self.pick: ChainChoice | None = None

    @property
    def choices(self) -> dict[str, Choice]:
        """What each layer does."""
        return {name: layer.choice for name, layer in self.layers.items()}

    def take(self, choices: Mapping[str, Choice]) -> None:
        """Do what was chosen before, and measure nothing."""
        if choices.keys() != self.layers.keys():
            other = sorted(choices.keys() ^ self.layers.keys())
            raise UsageError(f"these choices are for other layers: {', '.join(other[:3])}", hint="fit the same model")
        for name, choice in choices.items():
            self.layers[name].choice = choice
        self.facts = self.pick = None
        self._finish()

    def remove(self) -> None:
        """Look at nothing any more."""
        for layer in self.layers.values():
            layer.watch = None
        self._finish()

    # --- the life of a step ------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begin a step that trains, on all ranks that must choose alike; they agree here and nowhere else."""
        if self.is_done:
            return
        if not self._is_measuring and self.num_steps >= _NUM_START:
            # Ranks without a part of the optimizer's states update nothing.
            (has_updated,) = self._agree((self.updates.num_updates > 0,))
            self._is_measuring = has_updated > 0 or self.num_steps >= _LAST_START
        elif len(self._probes) == _NUM_MEASURED:
            self._decide()
            self._finish()
        if self._is_measuring:
            self._static_bytes = max(self._static_bytes, self._present_bytes())
            self._probe = Probe(self._link, self._tensors(), self._engine)
            devices.reset_peak(self._link.device)

    def end_step(self, *, had_backward: bool) -> None:
        """End a step: what follows is no part of it. One without a backward counts for nothing."""
        self.num_steps += had_backward
        probe, self._probe = self._probe, None
        if probe is not None:
            probe.end()
            if had_backward:
                self._probes.append(probe)
                peak = devices.peak_bytes(self._link.device) or 0
                self._peak_bytes = max(self._peak_bytes, peak)
                self._forward_bytes = max(self._forward_bytes, probe.forward_bytes or peak)

    def run_layer(self, layer: ChosenCheckpoint, original: OriginalCall, args: Any, kwargs: Any) -> Any:
        """Run a layer's call as it was chosen; the first layer's input tells how large the batch is."""
        if self._first in (None, layer):
            self._first = layer
            self._note_size(input_bytes(args, kwargs))
        call = original if self._probe is None else self._probe.around(self._names[layer], original)
        return layer.run_chosen(call, args, kwargs)

    def _note_size(self, num_bytes: int) -> None:
        """Take note of the size of a batch; if it is larger than any before, choose anew."""
        if self._probe is not None:
            self._probe.first_bytes = max(self._probe.first_bytes, num_bytes)
        if num_bytes > self._largest_bytes:
            self._largest_bytes = num_bytes
            self._choose()

    def _finish(self) -> None:
        self.is_done, self._is_measuring, self._probe, self._probes = True, False, None, []
        self.updates.handle.remove()

    def _present_bytes(self) -> int:
        """Return what weights, gradients and optimizer states take, where no forward is alive."""
        tensors = list(self._tensors())
        weights = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
        missing = sum(num_bytes_of(weight) for weight in weights if weight.requires_grad and weight.grad is None)
        if devices.is_asynchronous(self._link.device):
            return devices.memory_bytes(self._link.device) + missing
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        return sum(map(num_bytes_of, (*tensors, *gradients))) + missing + self.updates.state_bytes

    # --- the choice --------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        """Take what was measured with the largest batch, and choose. All ranks that must choose alike do so at once."""
        largest = max(probe.first_bytes for probe in self._probes)
        probes = [probe for probe in self._probes if probe.first_bytes == largest]
        numbers = self._numbers_of_layers(probes)
        kept = 0
        # If fewer microbatches were held than are planned, the choice counts as many too many as are subtracted here.
        if self._least is Choice.RECOMPUTE:
            kept = self._live * sum(min(saved, inputs) for *_, saved, inputs in numbers.values())
        peak = max(self._peak_bytes, self.updates.peak_bytes)
        counts = [len(calls.first) for calls in probes[-1].calls.values()]
        calls_each_once = counts == [self._microbatches] * len(self.layers)
        budget = None if self._engine is None else self._engine.arena.budget_bytes
        own = [
            self._static_bytes,
            max(0.0, peak - self._static_bytes - kept),
            max(0.0, self._forward_bytes - self._static_bytes - kept) if calls_each_once else math.inf,
            median(probe.busy_seconds for probe in probes),
            median(probe.stall_seconds for probe in probes),
            largest,
            -self.limit_bytes,
            -math.inf if budget is None else -budget,
            0 if self._engine is None else self._engine.tuner.lead + (3 if self._link.runs_ahead else 2),
            1 / self._link.out_bytes_per_second,
            1 / self._link.back_bytes_per_second,
        ]
        # A rank may have called other layers than its replicas, so all send the numbers of all, in the same order.
        shared = iter(self._agree([*own, *chain.from_iterable(numbers.get(name, _NOT_CALLED) for name in self.layers)]))
        static, dynamic, forward_most, busy, stalled, first_bytes, limit, host, window, out, back = islice(
            shared, len(own)
        )
        rows = {name: tuple(islice(shared, len(_NOT_CALLED))) for name in self.layers}
        # In the order of the calls here, which the choice depends on.
        called = {name: rows[name] for name in (*numbers, *rows) if rows[name] != _NOT_CALLED}
        link = LinkSpeed(1 / out if out else math.inf, 1 / back if back else math.inf)
        rules = Rules(is_planned=False, ring=2 if self._link.runs_ahead else None)
        self.facts = StepFacts(
            names=tuple(called),
            # A backward takes about two forwards; it matters only for how many loads hide behind it.
            layers=tuple(
                ChainLayer(forward, 2 * forward, int(saved), int(inputs), self.layers[name].may_keep, again)
                for name, (forward, again, saved, inputs) in called.items()
            ),
            first_bytes=max(1, int(first_bytes)),
            static_bytes=static,
            dynamic_bytes=dynamic,
            forward_bytes=forward_most,
            busy_seconds=busy,
            stall_seconds=stalled,
            microbatches=self._microbatches,
            limits=ChainLimits(self._live, -limit, -host, link, int(window), self._allowed, overlaps=self._live > 1),
            engine=LoneEngine(self._lead, rules),
        )
        devices.reset_peak(self._link.device)
        self._choose()

    def _numbers_of_layers(self, probes: Sequence[Probe]) -> dict[str, tuple[float, float, int, int]]:
        """Return the seconds of a layer's forward and recomputation and the bytes it saves and is given, by name.

        Of each layer that was called, for one microbatch; see [Note: one step is not enough].
        """
        count = self._microbatches
        sizes: dict[str, tuple[int, int]] = {}
        for probe in probes:
            for name, calls in probe.calls.items():
                saved, inputs = sizes.get(name, (0, 0))
                sizes[name] = max(saved, -(-calls.saved_bytes // count)), max(inputs, -(-calls.input_bytes // count))
        kinds = {name: (type(self.layers[name].module), size) for name, size in sizes.items()}
        seconds = defaultdict[Hashable, list[tuple[float, float]]](list)
        for probe in probes:
            for name in probe.calls:
                seconds[kinds[name]].append(probe.seconds(name))
        medians = {
            kind: [median(times) / count for times in zip(*pairs, strict=True)] for kind, pairs in seconds.items()
        }
        return {name: (*medians[kinds[name]], *size) for name, size in sizes.items()}

    def _choose(self) -> None:
        """Choose for the largest batch so far, and let the layers do it."""
        if self.facts is None:
            return
        if self._largest_bytes > self.facts.first_bytes:
            self.facts = self.facts.scaled(self._largest_bytes)
        self.pick, problem = self.facts.choose()
        for name, choice in zip(self.facts.names, self.pick.choices, strict=True):
            self.layers[name].choice = choice
        if problem is not None:
            warn_user(problem)


# --- what was measured, and what follows from it: pure functions of numbers that all ranks agree on -------------------


@dataclass(frozen=True)
class StepFacts:
    """What was measured of a step, and of where it ran; layers are those of one microbatch."""

    names: tuple[str, ...]
    layers: tuple[ChainLayer, ...]
    first_bytes: int
    """The size of the first layer's inputs; all that depends on the batch grows with them."""
    static_bytes: float
    """Weights, gradients and optimizer states, which do not depend on the batch."""
    dynamic_bytes: float
    """The most that the device held beside these and what layers kept: logits, say, or a recomputation."""
    forward_bytes: float
    """The same until the first recomputation; infinite if not every layer is called exactly once in a forward."""
    busy_seconds: float
    """How long a step takes in which layers hold as little as they can, without its waits for copies."""
    stall_seconds: float
    """How long such a step waited for copies."""
    microbatches: int
    limits: ChainLimits
    """What the device has for everything, and what the host has for the layers."""
    engine: LoneEngine

    @property
    def room(self) -> ChainLimits:
        """The limits of what depends on the batch."""
        room = max(0.0, self.limits.device_bytes - self.static_bytes)
        forward = None if self.limits.overlaps or math.isinf(self.forward_bytes) else self.forward_bytes
        return replace(self.limits, device_bytes=room, outside_bytes=self.dynamic_bytes, forward_bytes=forward)

    @property
    def other_bytes(self) -> float:
        """What the device holds beside what layers keep."""
        return self.static_bytes + self.dynamic_bytes

    @property
    def kept_seconds(self) -> float:
        """What a step takes if every layer keeps all that autograd saves: nothing is recomputed or copied."""
        return self.busy_seconds - self.microbatches * sum(layer.again_seconds for layer in self.layers)

    def step_seconds(self, pick: ChainChoice) -> float:
        """Return what a step takes with a choice: what was measured, with other layers recomputed and other waits."""
        measured = sum(layer.forward_seconds + layer.backward_seconds + layer.again_seconds for layer in self.layers)
        return self.busy_seconds + self.microbatches * (pick.cost.seconds - measured)

    def device_bytes(self, pick: ChainChoice) -> float:
        """Return the peak on the device with a choice."""
        return self.static_bytes + pick.cost.device_bytes

    def scaled(self, first_bytes: int) -> StepFacts:
        """Return the facts of a larger batch, by what its first layer is given."""
        factor = first_bytes / self.first_bytes
        layers = tuple(
            replace(
                layer,
                forward_seconds=layer.forward_seconds * factor,
                backward_seconds=layer.backward_seconds * factor,
                recompute_seconds=layer.again_seconds * factor,
                saved_bytes=math.ceil(layer.saved_bytes * factor),
                input_bytes=math.ceil(layer.input_bytes * factor),
            )
            for layer in self.layers
        )
        return replace(
            self,
            layers=layers,
            first_bytes=first_bytes,
            dynamic_bytes=self.dynamic_bytes * factor,
            forward_bytes=self.forward_bytes * factor,
            busy_seconds=self.busy_seconds * factor,
            stall_seconds=self.stall_seconds * factor,
        )

    def choose(self) -> tuple[ChainChoice, str | None]:
        """Return the best choice that fits, or the smallest there is, and a sentence if even that does not fit."""
        room = self.room
        if (pick := self._best(room)) is not None:
            return pick, None
        least = smallest_bytes(self.layers, room)
        pick = self._best(replace(room, device_bytes=least))
        assert pick is not None, "the smallest choice fits into what it takes"
        return pick, (
            f"the model does not fit: its layers hold at least {amount(least - self.dynamic_bytes)}, the rest takes"
            f" {amount(self.other_bytes)}, and the device may hold {amount(self.limits.device_bytes)}; every layer"
            " holds as little as it can (use smaller batches, or shard states with more ranks)"
        )

    def _best(self, room: ChainLimits) -> ChainChoice | None:
        # Of one microbatch after the other the order is known, and can be simulated; else sums must do.
        return choose(self.layers, room) if room.overlaps else choose_by_simulation(self.layers, room, self.engine)


def largest_of(
    numbers: Sequence[float], *, group: dist.ProcessGroup | None, device: torch.device, what: str
) -> Sequence[float]:
    """Return the largest of each number among the ranks of a group; None: this process is alone."""
    if group is None:
        return numbers
    shared = torch.tensor(numbers, dtype=torch.float64, device=device)
    with waiting(what, group):
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=group)
    largest: list[float] = shared.tolist()
    return largest


def count_choices(choices: Iterable[Choice]) -> str:
    """Say how many layers do what."""
    counts = Counter(choices)
    words = {Choice.KEEP: "kept", Choice.OFFLOAD: "offloaded", Choice.RECOMPUTE: "recomputed"}
    return ", ".join(f"{counts[choice]} {word}" for choice, word in words.items() if choice in counts)
