from __future__ import annotations

from pathlib import Path

import pytest

from smpkit.config.documents import Document, Position, check_text, literal, read_document, refuse
from smpkit.config.explain import LocatedProblem
from smpkit.errors import ConfigError

POSITIONS = {(): Position(1, 1), ("a",): Position(2, 1), ("a", 0): Position(3, 3)}


def test_a_missing_path_is_at_the_closest_value_around_it() -> None:
    document = Document("job.yaml", "", {}, POSITIONS)
    assert document.position(("a", 0)) == (3, 3)
    assert document.position(("a", 1, "b")) == (2, 1)
    assert document.position(("nothing",)) == (1, 1)
    assert Document("--set a", "1", 1, {}).position(("a",)) is None


def test_a_literal_is_taken_as_it_is() -> None:
    assert literal("1: [", "--set x").value == "1: ["


@pytest.mark.parametrize("value", ["\ud800", ["\udfff"], {"\ud800": 1}, {"a": [{"b": "x\udc80"}]}], ids=ascii)
def test_half_characters_are_refused_wherever_they_are(value: object) -> None:
    with pytest.raises(ConfigError, match="has text with half a character"):
        check_text(value, "x")


def test_what_cannot_be_read_is_one_located_problem() -> None:
    with pytest.raises(ConfigError) as caught:
        refuse("a.yaml", "is wrong", line=2, column=3, text="a\nbcd", hint="mend it")
    (problem,) = caught.value.problems
    assert isinstance(problem, LocatedProblem)
    assert (problem.place, problem.hint) == ("a.yaml:2:3", "mend it")


def failure(data: bytes, tmp_path: Path, name: str = "job.yaml") -> LocatedProblem:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        read_document(path, name)
    (problem,) = caught.value.problems
    assert isinstance(problem, LocatedProblem)
    return problem


def test_the_name_decides_between_json_and_yaml(tmp_path: Path) -> None:
    (tmp_path / "a.JSON").write_text('{"a": 1e3}')
    (tmp_path / "a.yml").write_text("a: no")
    assert read_document(tmp_path / "a.JSON").value == {"a": 1000.0}
    assert read_document(tmp_path / "a.yml").value == {"a": "no"}
    assert "is not JSON" in failure(b"a: 1", tmp_path, "a.json").message


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


@pytest.mark.parametrize(("name", "text"), [("job.yaml", b"a: 1"), ("job.json", b'{"a": 1}')], ids=["yaml", "json"])
def test_a_byte_order_mark_is_passed_over(name: str, text: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text)
    assert read_document(tmp_path / name).value == {"a": 1}
