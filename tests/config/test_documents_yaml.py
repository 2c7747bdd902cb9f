from __future__ import annotations

import math

import pytest

from smpkit.config.documents import parse_value, parse_yaml
from smpkit.config.explain import LocatedProblem
from smpkit.errors import ConfigError


def failure(text: str) -> LocatedProblem:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "job.yaml")
    (problem,) = caught.value.problems
    assert isinstance(problem, LocatedProblem)
    return problem


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("5e8", 5e8),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("010", 10),
        ("0o10", 8),
        ("0x1F", 31),
        ("+12", 12),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("off", "off"),
        ("True", True),
        ("~", None),
        ("", None),
        ("2024-01-01", "2024-01-01"),
        ("'4'", "4"),
        ("!!str 4", "4"),
        ("!!int '4'", 4),
        ("=", "="),
    ],
)
def test_scalars_follow_the_core_schema_of_yaml_1_2(text: str, value: object) -> None:
    read = parse_yaml(f"a: {text}", "x").value["a"]
    assert (type(read), read) == (type(value), value)


def test_nan_is_read_as_a_number() -> None:
    assert math.isnan(parse_yaml("a: .NaN", "x").value["a"])


YAML = """\
base: &base
  one: 1
  two: 2
list:
- a
- b: 3
merged:
  <<: *base
  two: 22
"""


def test_yaml_positions_are_those_of_the_keys() -> None:
    document = parse_yaml(YAML, "x")
    assert document.value["merged"] == {"one": 1, "two": 22}
    assert document.positions[("base", "two")] == (3, 3)
    assert document.positions[("list", 1, "b")] == (6, 3)
    assert document.positions[("merged", "two")] == (9, 3)
    assert document.positions[("merged", "one")] == (2, 3)


def test_a_key_written_twice_is_a_problem_that_names_both_lines() -> None:
    document = parse_yaml("a: 1\nb: 2\na: 3", "f")
    (problem,) = document.problems
    assert (problem.line, problem.message) == (3, "is written twice, first on line 1")
    assert document.value == {"a": 3, "b": 2}


LAUGHS = "a: &a [1]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdef", "bcdefg", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1, 2", "job.yaml:1:4: is not YAML: the `[` here is not closed by `]`, or a `,` is missing after it"),
        ("a:\n\tb: 1", "job.yaml:2:1: is not YAML: a tab used for indentation"),
        ("a: 1\n---\nb: 2", "job.yaml:2:1: is not YAML: expected a single document"),
        ("a: *nowhere", "job.yaml:1:4: is not YAML: undefined alias"),
        ("a: &x [*x]", "job.yaml:1: has an alias that refers to the value it stands in"),
        ("a: !!python/object:os.system x", "job.yaml:1: has a value of an unknown kind"),
        ("a: !!int x", "job.yaml:1: has a value that is no int"),
        ("a: !!bool x", "job.yaml:1: has a value that is no bool"),
        ("a: " + "9" * 5000, "job.yaml:1: has a value that is no int"),
        ("1: x", "job.yaml:1: has a name that is not text: 1"),
        ("[a]: x", "job.yaml:1: has a mapping or list as a name"),
        ("a:\n  <<: 3", "job.yaml:2: has a `<<` that merges something else"),
        ('a: "\\ud800"', "job.yaml: has text with half a character"),
        ("a: \x00", "job.yaml:1: has a character that text must not have"),
        ("[" * 2000, "job.yaml: is nested more than 64 levels deep"),
        ("[" * 100 + "]" * 100, "is nested more than 64 levels deep"),
        (LAUGHS, "has more than 100,000 values once its aliases are expanded"),
    ],
    ids=[
        *("unclosed", "tab", "two documents", "undefined alias", "self alias", "python tag", "bad int", "bad bool"),
        *("huge int", "number name", "list name", "bad merge", "surrogate", "null", "deep open", "deep", "laughs"),
    ],
)
def test_yaml_that_cannot_be_read_says_where_and_why(text: str, message: str) -> None:
    assert message in str(failure(text))


def test_tabs_get_the_hint_to_use_spaces() -> None:
    assert failure("a:\n\tb: 1").hint == "indent with spaces"


def test_a_value_of_the_command_line_has_no_lines() -> None:
    document = parse_value("{a: [1]}", "--set x")
    assert (document.value, document.position(("a",))) == ({"a": [1]}, None)
