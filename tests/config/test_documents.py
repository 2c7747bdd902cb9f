from __future__ import annotations

import math
from pathlib import Path

import pytest

from smpkit.config.documents import as_yaml, excerpt, parse, read_document
from smpkit.errors import ConfigError, Problem


def failure(text: str, *, is_json: bool = False) -> Problem:
    with pytest.raises(ConfigError) as caught:
        parse(text, "job", is_json=is_json)
    (problem,) = caught.value.problems
    return problem


# ---- YAML ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("1e-3", 1e-3), ("5e8", 5e8), (".5", 0.5), ("-.inf", -math.inf), ("010", 10), ("0o10", 8), ("0x1F", 31)),
        *(("+12", 12), ("1_000", 1000), ("1:30", "1:30"), ("yes", "yes"), ("no", "no"), ("off", "off")),
        *(("True", True), ("~", None), ("", None), ("2024-01-01", "2024-01-01"), ("'4'", "4"), ("=", "=")),
        *(("!!str 4", "4"), ("!!int '4'", 4), ("&x 1\nb: &x 2", 1)),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    read = parse(f"a: {text}", "x").value["a"]
    assert (type(read), read) == (type(value), value)


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


def test_positions_are_those_of_the_keys() -> None:
    document = parse(YAML, "x")
    assert document.value["merged"] == {"one": 1, "two": 22}
    assert document.positions["base", "two"] == (3, 3)
    assert document.positions["list", 1, "b"] == (6, 3)
    assert document.positions["merged", "two"] == (9, 3)
    assert document.positions["merged", "one"] == (2, 3)


def test_a_problem_is_located_at_the_closest_value() -> None:
    document = parse(YAML, "job.yaml")
    located = document.located(Problem(("x", "list", 1, "c"), "is missing"), below=("x",))
    assert (located.place, located.excerpt) == ("job.yaml:6", "    6 | - b: 3")
    nowhere = document.located(Problem(("no",), "x"))
    assert (nowhere.place, nowhere.excerpt) == ("job.yaml:1", "")
    marked = document.marked(located)
    assert (marked.place, marked.excerpt) == ("job.yaml:6:3", "    6 | - b: 3\n      |   ^")


LAUGHS = "a: &a [1]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdef", "bcdefg", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("a: [1, 2", "job:1:4: is not YAML: the `[` here is not closed by `]`, or a `,` is missing after it", None),
        ("a: {b: 1\nc: 2\n", "job:1:4: is not YAML: the `{` here is not closed by `}`", None),
        ('a: 1\nb: "x\nc: 2\n', "job:2:4: is not YAML: the quotation mark here is never closed", None),
        ("a:\n\tb: 1", "job:2:1: is not YAML: a tab used for indentation", "indent with spaces"),
        ("a: 1\n---\nb: 2", "job:2:1: is not YAML: a second document begins here", "keep one of them"),
        ("a: *pass", "job:1:4: is not YAML: undefined alias: `*` refers to", "put it in quotes"),
        ("a: b: c\n", "job:1:5: is not YAML: a `:` is not allowed here", "put the value in quotes"),
        ("a:\n  b: 1\n c: 2\n", "job:3:2: is not YAML: this line does not belong to the block", "indent"),
        ("a: 1\nb\nc: 2\n", "job:2:1: is not YAML: this line is neither", "put a `:` after the name"),
        ("a: @x\n", "job:1:4: is not YAML: a value cannot start with `@`", "put the value in quotes"),
        ("a: &x [*x]", "job:1: has an alias that refers to the value it stands in", None),
        ("a: !ENV x", "job:1: has a value of an unknown kind", "put it in quotes"),
        ("a: !!python/object/apply:os.system [x]", "job:1: has a value of an unknown kind", "put it in quotes"),
        ("a: !!int x", "job:1: has a value that is no int", None),
        ("a: !!bool x", "job:1: has a value that is no bool", None),
        ("a: " + "9" * 5000, "job:1: has a value that is no int", None),
        ("1: x", "job:1: has a name that is not text: 1", "put it in quotes"),
        ("a: {{ b }}", "job:1: has a mapping or list as a name", "put it in quotes"),
        ("a:\n  <<: 3", "job:2: has a `<<` that merges something else", None),
        ("a: \x00", "job:1: has a character that text must not have", None),
        ("[" * 2000, "job: is nested more than 64 levels deep", None),
        ("[" * 100 + "]" * 100, "is nested more than 64 levels deep", None),
        (LAUGHS, "has more than 100,000 values once its aliases are expanded", None),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else None,
)
def test_yaml_that_cannot_be_read_says_where_and_why(text: str, message: str, hint: str | None) -> None:
    problem = failure(text)
    assert message in str(problem)
    assert hint is None or (problem.hint or "").startswith(hint)
    assert "pass" not in str(problem).replace("undefined alias", "").splitlines()[0]


def test_a_key_written_twice_is_a_problem_that_names_both_lines() -> None:
    for text, is_json in (("a: 1\nb: 2\na: 3", False), ('{"a": 1,\n"b": 2,\n"a": 3}', True)):
        document = parse(text, "f", is_json=is_json)
        (problem,) = document.problems
        assert (problem.line, problem.message) == (3, "is written twice, first on line 1")
        assert document.value == {"a": 3, "b": 2}


def test_what_is_written_reads_the_same_also_as_yaml_1_1() -> None:
    yaml = pytest.importorskip("yaml")
    value = {"z": ["no", "On", "1:30", "2024-01-01", "0x1", "a: b\nc", None, 1e-3, {"y": "~"}], "a": "ü"}
    assert yaml.safe_load(as_yaml(value)) == parse(as_yaml(value), "x").value == value
    assert list(parse(as_yaml(value), "x").value) == ["z", "a"]


# ---- JSON ------------------------------------------------------------------------------------------------------------


def test_json_has_the_lines_of_its_keys() -> None:
    document = parse('{\n\t"a": {"b": [1,\n    {"c\\"": "}\\ud83d\\ude00"}]},\n  "d": -1.5e3\n}', "x", is_json=True)
    assert document.value == {"a": {"b": [1, {'c"': "}\U0001f600"}]}, "d": -1500.0}
    assert document.positions["a", "b"] == (2, 8)
    assert document.positions["a", "b", 0] == (2, 14)
    assert document.positions["a", "b", 1, 'c"'] == (3, 6)
    assert document.positions["d",] == (4, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": four}', "job:1:7: is not JSON: expecting value"),
        ('{"a": 1,}', "is not JSON"),
        ('{"a": NaN}', "is not JSON: `NaN` is not a number that JSON knows"),
        ('{"a": ' + "9" * 5000 + "}", "is not JSON"),
        ("[" * 100_000, "is nested more than 64 levels deep"),
        ("[" * 100 + "]" * 100, "is nested more than 64 levels deep"),
        ("a: 1", "is not JSON"),
        ("", "is not JSON"),
    ],
    ids=["word", "comma", "nan", "huge int", "deep open", "deep", "yaml", "empty"],
)
def test_json_that_cannot_be_read_says_where_and_why(text: str, message: str) -> None:
    assert message in str(failure(text, is_json=True))


# ---- files and excerpts ----------------------------------------------------------------------------------------------


def refused(data: bytes, tmp_path: Path, name: str = "job.yaml") -> str:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        read_document(tmp_path / name)
    return caught.value.problems[0].message


def test_the_name_decides_between_json_and_yaml(tmp_path: Path) -> None:
    (tmp_path / "a.JSON").write_text('{"a": 1e3}')
    (tmp_path / "a.yml").write_bytes(b"\xef\xbb\xbfa: no")
    assert read_document(tmp_path / "a.JSON").value == {"a": 1000.0}
    assert read_document(tmp_path / "a.yml").value == {"a": "no"}
    assert "is not JSON" in refused(b"a: 1", tmp_path, "a.json")


def test_files_that_cannot_be_read_say_why(tmp_path: Path) -> None:
    assert refused(b"a: 1\nb: \xff", tmp_path) == "is not UTF-8 text: byte 0xff on line 2"
    assert "too large" in refused(b"#" * (1 << 20) + b"##", tmp_path)
    for path, reason in ((tmp_path / "no.yaml", "no such file"), (tmp_path, "is a directory"), (Path("a\0b"), "null")):
        with pytest.raises(ConfigError, match=f"cannot be read: .*{reason}"):
            read_document(path)


def test_long_lines_are_cut_around_the_column() -> None:
    line, mark = excerpt("a" * 500 + "!" + "b" * 500, 1, 501).split("\n")
    assert len(line) < 120
    assert line[mark.index("^")] == "!"


def test_control_characters_are_escaped_and_the_mark_stays_below() -> None:
    line, mark = excerpt("\x1b[31mx", 1, 6).split("\n")
    assert "\x1b" not in line
    assert line[mark.index("^")] == "x"


def test_lines_that_are_not_there_show_nothing() -> None:
    assert excerpt("a", 7) == excerpt("a\n\n", 2) == excerpt("", 1) == ""
