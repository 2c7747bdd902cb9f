from __future__ import annotations

import pytest

from smpkit.config.document import Document, Position, check_text, literal, refuse
from smpkit.config.locate import LocatedProblem
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
