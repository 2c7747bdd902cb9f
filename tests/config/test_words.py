from __future__ import annotations

import math

import pytest

from smpkit.config.words import closest, printable, quoted, suggestion


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((None, "null"), (True, "true"), (4, "4"), (0.5, "0.5"), (math.inf, "inf"), ("a", "`a`")),
        *(("x" * 80, "`" + "x" * 57 + "...`"), ({}, "a mapping"), ([1], "a list")),
        *((10**5000, "a huge number"), (object(), "an object of type object")),
    ],
    ids=["null", "bool", "int", "float", "infinity", "text", "long text", "mapping", "list", "huge", "object"],
)
def test_values_are_shown_as_they_are_written(value: object, text: str) -> None:
    assert quoted(value) == text


def test_terminals_do_not_obey_what_is_shown() -> None:
    assert printable("red: \x1b[31m\nnext \ud800 ü") == "red: \\x1b[31m\\nnext \\ud800 ü"


def test_the_closest_name_is_found_whatever_its_case() -> None:
    assert closest("Microbatchs", ["microbatches", "pipeline"]) == "microbatches"
    assert suggestion("ptd", ["PTD", "TPD"]) == "did you mean `PTD`?"
    assert closest("rnu", ["run", "runs", "tune"]) == "run"
    assert closest("sharding", ["herring", "skip_tracing"]) is None
    assert suggestion("zebra", ["microbatches"]) is None
