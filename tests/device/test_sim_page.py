"""The examples of docs/how-to/check-async-code.md give what that page shows."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from smpkit.testing import RankFailed
from smpkit.testing.simulated_device import POLICIES, RaceFound
from tests.device.on_sim import run_on_sim
from tests.docs.blocks import blocks_of
from tests.simulated import needs_sim

_PAGE = Path(__file__).parents[2] / "docs/how-to/check-async-code.md"


def blocks(language: str) -> list[str]:
    """Return the page's fenced blocks of a language; "" is output."""
    return [block.text for block in blocks_of(_PAGE) if block.language == language]


def prefetchers() -> tuple[str, str, str]:
    """Return the page's first example, and how it is after each of two changes."""
    broken, waits, test, records = blocks("python")[:4]
    second = re.sub(r"    def __iter__.*?yield present\n", lambda _: waits, broken, flags=re.DOTALL) + "\n\n" + test
    line = "            present = self.following\n"
    return broken, second, second.replace(line, line + records)


def run(source: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(source, "test_prefetcher.py", "exec"), names)
    return names


def races() -> list[str]:
    found = []
    for source in prefetchers():
        names = run(source)
        try:
            for name in [each for each in names if each.startswith("test_")]:
                names[name]()
        except RaceFound as error:
            # Below pytest there are no more lines, but here are ours.
            found.append(re.sub(r", called at (?!test_prefetcher)[^,\s]+", "", str(error)))
        else:
            found.append("")
    names = run(prefetchers()[2] + blocks("python")[4])
    for policy in POLICIES:
        names["test_sums"](policy)
    return found


def _unnumbered(text: str) -> str:
    """Return the text without numbers of streams: here all examples run in one process."""
    return re.sub(r"on stream \d+", "on a stream", text)


def test_both_races_are_found_and_mended() -> None:
    ((first, second, mended),) = run_on_sim(races)
    assert [_unnumbered(text) for text in (first, second)] == [_unnumbered(text.rstrip()) for text in blocks("")[:2]]
    assert mended == ""


def times() -> str:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        run(blocks("python")[6])
    return shown.getvalue()


def test_times_are_those_of_the_page() -> None:
    assert run_on_sim(times) == [blocks("")[3]]


def test_the_deadlock_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_sim()
    (tmp_path / "crossed_groups.py").write_text(blocks("python")[5])
    monkeypatch.syspath_prepend(tmp_path)
    page = importlib.import_module("crossed_groups")
    try:
        with pytest.raises(RankFailed) as failed:
            page.test_two_groups()
    finally:
        del sys.modules["crossed_groups"]
    shown = re.compile(r"DistBackendError: sim: all_reduce \(number 1\) of communicator \d failed")
    assert shown.search(str(failed.value))
    assert shown.search(blocks("")[2])
