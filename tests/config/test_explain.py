from __future__ import annotations

from typing import Annotated, Literal

import pytest
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from smpkit.config.explain import LocatedProblem, excerpt, explain, validated, validation_error
from smpkit.errors import ConfigError, Problem


def _odd(value: int) -> int:
    if value % 2 == 0:
        raise ValueError("must be odd")
    return value


class Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    integer: int = Field(default=1, ge=1, le=9)
    number: float = Field(default=1.0, gt=0, lt=2)
    flag: bool = False
    text: str = Field(default="abc", min_length=2, max_length=3)
    choice: Literal["simple", "interleaved"] = "simple"
    one: Literal["only"] = "only"
    items: list[int] = Field(default_factory=list)
    table: dict[str, int] = Field(default_factory=dict)
    odd: Annotated[int, AfterValidator(_odd)] = 1
    depends: int = Field(default_factory=lambda data: data.get("integer", 0) + 1)
    nested: Model | None = None


@pytest.mark.parametrize(
    ("data", "path", "message", "hint"),
    [
        ({"integer": True}, ("integer",), "must be an integer, got true (a bool)", None),
        ({"integer": "4"}, ("integer",), "must be an integer, got `4` (text)", "write it without quotes"),
        ({"integer": 5e8}, ("integer",), "must be an integer, got 500000000.0 (a float)", "write `500000000`"),
        ({"integer": None}, ("integer",), "must be an integer, got null", None),
        ({"integer": 0}, ("integer",), "must be at least 1, got 0", None),
        ({"integer": 10}, ("integer",), "must be at most 9, got 10", None),
        ({"number": 0}, ("number",), "must be more than 0.0, got 0", None),
        ({"number": 2.0}, ("number",), "must be less than 2.0, got 2.0", None),
        ({"number": []}, ("number",), "must be a number, got a list", None),
        ({"number": float("nan")}, ("number",), "must be a finite number, got nan (a float)", None),
        ({"flag": "False"}, ("flag",), "must be true or false, got `False` (text)", "write it without quotes"),
        ({"number": "1e-3"}, ("number",), "must be a number, got `1e-3` (text)", "write it without quotes"),
        ({"flag": 1}, ("flag",), "must be true or false, got 1", None),
        ({"text": 1}, ("text",), "must be text, got 1", "put it in quotes"),
        ({"text": "a"}, ("text",), "must have at least 2 characters", None),
        ({"text": "abcd"}, ("text",), "must have at most 3 characters", None),
        (
            {"choice": "simpel"},
            ("choice",),
            "must be one of `simple`, `interleaved`, got `simpel` (text)",
            "did you mean `simple`?",
        ),
        ({"one": 1}, ("one",), "must be `only`, got 1", None),
        ({"items": 1}, ("items",), "must be a list, got 1", None),
        ({"items": [1, "a"]}, ("items", 1), "must be an integer, got `a` (text)", None),
        ({"table": 1}, ("table",), "must be a mapping, got 1", None),
        ({"odd": 2}, ("odd",), "must be odd", None),
        ({"other": 1}, ("other",), "unknown field", None),
        ({"nested": 1}, ("nested",), "must be a mapping, got 1", None),
        ({"nested": {"integer": 0}}, ("nested", "integer"), "must be at least 1, got 0", None),
        ({1: 1}, (1,), "a name must be text, got 1", None),
    ],
)
def test_errors_become_plain_sentences(
    data: object, path: tuple[str | int, ...], message: str, hint: str | None
) -> None:
    with pytest.raises(ValidationError) as caught:
        Model.model_validate(data)
    assert explain(caught.value) == [Problem(path, message, hint)]


def test_a_kind_of_error_without_a_sentence_still_reads_well() -> None:
    class Other(BaseModel):
        path: Annotated[str, Field(pattern="a")]

    with pytest.raises(ValidationError) as caught:
        Other(path="b")
    (problem,) = explain(caught.value)
    assert problem.message == "string should match pattern 'a'"


def test_braces_in_a_users_text_are_text() -> None:
    error = validation_error("x", [Problem(("a", 0), "got {integer} {0} {", "{}")])
    assert explain(error) == [Problem(("a", 0), "got {integer} {0} {", "{}")]


def test_validated_raises_all_problems_with_the_subject() -> None:
    with pytest.raises(ConfigError, match="2 problems in the thing") as caught:
        validated(Model, {"integer": 0, "flag": 1}, subject="thing")
    assert [problem.where for problem in caught.value.problems] == ["integer", "flag"]
    assert caught.value.__cause__ is None


TEXT = "compute:\n  instance_cuont: 2\n"


def test_a_located_problem_shows_file_line_excerpt_and_hint() -> None:
    problem = LocatedProblem(
        ("compute", "instance_cuont"), "unknown field", "did you mean `instance_count`?", "job.yaml", 2, 3, TEXT
    )
    assert str(problem) == (
        "job.yaml:2: compute.instance_cuont: unknown field\n"
        "    2 |   instance_cuont: 2\n"
        "\n"
        "    hint: did you mean `instance_count`?"
    )


def test_an_exact_place_has_a_column_and_a_mark() -> None:
    problem = LocatedProblem((), "is not JSON", None, "a.json", 1, 7, '{"a": four}', exact=True)
    assert str(problem) == 'a.json:1:7: is not JSON\n    1 | {"a": four}\n      |       ^'


def test_a_source_without_lines_has_no_excerpt() -> None:
    problem = LocatedProblem(("name",), "must be text", "put it in quotes", "--set name")
    assert str(problem) == "--set name: must be text\n    hint: put it in quotes"


def test_long_lines_are_cut_around_the_column() -> None:
    shown = excerpt("a" * 500 + "!" + "b" * 500, 1, 501)
    line, mark = shown.split("\n")
    assert len(line) < 120
    assert line[mark.index("^")] == "!"


def test_control_characters_are_escaped_and_the_mark_stays_below() -> None:
    line, mark = excerpt("\x1b[31mx", 1, 6).split("\n")
    assert "\x1b" not in line
    assert line[mark.index("^")] == "x"


def test_lines_that_are_not_there_show_nothing() -> None:
    assert excerpt("a", 7) == excerpt("a\n\n", 2) == excerpt("", 1) == ""
