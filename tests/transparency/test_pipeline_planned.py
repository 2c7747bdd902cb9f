"""What `smpkit plan` records on tensors without data is what ranks then send: the same segments, values and order."""

from __future__ import annotations

import os
import random
from bisect import bisect
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

import smpkit.torch as smp
from smpkit.plan.partition.assignment import Assignment
from smpkit.plan.schedule.graph import Segment, SegmentGraph
from smpkit.plan.schedule.recorded_graph import RecordedGraph
from smpkit.torch.core.tensor_spec import map_tensors
from smpkit.torch.pipeline.fake_recording import record_on_fakes
from smpkit.torch.pipeline.stage_tensor import current_microbatch
from smpkit.torch.placement.trace import measure_units, units_of
from tests.models import Case
from tests.models_of_others import TRANSFORMERS
from tests.ranks import run_ranks
from tests.torch.pipeline.training import Setup, batch, build, part, place, world
from tests.transparency.test_pipeline_models import MODELS

MICROBATCHES = 2
NEED_VALUES = {"backward from gradients", "a branch on a value in the step", "a branch on a value in the model"}
"""Cases in which Python asks for a value, and which cannot be recorded without: plans of theirs say so."""


class WithBackward(nn.Module):
    """What a step function sees of a model that is recorded."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, tensors: Any, gradients: Any = None) -> None:
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        current_microbatch().backward(roots, [None] * len(roots) if gradients is None else gradients)


def run(case: Case, degree: int, seed: int | None) -> tuple[SegmentGraph | None, Assignment]:
    """Run one step over ranks; return the graph that they have scheduled, if it has one, and the assignment."""
    with world(Setup(MICROBATCHES, seed=seed), degree):
        module = build(case)
        if seed is not None:
            place(module, seed, degree)
        model = smp.DistributedModel(module)
        smp.step(case.step)(model, *batch(case, 0, 4))
        pipeline = model.pipeline
        assert pipeline is not None
        assert pipeline._executor is not None
        assert pipeline.assignment is not None
        schedule = pipeline._executor.last_schedule
        return None if schedule is None else schedule.graph, pipeline.assignment


def record(case: Case, assignment: Assignment) -> RecordedGraph:
    """Record the same in this process alone."""
    module, mode = build(case), FakeTensorMode(allow_non_fake_inputs=True)
    arguments = [part(each, 0, MICROBATCHES) for each in batch(case, 0, 4)]

    def call() -> None:
        given = map_tensors(mode.from_tensor, arguments)
        with mode:
            case.step(WithBackward(module), *given)

    return record_on_fakes(module, assignment, [call], torch.device("cpu"))[0]


def compare(cases: dict[str, Case], degree: int, seed: int | None) -> set[str]:
    """Return the cases that need values; raise AssertionError where the two graphs of another one differ."""
    found = set()
    for name, case in cases.items():
        graph, assignment = run(case, degree, seed)
        if int(os.environ["RANK"]):
            continue  # all ranks have one graph, and one process records it
        try:
            planned = record(case, assignment).graph(assignment.num_partitions, has_backward=True)
        except (DataDependentOutputException, DynamicOutputShapeException):
            found.add(name)
            continue
        assert planned == graph, f"`{name}` over {degree} ranks, placed by seed {seed}"
    return found


FEW = {name: case for number, (name, case) in enumerate(MODELS.items()) if number % 4 == 1 or name in NEED_VALUES}


def test_a_plan_records_what_ranks_send() -> None:
    assert run_ranks(compare, 4, FEW, 4, 3, timeout=110)[0] == NEED_VALUES


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("seed", [None, 3])
def test_a_plan_records_what_ranks_send_of_every_model(degree: int, seed: int | None) -> None:
    assert run_ranks(compare, degree, MODELS, degree, seed, timeout=250)[0] == NEED_VALUES


NEED_TOKENS = {"Qwen 2 MoE", "OLMoE", "Wav2Vec2", "HuBERT"}
"""They gather the tokens of each expert, or train by the CTC loss."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("degree", [2, 4])
def test_a_plan_records_what_ranks_send_of_families_of_huggingface(degree: int) -> None:
    assert run_ranks(compare, degree, TRANSFORMERS, degree, None, timeout=800)[0] == NEED_TOKENS


def placed(names: Sequence[str], ranks: Sequence[int]) -> Assignment:
    return Assignment(max(ranks) + 1, tuple(zip(names, ranks, strict=True)), ())


def units_called(recorded: RecordedGraph) -> dict[Segment, set[str]]:
    return {segment: set(names) for segment, names in recorded.segments}


def compare_joined(cases: dict[str, Case]) -> set[str]:
    """Return the cases in which what units on ranks of their own send does not tell what ranks send that hold several.

    Ranks hold neighbouring units, as those that are placed by cost do.
    """
    cuts, found = random.Random(0), set()
    for name, case in cases.items():
        module = build(case)
        names = [cost.name for cost in measure_units(module, units_of(module), None)]
        try:
            apart = record(case, placed(names, range(len(names))))
        except (DataDependentOutputException, DynamicOutputShapeException):
            continue
        for degree in range(2, min(4, len(names)) + 1):
            starts = sorted(cuts.sample(range(1, len(names)), degree - 1))
            assignment = placed(names, [bisect(starts, index) for index in range(len(names))])
            joined, alone = apart.under(assignment), record(case, assignment)
            assert joined is not None
            if (joined.graph(degree, True), units_called(joined)) != (alone.graph(degree, True), units_called(alone)):
                found.add(name)
    return found


BRANCHES = {"parallel branches"}
"""A job adds several branches up where most of their bytes are, and that depends on which of them share a rank."""


def test_units_apart_tell_what_ranks_send_that_hold_several() -> None:
    assert compare_joined(FEW) <= BRANCHES


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_units_apart_of_every_model_tell_what_ranks_send_that_hold_several() -> None:
    assert compare_joined(MODELS) <= BRANCHES
