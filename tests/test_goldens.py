"""What must not change while code is moved is as recorded; and the comparison finds what is not."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.goldens.items import Part, Recording
from tests.goldens.main import compare
from tests.goldens.parts import CHEAP, PARTS


@pytest.mark.parametrize("name", CHEAP)
def test_nothing_has_changed(name: str) -> None:
    part = PARTS[name]
    status, report = compare(part, Recording.load(part.path.read_text(encoding="utf-8")), part.record())
    said = "\n".join(report)
    assert status == 0, f"{said}\n`scripts/goldens --only {name} --write` records what is meant"


@pytest.mark.parametrize("name", PARTS)
def test_what_is_recorded_is_written_as_it_would_be_written_again(name: str) -> None:
    """Or the next recording changes lines that nobody meant."""
    text = PARTS[name].path.read_text(encoding="utf-8")
    assert Recording.load(text).dump() == text


def report_of(part: Part, before: Any, now: Any) -> tuple[int, str]:
    status, lines = compare(part, Recording({}, before), Recording({}, now))
    return status, "\n".join(lines)


def test_a_text_that_differs_is_shown_line_by_line() -> None:
    recorded = Recording.load(PARTS["errors"].path.read_text(encoding="utf-8")).items
    changed = copy.deepcopy(recorded)
    changed["smpkit plan --pp two"]["stderr"][0] = "error: no"
    del changed["smpkit validate"]
    changed["smpkit more"] = ["new"]
    status, said = report_of(PARTS["errors"], recorded, changed)
    assert status == 1
    lines = said.splitlines()
    assert lines[0] == "errors: `smpkit more` is new"
    assert "errors: `smpkit plan --pp two` changed" in lines
    assert any(line.startswith('    -  "error: invalid value for') for line in lines)
    assert '    +  "error: no",' in lines
    assert lines[-1] == "errors: `smpkit validate` is gone"


def test_counts_may_fall_and_not_rise() -> None:
    part = PARTS["counts"]
    recorded = Recording.load(part.path.read_text(encoding="utf-8")).items
    changed = copy.deepcopy(recorded)
    calls = changed["dp2"]["rank 1"]["step"]
    calls["calls"] -= 3
    status, said = report_of(part, recorded, changed)
    assert (status, said.count("better: counts: `dp2`, rank 1, step, calls: ")) == (0, 1)
    calls["calls"] += 4
    calls["broadcast"] = 1
    status, said = report_of(part, recorded, changed)
    assert status == 1
    assert said.splitlines()[1:] == [
        "    rank 1, step, broadcast: 0 -> 1",
        f"    rank 1, step, calls: {calls['calls'] - 1} -> {calls['calls']}",
    ]


def test_one_bit_of_a_weight_is_told_by_name_between_two_commits() -> None:
    before = {"dp2": {"weights": "aa", "detail": {"head.weight on rank 0": "1", "norm.bias on rank 0": "2"}}}
    now = {"dp2": {"weights": "ab", "detail": {"head.weight on rank 0": "1", "norm.bias on rank 0": "3"}}}
    status, said = report_of(PARTS["hashes"], before, now)
    assert status == 1
    assert '    + "norm.bias on rank 0": "3"' in said.splitlines()
    assert Recording({}, dict(now)).without_detail().items == {"dp2": {"weights": "ab"}}
