"""The example of all kinds of parallelism at once: it learns, and every rank holds its part only."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.example_job import EXAMPLES, launched, on_forked_ranks

JOB = EXAMPLES / "gpt2_3d" / "job.yaml"
SMALL = {"steps": 6, "layers": 2, "width": 32, "context": 32, "learning-rate": 0.01}


def num_weights(width: int, layers: int, context: int) -> int:
    """Count GPT-2's: embeddings of bytes and positions, blocks with biases and two norms, the last norm."""
    block = 12 * width * width + 9 * width + 4 * width
    return (256 + context) * width + layers * block + 2 * width


@pytest.mark.slow
@pytest.mark.parametrize("run", [on_forked_ranks, launched])
def test_the_example_learns_on_eight_ranks_that_hold_their_parts(
    run: Callable[[Path, Mapping[str, Any]], str],
) -> None:
    output = run(JOB, SMALL)
    first, last = map(float, re.search(r"loss ([\d.]+) -> ([\d.]+) in 6 steps", output).groups())  # type: ignore[union-attr]
    assert abs(first - 5.55) < 0.3  # ln 256: it knows nothing
    assert last < first - 0.3
    rows = re.findall(r"^ *\d +([01] [01] [01]) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)", output, re.MULTILINE)
    assert sorted(row[0] for row in rows) == [f"{pp} {tp} {rdp}" for pp in (0, 1) for tp in (0, 1) for rdp in (0, 1)]
    whole = num_weights(32, 2, 32) * 4 / 1024
    for _, weights, gradients, optimizer, offloaded in rows:
        assert float(weights) < 0.45 * whole, "a quarter, and what is on several ranks: the tied embedding, norms"
        assert weights == gradients
        assert float(optimizer) >= 1.99 * float(weights)
        assert float(offloaded) > 0
