from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from smpkit.config.documents import Document, parse_json, parse_yaml, read_document
from smpkit.config.locate import LocatedProblem
from smpkit.errors import ConfigError


def failure(text: str | bytes, tmp_path: Path, name: str = "job.yaml") -> LocatedProblem:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        read_document(path, name)
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


JSON = '{\n  "a": {"b": [1,\n    {"c\\"": "}"}]},\n  "d": -1.5e3\n}'


def test_json_positions_are_those_of_the_keys() -> None:
    document = parse_json(JSON, "x")
    assert document.value == {"a": {"b": [1, {'c"': "}"}]}, "d": -1500.0}
    assert document.positions[("a", "b")] == (2, 9)
    assert document.positions[("a", "b", 0)] == (2, 15)
    assert document.positions[("a", "b", 1, 'c"')] == (3, 6)
    assert document.positions[("d",)] == (4, 3)


def test_a_missing_path_is_at_the_closest_value_around_it() -> None:
    document = parse_yaml(YAML, "x")
    assert document.position(("merged", "three", 4)) == (7, 1)
    assert document.position(("nothing",)) == (1, 1)
    assert Document("--set a", "1", 1, {}).position(("a",)) is None


@pytest.mark.parametrize(
    ("parse", "text"),
    [(parse_yaml, "a: 1\nb: 2\na: 3"), (parse_json, '{"a": 1,\n"b": 2,\n"a": 3}')],
    ids=["yaml", "json"],
)
def test_a_key_written_twice_is_a_problem_that_names_both_lines(parse: Any, text: str) -> None:
    document = parse(text, "f")
    (problem,) = document.problems
    assert problem.line == 3
    assert problem.message == "is written twice, first on line 1"
    assert document.value == {"a": 3, "b": 2}


LAUGHS = "a: &a [1]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdef", "bcdefg", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1, 2", "job.yaml:1:9: is not YAML: while parsing a flow sequence expected ',' or ']'"),
        ("a:\n\tb: 1", "job.yaml:2:1: is not YAML: a tab where only spaces may stand"),
        ("a: 1\n---\nb: 2", "job.yaml:2:1: is not YAML: expected a single document"),
        ("a: *nowhere", "job.yaml:1:4: is not YAML: found undefined alias"),
        ("a: &x [*x]", "job.yaml:1: has an alias that refers to the value it stands in"),
        ("a: !!python/object:os.system x", "job.yaml:1: has a value of an unknown kind"),
        ("a: !!int x", "job.yaml:1: has a value that is no int: `x`"),
        ("a: !!bool x", "job.yaml:1: has a value that is no bool: `x`"),
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
def test_yaml_that_cannot_be_read_says_where_and_why(text: str, message: str, tmp_path: Path) -> None:
    assert message in str(failure(text, tmp_path))


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
def test_json_that_cannot_be_read_says_where_and_why(text: str, message: str, tmp_path: Path) -> None:
    assert message in str(failure(text, tmp_path, "job.json"))


def test_tabs_get_the_hint_to_use_spaces(tmp_path: Path) -> None:
    assert failure("a:\n\tb: 1", tmp_path).hint == "indent with spaces"


def test_bytes_that_are_not_utf_8_are_named_with_their_line(tmp_path: Path) -> None:
    problem = failure(b"a: 1\nb: \xff", tmp_path)
    assert problem.message == "is not UTF-8 text: byte 0xff on line 2"


def test_files_that_cannot_be_read_say_why(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "no.yaml", "no such file"), (tmp_path, "is a directory")):
        with pytest.raises(ConfigError, match=reason):
            read_document(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_document(Path("a\0b"))


def test_huge_files_are_refused_without_reading_them(tmp_path: Path) -> None:
    assert "too large" in failure(b"#" * (1 << 20) + b"##", tmp_path).message


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_bytes(b"\xef\xbb\xbfa: 1")
    assert read_document(tmp_path / "job.yaml").value == {"a": 1}
