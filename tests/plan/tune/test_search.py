from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.errors import ConfigError
from smpkit.plan.memory import ModelFacts, in_dtype
from smpkit.plan.tune.calibration import Calibration
from smpkit.plan.tune.chain import Choice
from smpkit.plan.tune.machine import Machine, from_calibration
from smpkit.plan.tune.predict import Job, Prediction, RuledOut, layers_of, predict, usable_bytes, with_choices
from smpkit.plan.tune.search import search
from tests.plan.tune.facts import facts
from tests.plan.tune.models import MIB, gpt

MACHINE = from_calibration(Calibration.model_validate(facts()))


def with_device(gib: float) -> Machine:
    return replace(MACHINE, device_bytes=round(gib * 2**30))


def machine(**speed: Any) -> Machine:
    """Return the machine with other costs of a rank's work."""
    return replace(MACHINE, speed=replace(MACHINE.speed, **speed))


def job(gib: float = 16, *, degrees: tuple[int, ...] = (1, 2), ranks: int = 4, samples: int = 32) -> Job:
    return Job({degree: gpt(degree=degree) for degree in degrees}, with_device(gib), ranks, samples)


def with_costs(**costs: Any) -> ModelFacts:
    """Return a model whose units have other costs."""
    model = gpt()
    return replace(model, units=tuple(replace(unit, cost=replace(unit.cost, **costs)) for unit in model.units))


def predicted(where: Job, **parameters: Any) -> Prediction | RuledOut:
    config, _ = ModelParallelConfig.from_sources({"ddp": True, **parameters}, None)
    return predict(config, where)


def a_prediction(where: Job, **parameters: Any) -> Prediction:
    found = predicted(where, **parameters)
    assert isinstance(found, Prediction), found
    return found


# --- one configuration ------------------------------------------------------------------------------------------------


def test_parts_sum_up_and_compute_is_what_the_model_takes() -> None:
    found = a_prediction(job(), microbatches=8)
    assert found.step_seconds == sum(found.parts.values())
    # 13 units of 1e12 operations, three times for forward and backward, 8 samples a rank, 10 TFLOP/s.
    assert found.parts["compute"] == pytest.approx(3 * 13e12 * 8 / 10e12)
    assert (found.parts["bubble"], found.parts["stall"]) == (0, 0)
    assert found.tokens_per_second == pytest.approx(32 * 128 / found.step_seconds)
    assert set(found.choices.values()) == {Choice.KEEP}


def test_the_bubble_of_a_pipeline_is_that_of_its_timeline() -> None:
    found = a_prediction(job(), pipeline_parallel_degree=4, microbatches=8)
    whole = found.parts["compute"] + found.parts["bubble"]
    assert whole == pytest.approx(found.plan.timeline.makespan_seconds)
    more = a_prediction(job(), pipeline_parallel_degree=4, microbatches=32)
    assert more.parts["bubble"] < found.parts["bubble"]


def test_tensor_parallelism_costs_collectives() -> None:
    found = a_prediction(job(), tensor_parallel_degree=2, microbatches=8, prescaled_batch=True)
    whole = MACHINE.collective_seconds("all_reduce", 4 * MIB, 2, 1)
    # Twice in each pass of 12 layers, once in the embedding and the head; 16 samples a group, 2 a microbatch.
    double = MACHINE.collective_seconds("all_reduce", 8 * MIB, 2, 1)
    assert whole < double
    assert found.parts["communication"] > 8 * 2 * (24 + 2) * double * 0.99


def test_less_memory_recomputes_more_layers_and_says_how_many() -> None:
    counts = []
    for gib in (16, 7.9, 6.95):
        found = a_prediction(job(gib), microbatches=1)
        assert all(each.total_bytes <= usable_bytes(with_device(gib)) for each in found.plan.memory)
        counts.append(list(found.choices.values()).count(Choice.RECOMPUTE))
    assert counts[0] == 0 < counts[1] < counts[2]


def test_offloading_takes_the_place_of_recomputation_only() -> None:
    found = a_prediction(job(6.95), microbatches=1, offload_activations=True)
    assert Choice.OFFLOAD in found.choices.values()
    assert any(each.host_bytes for each in found.plan.memory)
    assert found.plan.forecasts


def test_what_cannot_fit_lacks_so_much_and_samples_must_be_divided() -> None:
    found = predicted(job(1.9), microbatches=8)
    assert isinstance(found, RuledOut)
    assert found.kind == "memory"
    assert found.reason.startswith("stage 0 needs ")
    assert found.missing_bytes > 2**30
    undivided = predicted(job(samples=30), microbatches=8)
    assert isinstance(undivided, RuledOut)
    assert undivided.kind == "batch"


def test_what_the_runtime_spends_on_actions_counts() -> None:
    where = replace(job(), machine=machine(action_seconds=0.01))
    plain, slower = (a_prediction(each, pipeline_parallel_degree=4, microbatches=8) for each in (job(), where))
    # 8 microbatches forward and backward on the last stage, and what comes before and after on the others.
    assert slower.step_seconds - plain.step_seconds == pytest.approx(0.01 * 2 * (8 + 3), rel=0.05)


@pytest.mark.parametrize(
    ("pipeline", "recomputed_flops", "seconds_per_unit"),
    [("interleaved", 0, 0.0), ("zero_bubble", 0, 8 * 10 * 1e-3), ("zero_bubble", 1e9, 0.0)],
    ids=["whole", "halves", "halves that compute something again"],
)
def test_only_a_backward_in_halves_costs_the_host_more_for_each_product_with_a_weight(
    pipeline: str, recomputed_flops: float, seconds_per_unit: float
) -> None:
    where = replace(job(), models={1: with_costs(weight_products=10, recomputed_flops=recomputed_flops)})
    dear = replace(where, machine=machine(split_seconds=1e-3, is_asynchronous=False))
    settings = {"pipeline_parallel_degree": 2, "microbatches": 8, "pipeline": pipeline}
    plain, split = (a_prediction(each, **settings) for each in (where, dear))
    # The second stage splits its backward; the first one hands no gradient on.
    assert plain.plan.assignment
    more = len(plain.plan.assignment.names(1)) * seconds_per_unit
    assert split.step_seconds - plain.step_seconds == pytest.approx(more, rel=0.05)


def test_ranks_that_share_cores_compute_more_slowly() -> None:
    """Four stages on two cores: the host computes as much as with two ranks, whatever the schedule is."""
    two = replace(job(), machine=replace(MACHINE, parallel_ranks=2.0))
    shared = a_prediction(two, pipeline_parallel_degree=4, microbatches=32)
    alone = a_prediction(job(), pipeline_parallel_degree=4, microbatches=32)
    work = 3 * 13e12 * 32 / 10e12
    assert shared.parts["compute"] + shared.parts["bubble"] == pytest.approx(work / 2, rel=0.01)
    assert alone.parts["compute"] + alone.parts["bubble"] < work / 2
    assert shared.parts["bubble"] == alone.parts["bubble"]


def test_operators_and_what_they_move_cost_time_beside_products() -> None:
    where = Job({1: with_costs(operations=100, moved_bytes=10**9)}, MACHINE, 1, 8)
    plain = a_prediction(where, microbatches=8).step_seconds
    slow = {"operation_seconds": 1e-3, "moved_bytes_per_second": 1e10}
    # A host runs ahead of its GPU: 13 products of 0.1 s and 14 values of 0.1 s hide 0.1 s of operators in each.
    ahead = a_prediction(replace(where, machine=machine(**slow)), microbatches=8).step_seconds
    assert ahead - plain == pytest.approx(8 * 3 * 14 * 0.1, rel=0.01)
    waits = machine(**slow, is_asynchronous=False)
    after = a_prediction(replace(where, machine=waits), microbatches=8).step_seconds
    assert after - ahead == pytest.approx(8 * 3 * 14 * 0.1, rel=0.01)


def test_masters_are_held_in_half_precision_and_divided_by_sharding() -> None:
    plain = a_prediction(job(), microbatches=8).plan.memory[0]
    tensors = {name: in_dtype(each, "bfloat16", 2) for name, each in gpt().tensors.items()}
    described = replace(job(), models={1: replace(gpt(), tensors=tensors)})
    half = a_prediction(described, microbatches=8, bf16=True).plan.memory[0]
    assert half.parameters_bytes == plain.parameters_bytes // 2
    assert half.masters_bytes == plain.parameters_bytes
    assert half.optimizer_bytes == plain.optimizer_bytes
    # Sharded data parallelism divides the masters, and gathers in half precision.
    sharded = a_prediction(described, microbatches=8, bf16=True, sharded_data_parallel_degree=4).plan.memory[0]
    assert sharded.parameters_bytes == plain.parameters_bytes // 4
    assert sharded.masters_bytes == 0
    assert 0 < sharded.gathered_bytes < half.parameters_bytes


# --- the search -------------------------------------------------------------------------------------------------------


GRID: dict[str, tuple[Any, ...]] = {
    "pipeline_parallel_degree": (1, 2, 4),
    "tensor_parallel_degree": (1, 2),
    "microbatches": (1, 2, 4, 8, 16, 32),
    "pipeline": ("interleaved", "zero_bubble"),
    "virtual_pipeline_degree": (1, 2),
    "offload_activations": (False, True),
    "shard_optimizer_state": (False, True),
    "sharded_data_parallel_degree": (1, 2, 4),
}


@pytest.mark.parametrize("gib", [4.5, *(pytest.param(each, marks=pytest.mark.slow) for each in (16.0, 3.0))])
def test_nothing_that_the_schema_accepts_is_faster(gib: float) -> None:
    where = job(gib)
    found = search(where, {"prescaled_batch": True}, budget_seconds=1000)
    tried = []
    for values in itertools.product(*GRID.values()):
        with suppress(ConfigError):
            tried.append(predicted(where, prescaled_batch=True, **dict(zip(GRID, values, strict=True))))
    best = min((each for each in tried if isinstance(each, Prediction)), key=lambda each: each.step_seconds)
    assert found.best[0].step_seconds <= 1.01 * best.step_seconds, (best.config.given(), found.best[0].config.given())
    assert found.unseen_gap == 0


def test_all_that_is_found_fits_and_is_accepted() -> None:
    where = job(4.5)
    found = search(where, {"bf16": True}, budget_seconds=1000)
    assert len(found.best) > 5
    for each in found.best:
        assert ModelParallelConfig.from_sources(each.config.given(), None)[0] == each.config
        assert each.config.world_problems(4) == []
        assert each.config.bf16
        assert all(memory.total_bytes <= usable_bytes(where.machine) for memory in each.plan.memory)
    times = [each.step_seconds for each in found.best]
    assert times == sorted(times) or max(times[i] / times[i + 1] for i in range(len(times) - 1)) < 1.006
    assert any(reason.startswith("refused: sharded_data_parallel_degree") for reason in found.ruled_out)


def test_without_time_it_says_what_it_has_not_seen() -> None:
    ticks = itertools.count()
    found = search(job(4.5), {}, budget_seconds=4, clock=lambda: float(next(ticks)))
    assert 0 < found.unseen_gap < 1


def test_where_nothing_fits_the_nearest_is_told() -> None:
    found = search(job(1.2), {}, budget_seconds=1000)
    assert found.best == ()
    assert found.nearest is not None
    _, lacking = found.nearest
    assert lacking.missing_bytes > 0
    again = search(job(1.2 + lacking.missing_bytes / 2**30 / 0.94), {}, budget_seconds=1000)
    assert again.best or again.nearest is not None


def test_states_count_as_those_of_the_jobs_optimizer() -> None:
    where = Job({1: gpt()}, with_device(3.2), 1, 8, "sgd")
    assert isinstance(predicted(where, microbatches=8), Prediction)
    found = search(where, {}, budget_seconds=1000)
    assert found.best
    assert found.ruled_out.get("weights, gradients and states alone do not fit") is None


def test_the_jobs_own_configuration_is_compared() -> None:
    found = search(job(), {"pipeline_parallel_degree": 4, "microbatches": 4}, budget_seconds=1000)
    assert isinstance(found.present, Prediction)
    assert found.best[0].step_seconds <= found.present.step_seconds


def test_thousands_of_ranks_are_planned_by_symmetry() -> None:
    where = Job({1: gpt(8)}, with_device(16), 2048, 4096)
    found = search(where, {}, budget_seconds=1)
    assert found.best
    assert found.seconds < 60


def test_a_mixed_choice_offloads_only_some_inputs() -> None:
    layers = layers_of(gpt(4))
    kinds = [Choice.KEEP, Choice.OFFLOAD, Choice.RECOMPUTE, Choice.OFFLOAD]
    choices = dict(zip(layers, kinds, strict=True))
    costs = {unit.cost.name: unit.cost for unit in with_choices(gpt(4), layers, choices, mixed=True).units}
    found = [(costs[name].boundary_bytes > 0, costs[name].recomputed_flops > 0) for name in layers]
    assert found == [(False, False), (True, True), (False, True), (True, True)]


def test_of_configurations_with_one_prediction_the_first_is_shown() -> None:
    """Other weights of the partition, which led to the same parts, took places in the table."""
    found = search(job(degrees=(1,), ranks=2), {"ddp": True, "microbatches": 8}, budget_seconds=1000)
    assert len(found.distinct) < len(found.best)
    assert found.distinct[0] is found.best[0]
    figures = [(each.parts, dict(each.choices), [held.total_bytes for held in each.plan.memory]) for each in found.best]
    shown = [figures[found.best.index(each)] for each in found.distinct]
    assert all(one not in shown[:index] for index, one in enumerate(shown))
    assert all(one in shown for one in figures)
