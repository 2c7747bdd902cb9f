"""What `smpkit plan` records on tensors without data is what ranks then send: the same segments, values and order."""

from __future__ import annotations

import os
import random
from bisect import bisect
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from smpkit.plan.partition.assignment import Assignment
from smpkit.plan.schedule.graph import Segment, SegmentGraph
from smpkit.plan.schedule.recorded_graph import RecordedGraph
from smpkit.torch.placement.trace import measure_units
from smpkit.torch.placement.units import units_of
from tests.models import MODELS, Case
from tests.models_of_others import TRANSFORMERS
from tests.pairwise import slow
from tests.ranks import run_ranks
from tests.torch.steps import executor
from tests.train import Way, batch, build, training
from tests.transparency.recorded import NO_ANSWER, placed, record

MICROBATCHES = 2
ASK = {"backward from gradients", "a branch on a value in the step", "a branch on a value in the model"}
NEED_VALUES = {*ASK, "Qwen 2 MoE", "OLMoE", "Wav2Vec2", "HuBERT"}
"""Cases that cannot be recorded without values, which plans of theirs say.

Python asks for them; layers gather the tokens of each expert; or it is the CTC loss.
"""
CASES = {**MODELS, **TRANSFORMERS}


def run(case: Case, way: Way) -> tuple[SegmentGraph | None, Assignment]:
    """Run one step over ranks; return the graph that they have scheduled, if it has one, and the assignment."""
    with training(case, way) as trained:
        trained.step(*batch(case, 0, 4))
        pipeline: Any = trained.model.pipeline
        schedule = executor().last_schedule
        return None if schedule is None else schedule.graph, pipeline.assignment


def needs_values(case: Case, way: Way) -> bool:
    """Return whether the case cannot be recorded; raise AssertionError where the plan's graph is not that of ranks."""
    graph, assignment = run(case, way)
    if int(os.environ["RANK"]):
        return False  # all ranks have one graph, and one process records it
    try:
        planned = record(case, assignment, costs_first=True).graph(assignment.num_partitions, has_backward=True)
    except NO_ANSWER:
        return True
    assert planned == graph
    return False


FEW = {"skip connections", "tied modules", "encoder and decoder", "several losses"}


SCATTERED = Way(pipeline=4, microbatches=MICROBATCHES, placement=3)
DECIDED = [Way(pipeline=degree, microbatches=MICROBATCHES, traced=True) for degree in (2, 4)]
GRID = [*product(CASES, DECIDED), *product(MODELS, [replace(way, placement=3) for way in DECIDED])]


@pytest.mark.parametrize(("model", "way"), [*product(sorted({*FEW, *ASK, "GPT-2"}), [SCATTERED]), *slow(GRID)], ids=str)
def test_a_plan_records_what_ranks_send(model: str, way: Way) -> None:
    assert run_ranks(needs_values, way.ranks, CASES[model], way)[0] == (model in NEED_VALUES)


def units_called(recorded: RecordedGraph) -> dict[Segment, set[str]]:
    return {segment: set(names) for segment, names in recorded.segments}


BRANCHES = {"parallel branches"}
"""A job adds several branches up where most of their bytes are, and that depends on which of them share a rank."""


NEIGHBOURS = [name for name in MODELS if name not in ASK | BRANCHES]


@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=[] if name in FEW else [pytest.mark.slow]) for name in NEIGHBOURS]
)
def test_units_apart_tell_what_ranks_send_that_hold_several(model: str) -> None:
    """Ranks hold neighbouring units, as those that are placed by cost do."""
    case, cuts = MODELS[model], random.Random(0)
    module = build(case)
    names = [cost.name for cost in measure_units(module, units_of(module), None)]
    apart = record(case, placed(names, range(len(names))), costs_first=True)
    for degree in range(2, min(4, len(names)) + 1):
        starts = sorted(cuts.sample(range(1, len(names)), degree - 1))
        assignment = placed(names, [bisect(starts, index) for index in range(len(names))])
        joined, alone = apart.under(assignment), record(case, assignment, costs_first=True)
        assert joined is not None
        assert joined.graph(degree, True) == alone.graph(degree, True)
        assert units_called(joined) == units_called(alone)
