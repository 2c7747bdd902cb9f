"""What is wider than the terminal is folded between its parts."""

from __future__ import annotations

import re

import pytest

from smpkit.cli._console import fold, table
from tests.cli.conftest import Smpkit


def test_lists_are_folded_between_their_parts_and_after_commas() -> None:
    assert list(fold("dp groups ", ["0,10", "2,12", "100,200"], 22)) == ["dp groups 0,10  2,12", "          100,200"]
    assert list(fold("dp ", ["100,200,300", "4"], 12)) == ["dp 100,200,", "   300  4"]
    assert list(fold("unit ", ["transformer.h.4"], 10)) == ["unit transformer.h.4"]  # no place to break it
    assert list(fold("none ", [], 10)) == ["none"]


def test_a_wide_table_becomes_two() -> None:
    rows = [["GiB", "parameters", "gradients"], ["stage 0", "1.0", "2.0"]]
    assert list(table(rows, 80)) == ["GiB      parameters  gradients", "stage 0         1.0        2.0"]
    assert list(table(rows, 29)) == ["GiB     parameters gradients", "stage 0        1.0       2.0"]
    assert list(table(rows, 20)) == [
        "GiB      parameters", "stage 0         1.0", "", "GiB      gradients", "stage 0        2.0",
    ]  # fmt: skip


def test_a_column_without_an_entry_is_left_out() -> None:
    rows = [["features", "on the host", "time"], ["sharding", "", "+1%"], ["offloading", "", "+0%"]]
    assert list(table(rows, 80)) == ["features    time", "sharding     +1%", "offloading   +0%"]


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_a_plan_fits_any_terminal_and_loses_nothing(columns: int, smpkit: Smpkit) -> None:
    """Sixteen microbatches were 152 columns wide, and groups of ranks broke inside a number."""
    options = ["--pp", "4", "--tp", "2", "--microbatches", "16", "--ranks", "64", "--hosts", "8"]
    lines = smpkit("plan", *options, env={"COLUMNS": str(columns)}).stdout.splitlines()
    drawn = [line for line in lines if re.match(r"( *(pp|tp|rdp) \d|hosts|.. groups|  +\d|stage|live)", line)]
    assert max(map(len, drawn)) <= columns
    stage = " ".join(line[len("stage 0") :] for line in lines if line.startswith("stage 0")).split()
    assert [cell for cell in stage if cell[0] == "F"] == [f"F{microbatch}" for microbatch in range(16)]
    assert [cell for cell in stage if cell[0] == "B"] == [f"B{microbatch}" for microbatch in range(16)]
    text = " ".join(lines)
    groups = text[text.index("dp groups") : text.index("tp groups")].removeprefix("dp groups")
    assert sorted(map(int, re.findall(r"\d+", groups))) == list(range(64))
