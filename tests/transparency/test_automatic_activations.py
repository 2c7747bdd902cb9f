"""`strategy="auto"` and `offload_activations: auto` change memory and time, and no bit of losses and weights.

Each job trains with every layer recomputed, and with the choice made in its first steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smpkit.torch as smp
from tests.models import CASES, DROPOUT, WIDTH, Case, Dropping
from tests.ranks import run_ranks
from tests.torch.steps import evaluate
from tests.train import Trace, Way, batch, check_same, divide_layers, flat, run, trace_of, training, whole

CASE = replace(DROPOUT, build=partial(Dropping, 6))
STEPS = 10


@dataclass
class Chosen:
    """What a rank did; `choices` has one of each step."""

    trace: Trace
    choices: list[dict[str, str]]
    is_done: bool
    half_gib: float = 0.0
    """What the smallest choice takes, and half of what layers save if all are kept; 0 if nothing was measured."""


def recompute(strategy: str, model: Any) -> None:
    divide_layers(model)
    smp.set_activation_checkpointing(model.layers, strategy=strategy)


def headed() -> nn.Module:
    """Return layers and a head, which may lie on pipeline ranks of their own."""
    model = nn.Sequential()
    model.layers = nn.Sequential(*Dropping(2).layers)
    model.head = nn.Linear(WIDTH, WIDTH)
    return model


class Skipping(Dropping):
    """Skips its first layer for some batches, as in LayerDrop: replicas skip it in other steps."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[int(x[0, 0] < 0) :]:
            x = layer(x)
        return x


def recompute_on_rank_0(strategy: str, model: Any) -> None:
    recompute(strategy, model)
    smp.set_partition(model.layers, 0)
    smp.set_partition(model.head, 1)


def choose(
    way: Way,
    numbers: Sequence[int] = range(STEPS),
    folder: Path | None = None,
    case: Case = CASE,
    mark: Callable[[str, Any], None] = recompute,
) -> Chosen:
    """Train with `auto`, and evaluate between the steps; go on from what lies in a folder, and save there."""
    with training(case, replace(way, prepare=partial(mark, "auto"))) as trained:
        model = trained.model
        if folder is not None and numbers[0] > 0:
            smp.resume_from_checkpoint(folder)
        outputs, choices = [], []
        for number in numbers:
            x, y = batch(case, number, 8, smp.dp_rank())
            outputs.append(flat(trained.step(x, y)))
            choices.append(model.activation_choices())
            if number != numbers[-1]:
                with torch.no_grad():
                    model.eval()
                    evaluate(model, x)
                    model.train()
        chooser = model.activations._chooser
        found = Chosen(trace_of(outputs, model), choices, chooser is not None and chooser.is_done)
        facts = None if chooser is None else chooser.facts
        if facts is not None:
            least: float = max((each.saved_bytes for each in facts.layers), default=0)
            least += facts.limits.live * sum(each.input_bytes for each in facts.layers)
            kept = facts.limits.live * sum(each.saved_bytes for each in facts.layers)
            found.half_gib = (facts.other_bytes + (least + kept) / 2) / 2**30
        if folder is not None:
            smp.save_checkpoint(folder, f"step_{numbers[-1]}")
        return found


def with_half(way: Way, found: list[Chosen]) -> Way:
    """Return a way with room for some of the layers to be kept."""
    return replace(way, config={**way.config, "memory_budget_gib": max(each.half_gib for each in found)})


JOBS = {
    "one process": Way(microbatches=2),
    "replicas": Way(replicas=2, microbatches=1),
    "pipeline": Way(pipeline=2),
    "tensor": Way(replicas=2, tensor=2, microbatches=1),
    "zero bubble": Way(pipeline=2, config={"pipeline": "zero_bubble"}),
    "sharded data": Way(replicas=2, microbatches=1, config={"sharded_data_parallel_degree": 2}),
    "half": Way(replicas=2, microbatches=1, config={"bf16": True, "sharded_data_parallel_degree": 2}),
}


@pytest.mark.parametrize(
    "job", [*list(JOBS)[:2], *[pytest.param(each, marks=pytest.mark.slow) for each in list(JOBS)[2:]]]
)
def test_no_bit_changes_before_during_and_after_the_switch(job: str) -> None:
    way = JOBS[job]
    plain = whole(run(CASE, replace(way, batches=(8,) * STEPS, prepare=partial(recompute, "each"))))
    roomy = run_ranks(choose, way.ranks, way)
    tight = run_ranks(choose, way.ranks, with_half(way, roomy))
    for found in (*roomy, *tight):
        check_same(found.trace, plain[found.trace.replica], 0)
    for found in roomy:
        assert found.is_done
        assert [set(choices.values()) for choices in (found.choices[0], found.choices[-1])] == [{"recompute"}, {"keep"}]
    for found in tight:
        assert set(found.choices[-1].values()) == {"keep", "recompute"}
    # Ranks of one stage do the same; together they have chosen for all layers.
    last = [found.choices[-1] for found in tight]
    assert all(one == other or not one.keys() & other.keys() for one in last for other in last)
    assert len({name for choices in last for name in choices}) == 6


@pytest.mark.parametrize(
    ("case", "mark", "way", "last"),
    [
        pytest.param(
            replace(DROPOUT, build=headed),
            recompute_on_rank_0,
            Way(pipeline=2, config={"auto_partition": False, "default_partition": 1}),
            [{"layers.0": "keep", "layers.1": "keep"}, {}],
            id="a stage without layers",
        ),
        pytest.param(
            replace(DROPOUT, build=partial(Skipping, 2)),
            recompute,
            Way(replicas=2, microbatches=1),
            [{"layers.0": "keep", "layers.1": "keep"}] * 2,
            id="a layer that replicas skip in other steps",
        ),
    ],
)
def test_ranks_that_call_other_layers_choose_in_the_same_step(
    case: Case, mark: Callable[[str, Any], None], way: Way, last: list[dict[str, str]]
) -> None:
    """Else one of them waits for the others in the all-reduce, until the deadline."""
    way = replace(way, batches=(8,) * 16, config={**way.config, "timeout_seconds": 10})
    plain = whole(run(case, replace(way, prepare=partial(mark, "each"))))
    found = run_ranks(choose, 2, way, range(16), None, case, mark)
    for each in found:
        check_same(each.trace, plain[each.trace.replica], 0)
    assert [each.choices[-1] for each in found] == last


def test_a_resumed_job_does_the_same_and_measures_nothing(tmp_path: Path) -> None:
    way = JOBS["pipeline"]
    plain = run_ranks(choose, 2, way)
    tight = with_half(way, plain)
    first = run_ranks(choose, 2, tight, range(7), tmp_path)
    second = run_ranks(choose, 2, tight, range(7, STEPS), tmp_path)
    for expected, before, after in zip(plain, first, second, strict=True):
        check_same(replace(after.trace, outputs=before.trace.outputs + after.trace.outputs), expected.trace, 0)
        assert after.choices == [before.choices[-1]] * (STEPS - 7)
        assert set(before.choices[-1].values()) == {"keep", "recompute"}
        assert after.half_gib == 0, "it has measured"


@pytest.mark.slow
def test_other_degrees_measure_anew(tmp_path: Path) -> None:
    run_ranks(choose, 2, JOBS["pipeline"], range(7), tmp_path)
    [found, _] = run_ranks(choose, 2, JOBS["replicas"], range(7, STEPS + 7), tmp_path)
    assert set(found.choices[0].values()) == {"recompute"}
    assert set(found.choices[-1].values()) == {"keep"}


def test_what_has_no_effect_is_said() -> None:
    case = CASES["Sequential"]
    with (
        training(case, Way(config={"memory_budget_gib": 1})) as trained,
        pytest.warns(UserWarning, match="memory_budget_gib has no effect: there is no layer"),
    ):
        trained.step(*batch(case, 0, 8))


def test_a_budget_that_cannot_be_kept_is_said() -> None:
    with pytest.warns(UserWarning, match=re.escape("the model does not fit: its layers hold at least")):
        found = choose(Way(config={"memory_budget_gib": 1e-6}))
    # The last one holds no more if it is kept: when another is recomputed, it has gone.
    assert list(found.choices[-1].values()) == ["recompute"] * 5 + ["keep"]


def recompute_a_part_too(model: Any) -> None:
    recompute("auto", model)
    smp.set_activation_checkpointing(model.get_submodule("layers.0.last"))


def test_layers_inside_others_are_not_chosen_for() -> None:
    with training(CASE, Way(prepare=recompute_a_part_too)) as trained:
        trained.step(*batch(CASE, 0, 8))
        assert list(trained.model.activation_choices()) == [f"layers.{index}" for index in range(6)]
