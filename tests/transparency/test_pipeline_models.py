"""Models of every shape train unmodified over pipelines, to the losses, gradients and weights of one process.

The grid is models x ranks x microbatches x schedule x replicas x placement. By default enough of its cells run that
every pair of values meets; `-m slow` runs all of them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass

import pytest

from tests.models import CASES, HUGGING_FACE, Case
from tests.ranks import run_ranks
from tests.torch.pipeline.training import Setup, build, run_all

MODELS = {**CASES, **HUGGING_FACE}
DEGREES, MICROBATCHES, PIPELINES, REPLICAS = (1, 2, 4), (1, 4, 8), ("interleaved", "simple"), (1, 2)
SEEDS = {1: (None,), 2: (None, -1, 11), 4: (None, -1, 12)}
STEADY, CHANGING = (8,) * 5, (8, 16, 8, 24, 16)
MEETING = [(degree, replicas) for degree in DEGREES for replicas in REPLICAS]


@dataclass(frozen=True)
class Cell:
    """One training run of the grid."""

    model: str
    degree: int
    microbatches: int
    pipeline: str
    replicas: int
    seed: int | None
    batches: tuple[int, ...]

    @property
    def setup(self) -> Setup:
        return Setup(self.microbatches, self.pipeline, self.seed, self.batches, {"timeout_seconds": 60}, self.replicas)


def selection() -> list[Cell]:
    """Return three cells for each model, one on each number of ranks, so that every pair of values meets."""
    cells = []
    for index, (model, turn) in enumerate((model, turn) for model in MODELS for turn in range(3)):
        row, degree = index // 3, DEGREES[turn]
        seeds = SEEDS[degree]
        cells.append(
            Cell(
                model,
                degree,
                MICROBATCHES[(turn + row) % 3],
                PIPELINES[(turn + row // 3) % 2],
                REPLICAS[(turn + row // 6) % 2],
                seeds[(turn + row // 2) % len(seeds)],
                STEADY if (turn + row) % 2 else CHANGING,
            )
        )
    return cells


def grid(degree: int, replicas: int) -> list[Cell]:
    """Return all cells on so many ranks, with smpkit's placement and a drawn one, where batches change too."""
    product = itertools.product(MODELS, MICROBATCHES, {SEEDS[degree][0], SEEDS[degree][-1]}, PIPELINES)
    return [
        Cell(model, degree, microbatches, pipeline, replicas, seed, STEADY if seed is None else CHANGING)
        for model, microbatches, seed, pipeline in product
    ]


def train_cells(cells: list[Cell]) -> list[set[str]]:
    return [run_all({cell.model: MODELS[cell.model]}, [cell.setup], cell.degree)[cell.model][0] for cell in cells]


def check(cells: list[Cell], timeout: float) -> None:
    """Train the cells, all on the same ranks, and see that the ranks of a pipeline hold the whole model together."""
    degree, replicas = cells[0].degree, cells[0].replicas
    ranks = run_ranks(train_cells, degree * replicas, cells, timeout=timeout)
    for index, cell in enumerate(cells):
        if cell.model in HUGGING_FACE:
            continue  # building them means importing transformers here
        everything = {name for name, _ in build(MODELS[cell.model]).named_parameters()}
        assert set().union(*(held[index] for held in ranks[:degree])) == everything, cell


def test_every_pair_of_values_meets_in_the_selection() -> None:
    met = defaultdict(set)
    for cell in selection():
        values = (cell.model, cell.degree, cell.microbatches, cell.pipeline, cell.replicas, cell.batches)
        for (left, right), pair in zip(
            itertools.combinations(range(len(values)), 2), itertools.combinations(values, 2), strict=True
        ):
            met[left, right].add(pair)
    levels = [len(MODELS), 3, 3, 2, 2, 2]
    for (left, right), pairs in met.items():
        assert len(pairs) == levels[left] * levels[right], (left, right)
    assert {(cell.degree, cell.seed) for cell in selection()} == {(d, seed) for d in DEGREES for seed in SEEDS[d]}


@pytest.mark.parametrize(
    ("degree", "replicas"),
    [pytest.param(d, r, id=f"pp{d} dp{r}", marks=[pytest.mark.slow] if d * r > 4 else []) for d, r in MEETING],
)
def test_a_model_trains_as_in_one_process(degree: int, replicas: int) -> None:
    check([cell for cell in selection() if (cell.degree, cell.replicas) == (degree, replicas)], timeout=170)


def test_outputs_of_two_homes_with_the_same_shapes_are_not_swapped() -> None:
    # Two scalar losses on two ranks went to a third under one tag, and arrived in the order of sending.
    check([Cell("several losses", 4, 1, "interleaved", 1, 11, STEADY[:3])], timeout=60)


@pytest.mark.parametrize(("degree", "replicas"), [(4, 1), (3, 2)], ids=["pp4 dp1", "pp3 dp2"])
def test_ranks_share_weights_with_one_neighbour_or_with_two(degree: int, replicas: int) -> None:
    # Ranks have made unlike many process groups by then, of which torch makes the name of the next: they never met.
    check([Cell("tied neighbours", degree, 4, "interleaved", replicas, -1, STEADY[:3])], timeout=90)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("degree", "replicas"), MEETING, ids=[f"pp{d} dp{r}" for d, r in MEETING])
def test_every_model_trains_in_every_setup(degree: int, replicas: int) -> None:
    check(grid(degree, replicas), timeout=3500)


def train_in_three(setups: list[Setup], cases: dict[str, Case]) -> int:
    return len(run_all(cases, setups, 3))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_model_trains_on_three_ranks() -> None:
    setups = [Setup(2, pipeline, seed) for pipeline in PIPELINES for seed in (None, -1, 13)]
    assert run_ranks(train_in_three, 3, setups, MODELS, timeout=1700) == [len(MODELS)] * 3
