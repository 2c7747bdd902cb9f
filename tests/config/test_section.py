from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import pytest
from pydantic import ValidationError

from smpkit.config.explain import explain
from smpkit.config.section import KeyPath, Section, free_form
from smpkit.errors import Problem


def _short(name: object, _: object) -> Iterable[Problem]:
    if len(str(name)) > 3:
        yield Problem((str(name),), "is a long name")


class Inner(Section):
    low: int = 0
    high: int = 9

    def cross_problems(self, _written: Mapping[str, Any], broken: frozenset[KeyPath], /) -> Iterable[Problem]:
        if self.low > self.high and not broken & {("low",), ("high",)}:
            yield Problem(("low",), f"must be at most high ({self.high}), got {self.low}")


class Outer(Section):
    name: str
    inner: Inner = Inner()
    other: int = 1
    table: Annotated[dict[str, int], free_form(_short)] = {}  # noqa: RUF012
    hints = {"name": "give it a name"}  # noqa: RUF012
    refused = {"nom": ("is French", "write `name`")}  # noqa: RUF012

    def cross_problems(self, _written: Mapping[str, Any], broken: frozenset[KeyPath], /) -> Iterable[Problem]:
        if self.inner.high < self.other and ("inner", "high") not in broken:
            yield Problem(("other",), "is above inner.high")


def problems(data: object) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(data)
    return [str(problem).replace("\n    ", " ") for problem in explain(caught.value)]


def test_rules_between_fields_speak_although_another_field_is_wrong() -> None:
    # pydantic alone keeps silent about rules until every field is right, so users met their errors one by one.
    assert problems({"name": "a", "inner": {"low": 5, "high": 3, "middle": 4}, "other": 7}) == [
        "inner.low: must be at most high (3), got 5",
        "inner.middle: unknown field",
        "other: is above inner.high",
    ]


def test_rules_do_not_judge_a_value_that_is_wrong_by_itself() -> None:
    assert problems({"name": "a", "inner": {"high": "3"}, "other": 99}) == [
        "inner.high: must be an integer, got `3` (text) hint: write it without quotes"
    ]


def test_problems_come_in_the_order_written_and_missing_names_last() -> None:
    assert problems({"nom": "x", "other": "1", "inner": 3, "oter": 4}) == [
        "nom: is French hint: write `name`",
        "other: must be an integer, got `1` (text) hint: write it without quotes",
        "inner: must be a mapping, got 3",
        "oter: unknown field hint: did you mean `other`?",
        "name: is required hint: give it a name",
    ]


def test_free_form_mappings_tell_bad_names_and_bad_values_together() -> None:
    assert problems({"name": "a", "table": {"long name": "x", "b": "7", "c": 1}}) == [
        "table.long name: is a long name",
        "table.b: must be an integer, got `7` (text) hint: write it without quotes",
    ]
    assert Outer(name="a", table={"c": 1}).table == {"c": 1}


@pytest.mark.parametrize("data", [None, 3, "a", [], [1]], ids=repr)
def test_anything_but_a_mapping_is_refused(data: object) -> None:
    (problem,) = problems(data)
    assert problem.startswith("must be a mapping, got")


def test_names_that_are_no_text_are_refused() -> None:
    assert problems({"name": "a", 3: 4, None: 1}) == [
        "3: a name must be text, got 3",
        "null: a name must be text, got null",
    ]


def test_sections_are_frozen_and_keyword_only() -> None:
    with pytest.raises(ValidationError):
        Outer(name="a").name = "b"  # type: ignore[misc]
    with pytest.raises(TypeError):
        Outer("a")  # type: ignore[call-arg]


def test_a_section_is_accepted_where_its_mapping_is() -> None:
    inner = Inner(low=1)
    assert Outer(name="a", inner=inner).inner == inner
