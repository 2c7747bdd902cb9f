"""Training with tensor parallelism gives the losses, gradients and weights of plain PyTorch in one process.

By default every pair of values of two axes meets in one of the combinations; all of them run under `slow`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.pairwise import pairwise
from tests.ranks import run_ranks
from tests.transparency.models import Trace, assert_same
from tests.transparency.tensor_parallel_models import train, train_plainly

TOLERANCE = 1e-10  # float64; sums of samples and of input channels in another order, magnified by AdamW

MODES: dict[str, dict[str, Any]] = {
    "speed": {"optimize": "speed"},
    "memory": {"optimize": "memory"},
    "prescaled": {"prescaled_batch": True},
    "prescaled memory": {"prescaled_batch": True, "optimize": "memory"},
}


@dataclass(frozen=True)
class Row:
    """One combination; what is left of the world are replicas."""

    case: str
    pp: int
    tp: int
    mode: str
    sharded: bool = False

    @property
    def config(self) -> dict[str, Any]:
        return {
            "pipeline_parallel_degree": self.pp,
            "tensor_parallel_degree": self.tp,
            "shard_optimizer_state": self.sharded,
            "microbatches": 2,
            **MODES[self.mode],
        }


def train_rows(rows: Sequence[Row]) -> list[Trace]:
    return [train(row.case, row.config) for row in rows]


def check(size: int, rows: Sequence[Row]) -> None:
    plain = {name: train_plainly(name) for name in {row.case for row in rows}}
    traces = run_ranks(train_rows, size, rows, timeout=60 + 15 * len(rows))
    for row, *ranks in zip(rows, *traces, strict=True):
        reference = plain[row.case]
        seen: set[str] = set()
        for trace in ranks:
            seen |= set(trace.gradients)
            gradients = {name: reference.gradients[name] for name in trace.gradients}
            assert trace.weights.keys() == reference.weights.keys(), row
            assert_same(trace, Trace(reference.losses, gradients, reference.weights), TOLERANCE)
        assert row.sharded or seen == set(reference.gradients), row


CASES = ["marked", "language model", "delayed"]
LAYOUTS = [(1, 2), (1, 4), (2, 2)]
FOUR = [Row(case, *layout, *rest) for case, layout, *rest in pairwise([CASES, LAYOUTS, list(MODES), [False, True]])]


def test_pairs_of_what_four_ranks_can_do() -> None:
    check(4, FOUR)


def test_eight_ranks_of_all_three_kinds() -> None:
    check(8, [Row("language model", 2, 2, "memory")])


SCHEDULES: list[dict[str, Any]] = [
    {"pipeline": "zero_bubble", "optimize": "memory"},
    {"virtual_pipeline_degree": 2, "prescaled_batch": True},
]


def train_schedules() -> list[Trace]:
    degrees = {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "microbatches": 4}
    return [train("language model", {**degrees, **schedule}) for schedule in SCHEDULES]


def test_other_schedules_of_a_pipeline_equal_plain_pytorch() -> None:
    """Split backwards and virtual stages, whose exchanges between tensor-parallel ranks come in another order."""
    plain = train_plainly("language model")
    for traces in run_ranks(train_schedules, 4, timeout=120):
        for trace in traces:
            gradients = {name: plain.gradients[name] for name in trace.gradients}
            assert_same(trace, Trace(plain.losses, gradients, plain.weights), TOLERANCE)


def train_plain_style() -> list[Trace]:
    return [train("marked", {"tensor_parallel_degree": 2, **mode}, stepwise=False) for mode in MODES.values()]


def test_trap_20_training_without_a_step_function_equals_plain_pytorch() -> None:
    plain = train_plainly("marked")
    for traces in run_ranks(train_plain_style, 2):
        for trace in traces:
            assert_same(trace, plain, TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["", "sharded state"])
@pytest.mark.parametrize("rdp", [1, 2], ids=["", "rdp2"])
@pytest.mark.parametrize("pp", [1, 2], ids=["pp1", "pp2"])
@pytest.mark.parametrize("tp", [1, 2, 4], ids=["tp1", "tp2", "tp4"])
def test_the_whole_grid(pp: int, tp: int, rdp: int, sharded: bool) -> None:
    rows = [Row(case, pp, tp, mode, sharded) for case, mode in itertools.product(CASES, MODES)]
    if pp * tp * rdp <= 8:
        check(pp * tp * rdp, rows)
