from __future__ import annotations

import json
from typing import Any

import pytest

from smpkit.errors import ConfigError
from smpkit.plan.partition.assignment import Assignment, UnitCost, assignment_of

UNITS = [
    UnitCost("embed", 100, 5, 1.0, shared={"weight": 60}),
    UnitCost("block", 40, 5, 6.0),
    UnitCost("head", 60, 5, 1.0, shared={"weight": 60}),
]
TOGETHER = assignment_of(UNITS, {0: 0, 1: 1, 2: 0}, 2)


def test_imbalance_is_worst_over_mean() -> None:
    assert TOGETHER.compute_imbalance == 6 / 4
    assert assignment_of([UnitCost("free")], {0: 0}, 2).compute_imbalance == 1


def test_the_log_has_smp_v1s_heading_and_a_line_per_module() -> None:
    assert TOGETHER.log_lines() == [
        "Partition assignments:",
        "  embed: 0",
        "  block: 1",
        "  head: 0",
    ]


def test_units_are_found_both_ways() -> None:
    assert TOGETHER.partition_of == {"embed": 0, "block": 1, "head": 0}
    assert TOGETHER.names(0) == ("embed", "head")


def test_json_gives_the_same_assignment_back() -> None:
    assert Assignment.from_json(TOGETHER.to_json()) == TOGETHER


def change(key: str, value: Any) -> str:
    return json.dumps({**json.loads(TOGETHER.to_json()), key: value})


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", change("units", [["a", 2]]), change("units", [["a"]]), change("step_flops", [])],
    ids=["empty", "list", "no keys", "partition", "pair", "too few sums"],
)
def test_text_that_is_no_assignment_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a partition assignment"):
        Assignment.from_json(text)
