"""What sharded ranks save, they go on with, and so do ranks that are sharded otherwise or not at all."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest

import smpkit.torch as smp
from tests.models import MODELS, Case
from tests.train import Trace, Training, Way, same, trace_of, world

CASE = MODELS["tied by a function"]
SHARDED: dict[str, dict[str, Any]] = {
    "plain": {},
    "states": {"shard_optimizer_state": True},
    "halves": {"sharded_data_parallel_degree": 2},
    "quarters": {"sharded_data_parallel_degree": 4},
}


def way_of(kind: str, **more: Any) -> Way:
    return Way(**{"replicas": 2, "microbatches": 2, "optimizer": "AdamW", "config": SHARDED[kind], **more})


def train_twice(case: Case, way: Way, parts: bool) -> Trace:
    """Train on the last batch, go back to the states before it, whole or in parts, and train on it again."""
    last = len(way.batches) - 1
    with world(way):
        script = Training(case, way)
        model, optimizer = script.model, script.optimizer
        outputs = [script.run(number) for number in range(last)]
        saved = [each.local_state_dict() if parts else each.state_dict() for each in (model, optimizer)]
        weights, states = copy.deepcopy(saved)  # they refer to what training goes on to change
        script.run(last)
        model.load_state_dict(weights)
        optimizer.load_state_dict(states)
        return trace_of([*outputs, script.run(last)], model)


def mark(module: Any) -> None:
    smp.set_tensor_parallelism(module.layers)


def both(kind: str) -> Way:
    """Sharded between ranks that are tensor-parallel, too."""
    config = {**SHARDED[kind], "prescaled_batch": True}
    return way_of(kind, tensor=2, clip=0.3, config=config, prepare=mark)


@pytest.mark.parametrize(
    ("way", "parts"),
    [(way_of("states"), True), (way_of("halves"), False), (both("states"), False), (both("halves"), True)],
    ids=str,
)
def test_states_that_are_loaded_are_those_that_were_saved(way: Way, parts: bool) -> None:
    same(CASE, way, by=functools.partial(train_twice, parts=parts))


def save_and_resume(case: Case, way: Way, saved: Way, folder: Path) -> Trace:
    """Train all but the last batch in one way, and on that in another."""
    last = len(way.batches) - 1
    with world(saved):
        script = Training(case, saved)
        outputs = [script.run(number) for number in range(last)]
        smp.save_checkpoint(folder, tag="part")
    with world(way):
        script = Training(case, way)
        smp.resume_from_checkpoint(folder, tag="part")
        return trace_of([*outputs, script.run(last)], script.model)


@pytest.mark.parametrize(
    ("saved", "way"),
    [
        (way_of("plain"), way_of("states")),
        (way_of("states"), way_of("halves")),
        (way_of("halves"), way_of("plain")),
        (way_of("quarters", replicas=4), way_of("halves", replicas=4)),
        (way_of("plain", replicas=1, pipeline=2), way_of("plain", replicas=1, pipeline=2)),
    ],
    ids=str,
)
def test_training_goes_on_sharded_otherwise(saved: Way, way: Way, tmp_path: Path) -> None:
    same(CASE, way, by=functools.partial(save_and_resume, saved=saved, folder=tmp_path))
