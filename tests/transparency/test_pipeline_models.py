"""Models of every shape train unmodified over a pipeline, to the losses, gradients and weights of one process."""

from __future__ import annotations

import dataclasses

import pytest

from tests.ranks import run_ranks
from tests.torch.pipeline.training import Setup, build, run_all
from tests.transparency.huggingface_models import CASES as HUGGING_FACE
from tests.transparency.pipeline_models import CASES, Case

AUTOMATIC = Setup(microbatches=4)
FEW = Setup(microbatches=1, pipeline="simple", seed=0)
SCATTERED = Setup(microbatches=4, seed=1)
MANY = Setup(microbatches=8, seed=-1)
SHAPES = Setup(microbatches=2, seed=2, batches=(8, 4, 8, 6))
SETUPS = {2: (AUTOMATIC, FEW, SCATTERED), 4: (MANY, SHAPES)}


def train_all(degree: int, setups: tuple[Setup, ...], cases: dict[str, Case]) -> dict[str, list[set[str]]]:
    return run_all(cases, setups, degree)


def check(degree: int, setups: tuple[Setup, ...], cases: dict[str, Case], timeout: float = 150) -> None:
    """Train everywhere (each rank compares what it holds), and see that together they hold the whole model."""
    ranks = run_ranks(train_all, degree, degree, setups, cases, timeout=timeout)
    for name, held in ((name, held) for rank in ranks for name, held in rank.items()):
        assert len(held) == len(setups), name
    if cases is not HUGGING_FACE:
        for name, case in cases.items():
            everything = {parameter for parameter, _ in build(case).named_parameters()}
            for index in range(len(setups)):
                assert set().union(*(rank[name][index] for rank in ranks)) == everything, name


@pytest.mark.parametrize("degree", [2, 4], ids=["pp2", "pp4"])
def test_a_model_trains_as_in_one_process(degree: int) -> None:
    check(degree, SETUPS[degree], CASES)


def test_a_hugging_face_model_trains_as_in_one_process() -> None:
    check(2, (AUTOMATIC, dataclasses.replace(SCATTERED, batches=(8, 4))), HUGGING_FACE)


def test_outputs_of_two_homes_with_the_same_shapes_are_not_swapped() -> None:
    # Two scalar losses on two ranks went to a third under one tag, and arrived in the order of sending.
    check(4, (Setup(1, "interleaved", 11),), {"several losses": CASES["several losses"]}, timeout=60)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("degree", [2, 3, 4], ids=["pp2", "pp3", "pp4"])
@pytest.mark.parametrize("microbatches", [1, 2, 4, 8])
@pytest.mark.parametrize("pipeline", ["interleaved", "simple"])
def test_every_model_trains_in_every_setup(degree: int, microbatches: int, pipeline: str) -> None:
    setups = tuple(Setup(microbatches, pipeline, seed) for seed in (None, -1, 11, 12, 13))
    check(degree, setups, CASES, timeout=1000)
    check(degree, setups[:4], HUGGING_FACE, timeout=1000)
