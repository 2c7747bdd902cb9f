from __future__ import annotations

import pytest

from smpkit.config.documents import parse_json
from smpkit.config.explain import LocatedProblem
from smpkit.errors import ConfigError


def failure(text: str) -> LocatedProblem:
    with pytest.raises(ConfigError) as caught:
        parse_json(text, "job.json")
    (problem,) = caught.value.problems
    assert isinstance(problem, LocatedProblem)
    return problem


JSON = '{\n  "a": {"b": [1,\n    {"c\\"": "}"}]},\n  "d": -1.5e3\n}'


def test_json_positions_are_those_of_the_keys() -> None:
    document = parse_json(JSON, "x")
    assert document.value == {"a": {"b": [1, {'c"': "}"}]}, "d": -1500.0}
    assert document.positions[("a", "b")] == (2, 9)
    assert document.positions[("a", "b", 0)] == (2, 15)
    assert document.positions[("a", "b", 1, 'c"')] == (3, 6)
    assert document.positions[("d",)] == (4, 3)


def test_a_key_written_twice_is_a_problem_that_names_both_lines() -> None:
    document = parse_json('{"a": 1,\n"b": 2,\n"a": 3}', "f")
    (problem,) = document.problems
    assert (problem.line, problem.message) == (3, "is written twice, first on line 1")
    assert document.value == {"a": 3, "b": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": four}', "job.json:1:7: is not JSON: expecting value"),
        ('{"a": 1,}', "is not JSON"),
        ('{"a": NaN}', "is not JSON: `NaN` is not a number that JSON knows"),
        ('{"a": ' + "9" * 5000 + "}", "is not JSON"),
        ('{"a": "\\ud800"}', "has text with half a character"),
        ("[" * 100_000, "is nested more than 64 levels deep"),
        ("[" * 100 + "]" * 100, "is nested more than 64 levels deep"),
        ("a: 1", "is not JSON"),
        ("", "is not JSON"),
    ],
    ids=["word", "comma", "nan", "huge int", "surrogate", "deep open", "deep", "yaml", "empty"],
)
def test_json_that_cannot_be_read_says_where_and_why(text: str, message: str) -> None:
    assert message in str(failure(text))
