from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Annotated, Literal

import pytest
from pydantic import AfterValidator, Field, ValidationError

from smpkit.config.section import KeyPath, Section, checked, explain, instead, matching, refusal
from smpkit.errors import Problem


class Inner(Section):
    low: int = 0
    high: int = 9

    def broken_rules(self) -> Iterable[Problem]:
        if self.low > self.high:
            yield Problem(("low",), f"must be at most high ({self.high}), got {self.low}")


class Outer(Section):
    name: str
    inner: Inner = Inner()
    other: int = 1
    table: dict[Annotated[str, checked(lambda name: "is a long name" if len(name) > 3 else None)], int] = {}  # noqa: RUF012
    hints = {"name": "give it a name"}  # noqa: RUF012
    refused = {"nom": ("is French", "write `name`")}  # noqa: RUF012


def problems_of(model: type[Section], data: object) -> list[str]:
    """Return what is said of wrong data, each problem and its hint on one line."""
    with pytest.raises(ValidationError) as caught:
        model.model_validate(data)
    return [str(problem).replace("\n    ", " ") for problem in explain(caught.value)]


problems = partial(problems_of, Outer)


def test_rules_of_one_section_speak_although_another_one_is_wrong() -> None:
    assert problems({"name": 1, "inner": {"low": 5, "high": 3}}) == [
        "name: must be text, got 1 hint: put it in quotes",
        "inner.low: must be at most high (3), got 5",
    ]
    assert problems({"name": "a", "inner": {"low": 5, "high": "3", "middle": 4}}) == [
        "inner.high: must be an integer, got `3` (text) hint: write it without quotes",
        "inner.middle: unknown field",
    ]


def test_names_that_are_no_fields_are_told_beside_fields_that_are_wrong() -> None:
    assert problems({"nom": "x", "other": "1", "inner": 3, "oter": 4}) == [
        "name: is required hint: give it a name",
        "inner: must be a mapping, got 3",
        "other: must be an integer, got `1` (text) hint: write it without quotes",
        "nom: is French hint: write `name`",
        "oter: unknown field hint: did you mean `other`?",
    ]
    assert problems({"nane": "x"}) == ["nane: unknown field hint: did you mean `name`?"]


def test_mappings_of_the_user_tell_bad_names_and_bad_values_together() -> None:
    assert sorted(problems({"name": "a", "table": {"long name": 3, "b": "7", "c": 1, 4: 4}})) == [
        "table.4: a name must be text, got 4 hint: put it in quotes",
        "table.b: must be an integer, got `7` (text) hint: write it without quotes",
        "table.long name: is a long name",
    ]
    assert Outer(name="a", table={"c": 1}).table == {"c": 1}


@pytest.mark.parametrize("data", [None, 3, "a", [], [1]], ids=repr)
def test_anything_but_a_mapping_is_refused(data: object) -> None:
    (problem,) = problems(data)
    assert problem.startswith("must be a mapping, got")


def test_sections_are_frozen_and_accepted_where_their_mapping_is() -> None:
    with pytest.raises(ValidationError):
        Outer(name="a").name = "b"  # type: ignore[misc]
    inner = Inner(low=1)
    assert Outer(name="a", inner=inner).inner == inner


def _odd(value: int) -> int:
    if value % 2 == 0:
        raise ValueError("must be odd")
    return value


class Values(Section):
    integer: int = Field(default=1, ge=1, le=9)
    number: float = Field(default=1.0, gt=0, lt=2)
    flag: bool = False
    text: str = Field(default="abc", min_length=2, max_length=3)
    choice: Literal["simple", "interleaved"] = "simple"
    one: Literal["only"] = "only"
    items: list[int] = Field(default_factory=list, max_length=2)
    table: dict[str, int] = Field(default_factory=dict)
    odd: Annotated[int, AfterValidator(_odd)] = 1
    word: Annotated[str, matching(r"[a-z]+", "must be lower case", "as `abc`")] = "a"
    either: Annotated[int | Literal["auto"], instead("must be an integer or `auto`")] = 1
    depends: int = Field(default_factory=lambda data: data.get("integer", 0) + 1)
    nested: Inner | None = None


@pytest.mark.parametrize(
    ("data", "path", "message", "hint"),
    [
        ({"integer": True}, ("integer",), "must be an integer, got true (a bool)", None),
        ({"integer": 5e8}, ("integer",), "must be an integer, got 500000000.0 (a float)", "write `500000000`"),
        ({"integer": None}, ("integer",), "must be an integer, got null", None),
        ({"integer": 0}, ("integer",), "must be at least 1, got 0", None),
        ({"integer": 10}, ("integer",), "must be at most 9, got 10", None),
        ({"number": 0}, ("number",), "must be more than 0.0, got 0", None),
        ({"number": 2.0}, ("number",), "must be less than 2.0, got 2.0", None),
        ({"number": []}, ("number",), "must be a number, got a list", None),
        ({"number": float("nan")}, ("number",), "must be a finite number, got nan (a float)", None),
        ({"flag": "False"}, ("flag",), "must be true or false, got `False` (text)", "write it without quotes"),
        ({"flag": "on"}, ("flag",), "must be true or false, got `on` (text)", "write `true`: in YAML 1.2 `on` is text"),
        ({"flag": "n"}, ("flag",), "must be true or false, got `n` (text)", "write `false`: in YAML 1.2 `n` is text"),
        ({"number": "1e-3"}, ("number",), "must be a number, got `1e-3` (text)", "write it without quotes"),
        ({"flag": 1}, ("flag",), "must be true or false, got 1", None),
        ({"text": "a"}, ("text",), "must have at least 2 characters", None),
        ({"text": "abcd"}, ("text",), "must have at most 3 characters", None),
        ({"choice": "soon"}, ("choice",), "must be one of `simple`, `interleaved`, got `soon` (text)", None),
        ({"one": "onyl"}, ("one",), "must be `only`, got `onyl` (text)", "did you mean `only`?"),
        ({"one": 1}, ("one",), "must be `only`, got 1", None),
        ({"items": 1}, ("items",), "must be a list, got 1", None),
        ({"items": [1, 2, 3]}, ("items",), "must have at most 2 entries", None),
        ({"items": [1, "a"]}, ("items", 1), "must be an integer, got `a` (text)", None),
        ({"table": 1}, ("table",), "must be a mapping, got 1", None),
        ({"odd": 2}, ("odd",), "value error, must be odd", None),
        ({"word": "A"}, ("word",), "must be lower case, got `A`", "as `abc`"),
        ({"word": "a\n"}, ("word",), "must be lower case, got `a\\n`", "as `abc`"),
        ({"either": "atuo"}, ("either",), "must be an integer or `auto`, got `atuo` (text)", None),
        ({"nested": {"low": 10}}, ("nested", "low"), "must be at most high (9), got 10", None),
        ({1: 1}, ("1",), "a name must be text, got 1", "put it in quotes"),
    ],
)
def test_errors_become_plain_sentences(data: object, path: KeyPath, message: str, hint: str | None) -> None:
    with pytest.raises(ValidationError) as caught:
        Values.model_validate(data)
    (problem,) = explain(caught.value)
    assert (tuple(map(str, problem.path)), problem.message, problem.hint) == (tuple(map(str, path)), message, hint)


def test_braces_in_a_users_text_are_text() -> None:
    error = refusal([Problem(("a", 0), "got {integer} {0} {", "{}")])
    assert explain(error) == [Problem(("a", 0), "got {integer} {0} {", "{}")]
