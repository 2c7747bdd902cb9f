"""A table that several pages show is the one that its benchmark has written."""

from __future__ import annotations

from benchmarks.memory.main import BEGIN, END, PAGES, TECHNIQUES


def test_the_pages_have_the_same_table_of_memory_techniques() -> None:
    tables = {page.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip() for page in PAGES}
    assert len(tables) == 1, "run python -m benchmarks.memory.main --write"
    rows = [line.split(" | ")[0].removeprefix("| ") for line in tables.pop().splitlines() if line.startswith("| ")]
    assert rows[1:] == [technique.label for technique in TECHNIQUES.values()]
