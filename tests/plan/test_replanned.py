"""`decide` plans the schedule that a run settles on, and takes one that ran."""

from __future__ import annotations

from typing import Any

from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.plan.decide import decide
from smpkit.plan.offload.forecast import Speed
from smpkit.plan.offload.work import LinkSpeed
from tests.plan.tune.models import gpt

SPEED = Speed(1e14, LinkSpeed(2e10, 2e10), 1e-5, 1e-10)


SIMPLE: dict[str, Any] = {"pipeline": "simple", "active_microbatches": 8}
EVEN = gpt(11)
"""Four stages of three layers, or two and the head."""


def config(**values: Any) -> ModelParallelConfig:
    made, _ = ModelParallelConfig.from_sources({"pipeline_parallel_degree": 4, "microbatches": 8, **values}, None)
    return made


def test_jitter_is_planned_for_as_a_run_does_after_its_first_steps() -> None:
    first = decide(config(), 4, EVEN, SPEED, replans=False)
    settled = decide(config(), 4, EVEN, SPEED)
    assert first.timeline.peak_live_microbatches == (4, 3, 2, 1)
    live = settled.timeline.peak_live_microbatches
    assert sum(live) > sum(first.timeline.peak_live_microbatches)
    assert max(live) <= config().active_microbatches
    deeper = [stage for stage, (before, after) in enumerate(zip((4, 3, 2, 1), live, strict=True)) if after > before]
    for stage in deeper:
        activations = [plan.memory[stage].activations_bytes or 0 for plan in (first, settled)]
        assert activations[0] < activations[1]


def test_nothing_is_planned_again_where_no_other_depth_is_allowed() -> None:
    for values in ({"active_microbatches": 1}, SIMPLE):
        plans = [decide(config(**values), 4, EVEN, SPEED, replans=replans) for replans in (False, True)]
        assert plans[0] == plans[1]


def test_the_schedule_of_a_run_is_taken_as_it_is() -> None:
    ran = decide(config(**SIMPLE), 4, EVEN, SPEED).timeline.schedule
    plan = decide(config(), 4, EVEN, SPEED, schedule=ran)
    assert plan.timeline.schedule is ran
    assert plan.timeline.peak_live_microbatches == (8, 8, 8, 8)
    other = decide(config(pipeline_parallel_degree=2), 4, EVEN, SPEED, schedule=ran)  # of other stages
    assert other.timeline.schedule is not ran
