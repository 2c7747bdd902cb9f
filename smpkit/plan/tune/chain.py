"""Choose for each layer of a stage whether its activations are kept, its input offloaded, or only its input kept.

::

                device                     host               link, each way     more compute
    KEEP        saved × live               –                  –                  –
    OFFLOAD     window                     input × live       input              forward
    RECOMPUTE   input × live               –                  –                  forward

`live` is how many microbatches a stage holds at its peak. Beside the sums, the device holds once the largest
recomputation of a layer that is not kept, and the inputs within the window of loading if one is offloaded; or, at
another time, what the model computes outside these layers, if that is more. A last layer that is kept has gone by the
time of a recomputation, and takes its place, as far as that was not needed before. A microbatch takes as long as the
slowest of compute and the two directions of the link: a load that hides costs nothing. Without a pipeline, forwards and
backwards take turns, and each direction of the link hides behind one of them only.

[Note: sums] Compute, bytes on the device and bytes on the host are sums over layers, and the time on the link follows
from the latter. So layer by layer only those sums are kept of which no other is at least as good in all three. What is
largest once (the recomputation, the window) is no sum: it is fixed beforehand, to each size that a layer has in turn,
and layers beyond it must be kept, or not offloaded. Layers of a model are mostly alike, so few sums differ. Where they
differ so much that more than `_MOST_SUMS` are left, sums that are nearly alike are merged, and the gap says how much
better the best choice could be.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf
from typing import Final

from smpkit.plan.offload.simulate import ON_A_GPU_ALONE, Rules, simulate_offload
from smpkit.plan.offload.work import LayerCost, LinkSpeed, Window, auto_window, layer_tasks
from smpkit.plan.schedule.actions import Action
from smpkit.plan.schedule.graph import Kind

_MOST_SUMS: Final = 4_000


class Choice(StrEnum):
    """What becomes of a layer's activations between forward and backward."""

    KEEP = "keep"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"


@dataclass(frozen=True)
class ChainLayer:
    """A layer of a stage, for one microbatch."""

    forward_seconds: float
    backward_seconds: float
    """Without a recomputation."""
    saved_bytes: int
    """What autograd keeps of it."""
    input_bytes: int
    """0: it cannot be recomputed, and is kept."""
    may_keep: bool = True
    """Whether it may do without recomputation."""
    recompute_seconds: float | None = None
    """What running its forward again takes; None: as long as the first time."""

    @property
    def again_seconds(self) -> float:
        """What running its forward again takes."""
        return self.forward_seconds if self.recompute_seconds is None else self.recompute_seconds


@dataclass(frozen=True)
class ChainLimits:
    """What a stage has, and how it works."""

    live: float
    """Microbatches that it holds at its peak."""
    device_bytes: float
    """For activations."""
    host_bytes: float
    link: LinkSpeed
    window_layers: int = 4
    """Inputs that are on the device although they are offloaded: on their way, or loaded ahead."""
    allowed: frozenset[Choice] = frozenset(Choice)
    overlaps: bool = True
    """Whether forwards of some microbatches run between backwards of others, as in a full pipe."""
    outside_bytes: float = 0.0
    """What the device holds beside what layers keep, at the time when that is most: logits, for example, or what the
    smallest choice was measured to hold. A recomputation and the window are at another time, or part of it."""
    forward_bytes: float | None = None
    """The same until the first layer is recomputed; None: layers run several times, or microbatches overlap, so that
    the last layer has not gone when another is recomputed."""

    def once_bytes(self, largest: float, window: float) -> float:
        """Return what the device holds once, with a recomputation and an offloaded input as large as these."""
        return max(self.outside_bytes, largest + self.window_layers * window)

    def spared_bytes(self, once: float) -> float:
        """Return how much of that the last layer may take if it is kept."""
        return 0.0 if self.forward_bytes is None else max(0.0, once - self.forward_bytes)


@dataclass(frozen=True)
class ChainCost:
    """What choices cost."""

    seconds: float
    """Of one microbatch, forward and backward, in a full pipe."""
    device_bytes: float
    host_bytes: float

    def fits(self, limits: ChainLimits) -> bool:
        return self.device_bytes <= limits.device_bytes and self.host_bytes <= limits.host_bytes


@dataclass(frozen=True)
class ChainChoice:
    """The best choices."""

    choices: tuple[Choice, ...]
    cost: ChainCost
    gap: float
    """By which share of its time others could be faster because sums were merged; 0: none could."""


def cost_of(layers: Sequence[ChainLayer], choices: Sequence[Choice], limits: ChainLimits) -> ChainCost:
    """Return what choices cost."""
    pairs = list(zip(layers, choices, strict=True))
    largest = max((layer.saved_bytes for layer, choice in pairs if choice is not Choice.KEEP), default=0)
    window = max((layer.input_bytes for layer, choice in pairs if choice is Choice.OFFLOAD), default=0)
    once = limits.once_bytes(largest, window)
    compute = device = host = 0.0
    for index, (layer, choice) in enumerate(pairs):
        more, on_device, on_host = _parts(layer, choice, limits, once if index + 1 == len(layers) else None)
        compute += layer.forward_seconds + layer.backward_seconds + more
        device += on_device
        host += on_host
    forward = sum(layer.forward_seconds for layer in layers)
    return ChainCost(_seconds(compute, forward, host, limits), device + once, host)


def _parts(layer: ChainLayer, choice: Choice, limits: ChainLimits, once: float | None) -> tuple[float, float, float]:
    """Return the additional compute, and the bytes on device and host that add up; `once` is for the last layer."""
    if choice is Choice.KEEP:
        saved = layer.saved_bytes * limits.live
        return 0.0, saved if once is None else max(0.0, saved - limits.spared_bytes(once)), 0.0
    if choice is Choice.RECOMPUTE:
        return layer.again_seconds, layer.input_bytes * limits.live, 0.0
    return layer.again_seconds, 0.0, layer.input_bytes * limits.live


def _seconds(compute: float, forward: float, host: float, limits: ChainLimits) -> float:
    """Return the time of a microbatch: of compute, `forward` of which is before backward, or of the link, if longer."""
    num_bytes = host / limits.live if limits.live else 0.0
    if not num_bytes:
        return compute
    link = limits.link
    out, back = num_bytes / link.out_bytes_per_second, num_bytes / link.back_bytes_per_second
    if not limits.overlaps:
        # Add the waits to the compute time: without waits this is exactly the time of choices that copy nothing, and of
        # choices that are as fast the one that holds less is taken. Other sums would differ by rounding.
        return compute + max(0.0, out - forward) + max(0.0, back - (compute - forward))
    return max(compute, out, back)


_TRIED: Final = (Choice.KEEP, Choice.RECOMPUTE, Choice.OFFLOAD)
"""In this order, so that of choices that are as good all ranks take the same."""

# A sum so far: additional compute, bytes on device, bytes on host, the choices as a chain of pairs from the last one.
_State = tuple[float, float, float, "tuple[Choice, object] | None"]


def choose(layers: Sequence[ChainLayer], limits: ChainLimits) -> ChainChoice | None:
    """Return the fastest choices that fit, and of those as fast the ones that hold least; None: nothing fits.

    See [Note: sums]. Layers that are alike are offloaded and recomputed from the first one on, since the first ones
    wait longest for their backward.
    """
    sums, complete = _sums(layers, limits)
    forward = sum(layer.forward_seconds for layer in layers)
    base = forward + sum(layer.backward_seconds for layer in layers)
    # Of each case the best sum; what it holds once may be less than the case has room for.
    best = [
        min(states, key=lambda state: (_seconds(base + state[0], forward, state[2], limits), state[1], state[2]))
        for states in sums
        if states
    ]
    priced = [(cost_of(layers, choices, limits), choices) for choices in map(_unfold, best)]
    fitting = [(cost, choices) for cost, choices in priced if cost.fits(limits)]
    if not fitting:
        return None
    cost, choices = min(fitting, key=lambda pair: (pair[0].seconds, pair[0].device_bytes, pair[0].host_bytes))
    choices = _ordered(layers, choices)
    gap = 0.0 if complete else 1 - _bound(layers, limits) / cost.seconds
    return ChainChoice(choices, cost_of(layers, choices, limits), max(0.0, gap))


def smallest_bytes(layers: Sequence[ChainLayer], limits: ChainLimits) -> float:
    """Return the least that the layers can hold on the device, however long it takes, with this host."""
    sums, _ = _sums(layers, replace(limits, device_bytes=inf))
    states = (state for case in sums for state in case)
    return min((cost_of(layers, _unfold(state), limits).device_bytes for state in states), default=inf)


def _sums(layers: Sequence[ChainLayer], limits: ChainLimits) -> tuple[list[list[_State]], bool]:
    """Return the sums of each case of [Note: sums], and whether none had to be merged."""
    free = [layer for layer in layers if layer.input_bytes]
    cases = [_sums_of_case(layers, limits, 0, 0)]
    for largest in sorted({layer.saved_bytes for layer in free}):
        inputs = {
            layer.input_bytes for layer in free if layer.saved_bytes <= largest and Choice.OFFLOAD in limits.allowed
        }
        cases += [_sums_of_case(layers, limits, largest, window) for window in (0, *sorted(inputs))]
    return [states for states, _ in cases], all(complete for _, complete in cases)


def _sums_of_case(
    layers: Sequence[ChainLayer], limits: ChainLimits, largest: int, window: int
) -> tuple[list[_State], bool]:
    """Return the sums in which no recomputation is larger than `largest`, and no offloaded input than `window`."""
    once = limits.once_bytes(largest, window)
    room = limits.device_bytes - once
    last = len(layers) - 1
    options = [
        {
            choice: _parts(layer, choice, limits, once if index == last else None)
            for choice in _TRIED
            if _is_possible(layer, choice, limits, largest, window)
        }
        for index, layer in enumerate(layers)
    ]
    if room < 0 or not all(options):
        return [], True
    # What the layers to come hold at least: a sum that leaves less room than that leads nowhere.
    ahead = [0.0]
    for parts in reversed(options):
        ahead.append(ahead[-1] + min(on_device for _, on_device, _ in parts.values()))
    ahead.reverse()
    states: list[_State] = [(0.0, 0.0, 0.0, None)]
    complete = True
    for index, parts in enumerate(options):
        grown: list[_State] = []
        for choice, (more, on_device, on_host) in parts.items():
            for compute, device, host, chosen in states:
                if device + on_device + ahead[index + 1] > room or host + on_host > limits.host_bytes:
                    continue
                grown.append((compute + more, device + on_device, host + on_host, (choice, chosen)))
        states = _undominated(grown)
        if len(states) > _MOST_SUMS:
            states, complete = _merged(states, room), False
    return states, complete


def _is_possible(layer: ChainLayer, choice: Choice, limits: ChainLimits, largest: int, window: int) -> bool:
    if choice is Choice.KEEP:
        return layer.may_keep or not layer.input_bytes
    fits = layer.input_bytes > 0 and layer.saved_bytes <= largest
    return choice in limits.allowed and fits and (choice is Choice.RECOMPUTE or layer.input_bytes <= window)


def _undominated(states: list[_State]) -> list[_State]:
    """Return the sums of which no other is at least as good in compute, device and host."""
    states.sort(key=lambda state: state[:3])
    kept: list[_State] = []
    # In ascending order of compute: those before are as good there. Of them, the least host for each device, ascending.
    stairs: list[tuple[float, float]] = []
    for state in states:
        _, device, host, _ = state
        low = bisect_right(stairs, (device, inf))  # behind the last stair with at most this much on the device
        if low and stairs[low - 1][1] <= host:
            continue
        kept.append(state)
        end = low
        while end < len(stairs) and stairs[end][1] >= host:
            end += 1
        start = low - 1 if low and stairs[low - 1][0] == device else low
        stairs[start:end] = [(device, host)]
    return kept


def _merged(states: Sequence[_State], room: float) -> list[_State]:
    """Return the fastest sum of each hundredth of the device."""
    cell = max(room / 100, 1.0)
    fastest: dict[tuple[int, bool], _State] = {}
    for state in states:  # the fastest come first
        fastest.setdefault((int(state[1] // cell), state[2] > 0), state)
    return list(fastest.values())


def _unfold(state: _State) -> tuple[Choice, ...]:
    choices: list[Choice] = []
    link = state[3]
    while link is not None:
        choice, rest = link
        choices.append(choice)
        link = rest  # type: ignore[assignment]  # a chain of pairs has no type of its own
    return tuple(reversed(choices))


def _ordered(layers: Sequence[ChainLayer], choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """Give layers that are alike their choices in this order: offload, recompute, keep."""
    order = [Choice.OFFLOAD, Choice.RECOMPUTE, Choice.KEEP]
    alike: dict[ChainLayer, list[Choice]] = {}
    for layer, choice in zip(layers, choices, strict=True):
        alike.setdefault(layer, []).append(choice)
    turns = {layer: iter(sorted(chosen, key=order.index)) for layer, chosen in alike.items()}
    return tuple(next(turns[layer]) for layer in layers)


def _bound(layers: Sequence[ChainLayer], limits: ChainLimits) -> float:
    """Return a time that no choices are faster than: parts of layers are recomputed, and offloading is free."""
    base = sum(layer.forward_seconds + layer.backward_seconds for layer in layers)
    missing = sum(layer.saved_bytes for layer in layers) * limits.live - limits.device_bytes
    cheap = sorted(
        (layer.again_seconds / (layer.saved_bytes * limits.live), layer.saved_bytes * limits.live)
        for layer in layers
        if layer.input_bytes and layer.saved_bytes
    )
    for rate, num_bytes in cheap:
        if missing <= 0:
            break
        base += rate * min(missing, num_bytes)
        missing -= num_bytes
    return base


# ---- by simulation ---------------------------------------------------------------------------------------------------

# Choose for the layers of one process as `choose` does, but by the simulated engine's time instead of by sums.
# Without a pipeline, a step is forwards and then backwards, and the simulator (`plan/offload/simulate.py`) knows when
# each copy of the offloading engine runs. Sums do not: copies out hide behind some forwards and some backwards, and
# what is needed soon is held and never comes back. So sums propose, and the simulator decides:
#
#     choose, over links of several speeds ─► candidates ─► simulated ─► the fastest
#        └─ over a link without limits: no choice computes less ───────► the gap
#
# Slower links ask for fewer copies, and layers that are alike may be offloaded from the first one on or spread out: a
# copy that takes longer than a forward then has several to hide behind.
#
# [Note: groups] The engine counts how far ahead it loads, and gives memory back, in layers that are offloaded. So the
# simulated layers are those. Each takes the time up to the next one, whatever else runs in between.

_LINK_SHARES: Final = (1.0, 0.85, 0.7, 0.55, 0.4, 0.25, 0.1)
_DIGITS: Final = 9
"""Of a gap: what differs beyond them is as fast, and what then holds less is better."""
_FREE: Final = LinkSpeed(inf, inf)


@dataclass(frozen=True)
class LoneEngine:
    """How the engine works in a process without a pipeline."""

    lead: int | None = None
    """How many offloaded layers ahead it loads; None: it learns the smallest number without a stall."""
    rules: Rules = ON_A_GPU_ALONE


def seconds_of(
    layers: Sequence[ChainLayer], choices: Sequence[Choice], limits: ChainLimits, engine: LoneEngine
) -> float:
    """Return how long forward and backward of the layers take as the engine runs them. See [Note: groups]."""
    before, groups = _groups(layers, choices)
    if not groups:
        return before
    tasks = layer_tasks([Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0)], [groups])
    window = auto_window(tasks, limits.link) if engine.lead is None else Window(engine.lead)
    return before + simulate_offload(tasks, limits.link, window, (), engine.rules).makespan_seconds


def _groups(layers: Sequence[ChainLayer], choices: Sequence[Choice]) -> tuple[float, list[LayerCost]]:
    """Return what runs before the first offloaded layer, and the offloaded layers with the time up to the next."""
    before = waiting = 0.0
    groups: list[LayerCost] = []
    for layer, choice in zip(layers, choices, strict=True):
        again = 0.0 if choice is Choice.KEEP else layer.again_seconds
        if choice is Choice.OFFLOAD:
            # Its backward is followed by those of the layers below it, down to the next one that is offloaded.
            backward = layer.backward_seconds + waiting
            groups.append(LayerCost(layer.forward_seconds, backward, layer.input_bytes, again))
            waiting = 0.0
            continue
        waiting += layer.backward_seconds + again
        if groups:
            groups[-1] = replace(groups[-1], forward_seconds=groups[-1].forward_seconds + layer.forward_seconds)
        else:
            before += layer.forward_seconds
    if not groups:
        return before + waiting, []
    # The layers above the last offloaded one run their backward before its own.
    groups[-1] = replace(groups[-1], forward_seconds=groups[-1].forward_seconds + waiting)
    return before, groups


def choose_by_simulation(layers: Sequence[ChainLayer], limits: ChainLimits, engine: LoneEngine) -> ChainChoice | None:
    """Return the fastest of the candidates that fit, by the simulated engine; None: nothing fits.

    Limits are those of one process: `overlaps` is False, and `live` is 1.
    """
    bound = choose(layers, replace(limits, link=_FREE))
    if bound is None or Choice.OFFLOAD not in limits.allowed:
        return bound  # nothing is copied, so the sums are the time
    chosen: list[ChainChoice] = []
    for choices in dict.fromkeys(_candidates(layers, limits)):
        cost = replace(cost_of(layers, choices, limits), seconds=seconds_of(layers, choices, limits, engine))
        if cost.fits(limits):
            gap = round(1 - (1 - bound.gap) * bound.cost.seconds / cost.seconds, _DIGITS)
            chosen.append(ChainChoice(choices, cost, max(0.0, gap)))
    return min(chosen, key=lambda choice: (choice.gap, choice.cost.device_bytes), default=None)


def _candidates(layers: Sequence[ChainLayer], limits: ChainLimits) -> Iterator[tuple[Choice, ...]]:
    out, back = limits.link.out_bytes_per_second, limits.link.back_bytes_per_second
    for share in _LINK_SHARES:
        link = LinkSpeed(share * out, share * back, limits.link.latency_seconds)
        if (by_sums := choose(layers, replace(limits, link=link))) is not None:
            yield by_sums.choices
            yield _spread(layers, by_sums.choices)
    without = choose(layers, replace(limits, allowed=limits.allowed - {Choice.OFFLOAD}))
    if without is not None:
        yield without.choices


def _spread(layers: Sequence[ChainLayer], choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """Return the choices with the offloaded layers of each kind evenly among those of it that are recomputed."""
    places: dict[ChainLayer, list[int]] = {}
    for index, (layer, choice) in enumerate(zip(layers, choices, strict=True)):
        if choice is not Choice.KEEP:
            places.setdefault(layer, []).append(index)
    spread = list(choices)
    for indices in places.values():
        count = sum(choices[index] is Choice.OFFLOAD for index in indices)
        chosen = {(turn * len(indices)) // count for turn in range(count)}
        for turn, index in enumerate(indices):
            spread[index] = Choice.OFFLOAD if turn in chosen else Choice.RECOMPUTE
    return tuple(spread)
