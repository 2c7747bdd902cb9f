"""The base of every part of the configuration: closed, frozen, strict, and telling all problems at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from smpkit.config.explain import MISSING, explain, validation_error
from smpkit.config.words import closest, quoted, suggestion, typed
from smpkit.errors import Problem

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["KeyPath", "Section", "free_form", "in_order"]

KeyPath = tuple[str | int, ...]
"""The place of a value, from the root of what is validated."""


# As deep as required fields are nested in sections.
_TRIES = 5
_MAX_UNKNOWN = 100
"""Unknown fields of a section that are reported each, with a guess what was meant."""


class Section(BaseModel):
    """A closed part of the configuration.

    pydantic does not check rules between fields while any field is wrong. Here a section with wrong fields is validated
    a second time without them, so that rules between the other fields are checked too, and the user sees all problems
    at once.
    """

    model_config = ConfigDict(
        allow_inf_nan=False,
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        serialize_by_alias=True,
        strict=True,
        use_attribute_docstrings=True,
    )

    refused: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """Names that people are known to write and that are not fields: name -> (reason, hint)."""

    stand_ins: ClassVar[Mapping[str, Any]] = {}
    """Legal values of required fields, taken in place of wrong or missing ones to find further problems."""

    hints: ClassVar[Mapping[str, str]] = {}
    """What to do about a required field that is missing: name -> hint."""

    short_form: ClassVar[str] = ""
    """The field that a text alone stands for; empty where only a mapping may be written."""

    @classmethod
    def keys(cls) -> list[str]:
        """The names that may be written, in the order of the fields."""
        return [field.alias or name for name, field in cls.model_fields.items()]

    @classmethod
    def prepare(cls, data: object) -> object:
        """Rewrite a short form, such as text instead of a mapping, into the full one."""
        return {cls.short_form: data} if cls.short_form and isinstance(data, str) else data

    @classmethod
    def as_written(cls, problem: Problem, data: Any) -> Problem:
        """Name the key that the user wrote, where `prepare` changed it; there is none in a text."""
        return Problem((), problem.message, problem.hint) if cls.short_form and isinstance(data, str) else problem

    @classmethod
    def unknown(cls, name: str, data: Mapping[Any, Any]) -> Problem | None:  # noqa: ARG003
        """Return what is wrong with a name that is not a field; None to ignore it."""
        if name in cls.refused:
            return Problem((name,), *cls.refused[name])
        return Problem((name,), "unknown field", suggestion(name, cls.keys()))

    def cross_problems(
        self,
        written: Mapping[str, Any],  # noqa: ARG002
        broken: frozenset[KeyPath],  # noqa: ARG002
        /,
    ) -> Iterable[Problem]:
        """Yield what is wrong between fields.

        Args:
            written: what the user wrote, before aliases and defaults.
            broken: paths that are wrong by themselves; here they have their defaults, so no rule should judge them.
        """
        return ()

    @model_validator(mode="wrap")
    @classmethod
    def _report_all_problems(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(data, cls):
            return handler(data)
        prepared = cls.prepare(data)
        if not isinstance(prepared, Mapping):
            raise validation_error(cls.__name__, [Problem((), f"must be a mapping, got {typed(prepared)}")])
        known, problems = cls._split(prepared)
        section: Self | None
        try:
            section = handler(known)
        except ValidationError as error:
            unknown = itertools.islice((name for name in prepared if name not in known), _MAX_UNKNOWN)
            meant = {(closest(str(name), cls.keys()),) for name in unknown}
            found = [cls._with_hint(problem) for problem in explain(error)]
            # A required field whose name is misspelt is reported once, at the name that was written.
            found = [problem for problem in found if problem.message != MISSING or problem.path not in meant]
            problems += found
            section = cls._second_try(handler, known, [problem.path for problem in found])
        if section is not None:
            broken = frozenset(problem.path for problem in problems)
            problems += section.cross_problems(prepared, broken)
        if problems or section is None:
            ordered = in_order(problems, prepared)
            raise validation_error(cls.__name__, [cls.as_written(problem, data) for problem in ordered])
        return section

    @classmethod
    def _second_try(
        cls, handler: ModelWrapValidatorHandler[Self], data: Mapping[str, Any], broken: Iterable[KeyPath]
    ) -> Self | None:
        """Validate without the broken values; None if that is not enough."""
        rest: dict[Any, Any] = dict(data)
        for _ in range(_TRIES):
            for path in broken:
                rest = _without(rest, path)
            rest = {**cls.stand_ins, **rest}
            try:
                return handler(rest)
            except ValidationError as error:
                # A section that lacks a required field, removed here or never given, is removed as well.
                broken = [problem.path[:-1] for problem in explain(error)]
        return None

    @classmethod
    def _with_hint(cls, problem: Problem) -> Problem:
        name = problem.path[0] if len(problem.path) == 1 else None
        if problem.message != MISSING or name not in cls.hints:
            return problem
        return replace(problem, hint=cls.hints[str(name)])

    @classmethod
    def _split(cls, data: Mapping[Any, Any]) -> tuple[dict[str, Any], list[Problem]]:
        """Separate the fields from the names that are none."""
        keys = set(cls.keys())
        known: dict[str, Any] = {}
        problems: list[Problem | None] = []
        unknown: list[str] = []
        for name, value in data.items():
            if not isinstance(name, str):
                problems.append(Problem((quoted(name),), f"a name must be text, got {typed(name)}"))
            elif name in keys:
                known[name] = value
            else:
                unknown.append(name)
        problems += [cls.unknown(name, data) for name in unknown[:_MAX_UNKNOWN]]
        if rest := unknown[_MAX_UNKNOWN:]:
            problems.append(Problem((rest[0],), f"is the first of {len(rest):,} more unknown fields"))
        return known, [problem for problem in problems if problem is not None]


def _without(data: Mapping[Any, Any], path: KeyPath) -> dict[Any, Any]:
    """Copy `data` without the value at `path`; whole lists go, since leaving out one item would shift the others."""
    copy: dict[Any, Any] = dict(data)
    if not path:
        return copy
    head, rest = path[0], path[1:]
    below = copy.get(head)
    if rest and isinstance(below, Mapping):
        copy[head] = _without(below, rest)
    else:
        copy.pop(head, None)
    return copy


def in_order(problems: Iterable[Problem], data: Mapping[Any, Any]) -> list[Problem]:
    """Sort problems as their top-level names were written; those about names that were not written come last."""
    positions = {name: position for position, name in enumerate(data)}
    return sorted(problems, key=lambda problem: positions.get(problem.path[0] if problem.path else "", len(positions)))


def free_form(check: Callable[[object, object], Iterable[Problem]]) -> WrapValidator:
    """Make a validator of a mapping whose names are the user's, which tells all problems at once too.

    Args:
        check: says what is wrong with a name and its value, before the value is validated; paths start at the mapping.
    """

    def validate(value: object, handler: ValidatorFunctionWrapHandler) -> Any:
        if not isinstance(value, Mapping):
            return handler(value)
        good: dict[Any, Any] = {}
        problems: list[Problem] = []
        for name, item in value.items():
            found = list(check(name, item))
            problems += found
            if not found:
                good[name] = item
        made: Any = None
        try:
            made = handler(good)
        except ValidationError as error:
            problems += explain(error)
        if problems:
            raise validation_error("mapping", in_order(problems, value))
        return made

    return WrapValidator(validate)
