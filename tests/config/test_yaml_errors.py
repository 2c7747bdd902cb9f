"""What is said of text that is no YAML: the line to mend, not the one where the parser gave up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smpkit.config.documents import parse_yaml
from smpkit.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (
            "a:\n  b: 1\n c: 2\n",
            "3:2: is not YAML: line 3 is indented like no line above it",
            "indent line 3 by 2 spaces like line 2, or not at all, like line 1",
        ),
        (
            "d:\n  e:\n      f: 1\n    # of f\n\n    g: 2\n",
            "6:5: is not YAML: line 6 is indented like no line above it",
            "indent line 6 by 6 spaces like line 3, or by 2 spaces like line 2",
        ),
        (
            "a:\n  b: 1\n   c: 2\n",
            "3:4: is not YAML: line 3 is indented further than line 2, which has a value already",
            "indent line 3 by 2 spaces like line 2",
        ),
        (
            "a: 1\nb\nc: 2\n",
            "2:1: is not YAML: line 2 is neither `name: value` nor an item of a list",
            "put a `:` after the name",
        ),
        (
            "a train.py\nb: x\n",
            "1:1: is not YAML: line 1 is neither `name: value` nor an item of a list",
            "put a `:` after the name",
        ),
        ("a: b: c\n", "1:5: is not YAML: a second `:` in a value", "put the value in quotes"),
        ("a: @x\n", "1:4: is not YAML: a value cannot start with `@`", "put the value in quotes"),
        ("a: {b: 1\nc: 2\n", "1:4: is not YAML: the `{` here is not closed by `}`, or a `,` is missing after it", None),
        ('a: 1\nb: "x\nc: 2\n', "2:4: is not YAML: the quotation mark here is never closed", None),
        ("a:\n\tb: 1\n", "2:1: is not YAML: a tab used for indentation", "indent with spaces"),
    ],
)
def test_the_line_to_mend_is_named(text: str, message: str, hint: str | None) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_yaml(text, "job.yaml")
    (problem,) = raised.value.problems
    assert str(problem).splitlines()[0] == f"job.yaml:{message}"
    assert problem.hint == hint


@given(st.text(alphabet="ab:- \n[]{}'\"#@*&|\t", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse_yaml(text, "job.yaml")
    except ConfigError as error:
        said = error.problems[0].message
    else:
        said = ""
    assert "\n" not in said
