"""Training with tensor parallelism gives the losses, gradients and weights of plain PyTorch in one process."""

from __future__ import annotations

from typing import Any

from tests.ranks import run_ranks
from tests.transparency.models import Trace, assert_same
from tests.transparency.tensor_parallel_models import build_marked, train, train_plainly

TOLERANCE = 1e-10  # float64; sums of samples and of input channels in another order, magnified by AdamW

Combination = tuple[int, int, bool, str]  # pipeline degree, tensor degree, prescaled_batch, optimize


def config_of(pp: int, tp: int, prescaled: bool, optimize: str) -> dict[str, Any]:
    return {
        "pipeline_parallel_degree": pp,
        "tensor_parallel_degree": tp,
        "prescaled_batch": prescaled,
        "optimize": optimize,
        "microbatches": 2,
    }


def train_all(combinations: list[Combination]) -> list[Trace]:
    return [train(build_marked, config_of(*each)) for each in combinations]


def check(size: int, combinations: list[Combination]) -> None:
    plain = train_plainly(build_marked())
    traces = run_ranks(train_all, size, combinations, timeout=150)
    for _, *ranks in zip(combinations, *traces, strict=True):
        seen: set[str] = set()
        for trace in ranks:
            seen |= set(trace.gradients)
            gradients = {name: plain.gradients[name] for name in trace.gradients}
            assert trace.weights.keys() == plain.weights.keys()
            assert_same(trace, Trace(plain.losses, gradients, plain.weights), TOLERANCE)
        assert seen == set(plain.gradients)


def test_two_ranks() -> None:
    check(2, [(1, 2, False, "speed"), (1, 2, True, "speed")])


def test_four_ranks() -> None:
    check(
        4,
        [
            (1, 4, False, "memory"),
            (1, 4, True, "speed"),
            (1, 2, False, "speed"),
            (1, 2, True, "speed"),
            (2, 2, False, "speed"),
            (2, 2, True, "speed"),
        ],
    )
