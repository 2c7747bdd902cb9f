"""Choose for the layers of one process as `chain` does, but by the simulated engine's time instead of by sums.

Without a pipeline, a step is forwards and then backwards, and the simulator (`plan/offload/simulate.py`) knows when
each copy of the offloading engine runs. Sums do not: copies out hide behind some of the forwards and of the backwards,
and what is needed soon is held and never comes back. So sums propose, and the simulator decides::

    choose, over links of several speeds ─► candidates ─► simulated ─► the fastest
       └─ over a link without limits: no choice computes less ───────► the gap

Slower links ask for fewer copies, and layers that are alike may be offloaded from the first one on or spread out: a
copy that takes longer than a forward then has several to hide behind.

[Note: groups] The engine counts how far ahead it loads, and gives memory back, in layers that are offloaded. So the
simulated layers are those. Each takes the time up to the next one, whatever else runs in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from smpkit.plan.offload.simulate import ON_A_GPU_ALONE, Rules, simulate_offload
from smpkit.plan.offload.work import LayerCost, LinkSpeed, Window, auto_window, layer_tasks
from smpkit.plan.schedule.actions import Action
from smpkit.plan.schedule.graph import Kind
from smpkit.plan.tune.chain import ChainChoice, ChainLayer, ChainLimits, Choice, choose, cost_of

__all__ = ["ON_A_GPU", "LoneEngine", "choose_by_simulation", "seconds_of"]

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


ON_A_GPU: Final = LoneEngine()


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


def choose_by_simulation(
    layers: Sequence[ChainLayer], limits: ChainLimits, engine: LoneEngine = ON_A_GPU
) -> ChainChoice | None:
    """Return the fastest of the candidates that fit, by the simulated engine; None: nothing fits.

    Args:
        limits: of one process: `overlaps` is False, and `live` is 1.
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
