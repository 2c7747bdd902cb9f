from __future__ import annotations

import itertools
import random

import pytest

from smpkit.plan.offload.simulate import ON_A_GPU, simulate_offload
from smpkit.plan.offload.work import LayerCost, LinkSpeed, auto_window, layer_tasks
from smpkit.plan.schedule.graph import SegmentGraph
from smpkit.plan.schedule.search import interleaved
from smpkit.plan.tune import chain
from smpkit.plan.tune.chain import ChainLayer, ChainLimits, Choice, choose, cost_of, smallest_bytes

ALIKE = ChainLayer(1.0, 2.0, saved_bytes=100, input_bytes=10)


def some_layers(random: random.Random, count: int) -> list[ChainLayer]:
    return [
        ChainLayer(
            random.choice([0.5, 1.0, random.uniform(0.1, 3)]),
            random.uniform(0.2, 6),
            saved_bytes=random.randint(1, 200),
            input_bytes=random.choice([0, 5, random.randint(1, 40)]),
        )
        for _ in range(count)
    ]


def some_limits(random: random.Random, layers: list[ChainLayer]) -> ChainLimits:
    live = random.choice([1, 2, 3.5])
    whole = live * sum(each.saved_bytes for each in layers)
    outside = random.choice([0, 0.3 * random.random() * whole])
    return ChainLimits(
        live,
        random.uniform(0.1, 1.1) * whole,
        random.choice([0, random.random() * live * sum(each.input_bytes for each in layers), 1000]),
        LinkSpeed(random.uniform(2, 60), random.uniform(2, 60)),
        window_layers=random.choice([0, 2, 4]),
        overlaps=random.choice([True, False]),
        outside_bytes=outside,
        forward_bytes=random.choice([None, 0, random.random() * outside]),
    )


def brute_force(layers: list[ChainLayer], limits: ChainLimits) -> float | None:
    each_layer = [Choice if layer.input_bytes else [Choice.KEEP] for layer in layers]
    costs = (cost_of(layers, choices, limits) for choices in itertools.product(*each_layer))
    return min((cost.seconds for cost in costs if cost.fits(limits)), default=None)


@pytest.mark.parametrize("count", [*range(1, 9), pytest.param(9, marks=pytest.mark.slow), 10])
def test_brute_force_finds_nothing_better(count: int) -> None:
    source = random.Random(count)
    for _ in range(40 if count < 7 else 2):
        layers = some_layers(source, count)
        limits = some_limits(source, layers)
        found, best = choose(layers, limits), brute_force(layers, limits)
        assert (found is None) == (best is None)
        if found is not None:
            assert found.cost.seconds == pytest.approx(best)
            assert found.cost.fits(limits)
            assert found.cost == cost_of(layers, found.choices, limits)
            assert found.gap == 0


@pytest.mark.parametrize(
    ("choice", "held", "once"), [(Choice.KEEP, 400, 0), (Choice.RECOMPUTE, 40, 100), (Choice.OFFLOAD, 0, 120)]
)
def test_what_is_outside_the_layers_has_the_place_of_a_recomputation(choice: Choice, held: int, once: int) -> None:
    """Both are there once, at different times: the larger one counts."""
    for outside in (0, 110, 200):
        limits = ChainLimits(1, 1000, 1000, LinkSpeed(1, 1), window_layers=2, outside_bytes=outside)
        assert cost_of([ALIKE] * 4, [choice] * 4, limits).device_bytes == held + max(once, outside)


@pytest.mark.parametrize(("forward", "last"), [(None, 100), (110, 100), (80, 70), (0, 0)])
def test_a_last_layer_that_is_kept_has_the_place_of_what_is_recomputed_later(forward: int | None, last: int) -> None:
    limits = ChainLimits(1, 1000, 1000, LinkSpeed(1, 1), outside_bytes=110, forward_bytes=forward)
    for first, held in ((Choice.KEEP, 300), (Choice.RECOMPUTE, 30)):
        assert cost_of([ALIKE] * 4, [first] * 3 + [Choice.KEEP], limits).device_bytes == held + last + 110
    assert cost_of([ALIKE] * 4, [Choice.RECOMPUTE] * 4, limits).device_bytes == 40 + 110


def test_without_a_pipeline_each_direction_hides_behind_its_own_half() -> None:
    # Two forwards, 2 s; 4 s of backward and 2 s of recomputation. Each way 20 bytes.
    link = LinkSpeed(out_bytes_per_second=5, back_bytes_per_second=2)
    full = ChainLimits(1, 1000, 1000, link, window_layers=0)
    assert cost_of([ALIKE] * 2, [Choice.OFFLOAD] * 2, full).seconds == 10
    turns = ChainLimits(1, 1000, 1000, link, window_layers=0, overlaps=False)
    assert cost_of([ALIKE] * 2, [Choice.OFFLOAD] * 2, turns).seconds == max(2, 20 / 5) + max(6, 20 / 2)


def test_a_fast_link_offloads_and_a_slow_one_recomputes() -> None:
    # 2 microbatches of 4 layers: 800 if kept. Room for two kept layers beside one recomputation and the window.
    room = 400 + 100 + 20
    fast = choose([ALIKE] * 4, ChainLimits(2, room, 1000, LinkSpeed(10, 10), window_layers=2))
    assert fast is not None
    assert fast.choices == (Choice.OFFLOAD, Choice.OFFLOAD, Choice.KEEP, Choice.KEEP)
    slow = choose([ALIKE] * 4, ChainLimits(2, room, 1000, LinkSpeed(0.1, 0.1), window_layers=2))
    assert slow is not None
    assert slow.choices == (Choice.RECOMPUTE,) * 3 + (Choice.KEEP,)


def test_nothing_fits_and_the_least_is_known() -> None:
    limits = ChainLimits(2, 100, 1000, LinkSpeed(10, 10))
    assert choose([ALIKE] * 4, limits) is None
    assert smallest_bytes([ALIKE] * 4, limits) == 100 + 4 * 10
    assert choose([ALIKE] * 4, ChainLimits(2, 140, 1000, LinkSpeed(10, 10))) is not None


def test_many_layers_that_differ_have_a_gap_that_is_an_upper_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    source = random.Random(1)
    layers = some_layers(source, 26)
    whole = sum(each.saved_bytes for each in layers)
    limits = ChainLimits(1, 0.5 * whole, 1000, LinkSpeed(40, 40))
    exact = choose(layers, limits)
    monkeypatch.setattr(chain, "_MOST_SUMS", 20)
    found = choose(layers, limits)
    assert exact is not None
    assert found is not None
    assert found.cost.fits(limits)
    assert 0 < found.gap < 0.2
    assert found.cost.seconds * (1 - found.gap) <= exact.cost.seconds <= found.cost.seconds


def test_eighty_layers_are_chosen_at_once() -> None:
    limits = ChainLimits(8, 80 * 8 * 50, 10**9, LinkSpeed(100, 100))
    found = choose([ChainLayer(1, 2, 101, 10), *[ALIKE] * 79], limits)
    assert found is not None
    assert found.gap == 0
    assert 0 < found.choices.count(Choice.KEEP) < 80


@pytest.mark.parametrize("rate", [5.0, 10.0, 20.0])
def test_the_simulator_finds_nothing_much_better(rate: float) -> None:
    """What hides, and what does not, is the simulator's to say: a step of it, over all choices that fit."""
    layers = [ALIKE, ChainLayer(2.0, 4.0, 150, 10), ALIKE, ChainLayer(0.5, 1.0, 60, 10), ALIKE]
    schedule = interleaved(SegmentGraph.loop(2, 1, True), 12, 4)
    live = schedule.peak_live_microbatches[0]
    limits = ChainLimits(live, 0.55 * live * 510, 10**6, LinkSpeed(rate, rate))

    def simulated(choices: tuple[Choice, ...]) -> float:
        costs = [
            LayerCost(
                each.forward_seconds,
                each.backward_seconds,
                each.input_bytes if choice is Choice.OFFLOAD else 0,
                0 if choice is Choice.KEEP else each.forward_seconds,
            )
            for each, choice in zip(layers, choices, strict=True)
        ]
        tasks = layer_tasks(schedule.actions[0], [costs])
        window = auto_window(tasks, limits.link)
        return simulate_offload(tasks, limits.link, window, rules=ON_A_GPU).makespan_seconds

    fitting = [
        choices
        for choices in itertools.product(Choice, repeat=len(layers))
        if cost_of(layers, choices, limits).fits(limits)
    ]
    found = choose(layers, limits)
    assert found is not None
    assert simulated(found.choices) <= 1.02 * min(map(simulated, fitting))
