"""The base of every part of the configuration: closed, frozen, strict, and telling its problems in plain sentences."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from smpkit.config.confidential import hide_in_message
from smpkit.config.words import closest, quoted, suggestion, typed
from smpkit.errors import ConfigError, Problem

KeyPath = tuple[str | int, ...]
"""The place of a value, from the root of what is validated."""

RIGHT_FIELDS = "right fields"
"""The context of a validation that leaves wrong fields out, so that the others can be judged, and asks for no rules."""

_Model = TypeVar("_Model", bound=BaseModel)
_Value = TypeVar("_Value")


class Section(BaseModel):
    """A closed part of the configuration.

    pydantic finds all wrong fields of all sections in one go. Each section puts its own into words, and rules between
    fields speak in those sections whose fields are right.
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

    hints: ClassVar[Mapping[str, str]] = {}
    """What to do about a required field that is missing: name -> hint."""

    short_form: ClassVar[str] = ""
    """The field that a text alone stands for; empty where only a mapping may be written."""

    @classmethod
    def keys(cls) -> list[str]:
        """The names that may be written, in the order of the fields."""
        return [field.alias or name for name, field in cls.model_fields.items()]

    @classmethod
    def spelled_out(cls, data: Any) -> Any:
        """Rewrite a short form, such as text instead of a mapping, into the full one."""
        return {cls.short_form: data} if cls.short_form and isinstance(data, str) else data

    @classmethod
    def as_written(cls, problem: Problem, data: Any) -> Problem:
        """Name the key that the user wrote, where `spelled_out` changed it; there is none in a text."""
        return Problem((), problem.message, problem.hint) if cls.short_form and isinstance(data, str) else problem

    @classmethod
    def unknown(cls, name: str, data: Mapping[Any, Any]) -> Problem:  # noqa: ARG003
        """Return what is wrong with a name that is not a field."""
        if name in cls.refused:
            return Problem((name,), *cls.refused[name])
        return Problem((name,), "unknown field", suggestion(name, cls.keys()))

    @classmethod
    def further_problems(cls, data: Mapping[str, Any], problems: Sequence[Problem]) -> Iterable[Problem]:  # noqa: ARG003
        """Return what else is known to be wrong in `data` although its fields have `problems`."""
        return ()

    def broken_rules(self) -> Iterable[Problem]:
        """Yield what is wrong between fields that are right by themselves."""
        return ()

    @model_validator(mode="wrap")
    @classmethod
    def _tell_in_words(cls, data: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        if isinstance(data, cls):
            return handler(data)
        full = cls.spelled_out(data)
        if not isinstance(full, Mapping):
            kinds = "text or a mapping" if cls.short_form else "a mapping"
            raise refusal([Problem((), f"must be {kinds}, got {typed(full)}")])
        try:
            section = handler(full)
        except ValidationError as error:
            problems = cls._in_words(error, full)
            if info.context == RIGHT_FIELDS:
                wrong = {str(problem.path[0]) for problem in problems}
                return handler({key: value for key, value in full.items() if str(key) not in wrong})
            problems += cls.further_problems(full, problems)
        else:
            problems = [] if info.context == RIGHT_FIELDS else [*section.broken_rules()]
        if problems:
            raise refusal(cls.as_written(problem, data) for problem in problems)
        return section

    @classmethod
    def _in_words(cls, error: ValidationError, data: Mapping[str, Any]) -> list[Problem]:
        problems = explain(error)
        unknown = [str(problem.path[0]) for problem in problems if _is_own(problem, _UNKNOWN)]
        keys = cls.keys()
        meant = {closest(name, keys) for name in unknown}
        # A refusal names the field that is meant: `url` "is called `uri` here".
        meant |= {key for name in unknown for key in keys if name in cls.refused and f"`{key}`" in cls.refused[name][0]}
        reported: list[Problem] = []
        for problem in problems:
            name = str(problem.path[0]) if problem.path else ""
            if not _is_own(problem, _UNKNOWN, _MISSING):
                reported.append(problem)
            # A required field whose name is misspelt is reported once, as it was written.
            elif problem.message == _MISSING and name not in meant:
                reported.append(Problem(problem.path, _MISSING, cls.hints.get(name)))
        return reported + [cls.unknown(name, data) for name in unknown]


def _is_own(problem: Problem, *messages: str) -> bool:
    """Tell whether a problem with one of these messages is of a section's own field, and not of one further down."""
    return len(problem.path) == 1 and problem.message in messages


# ---- values ----------------------------------------------------------------------------------------------------------


def checked(check: Callable[[_Value], str | tuple[str, str | None] | None]) -> AfterValidator:
    """Make a validator of a function that returns what is wrong with a value (`must be ...`), perhaps with a hint."""

    def validate(value: _Value) -> _Value:
        problem = check(value)
        if problem is not None:
            raise refusal([Problem((), *((problem,) if isinstance(problem, str) else problem))])
        return value

    return AfterValidator(validate)


def matching(pattern: str, message: str, hint: str | None = None) -> AfterValidator:
    """Make a validator of printable text that must match a pattern; `message` says what it must be."""

    def check(value: str) -> tuple[str, str | None] | None:
        fits = value.isprintable() and re.fullmatch(pattern, value)
        return None if fits else (f"{message}, got {quoted(value)}", hint)

    return checked(check)


def instead(message: str) -> WrapValidator:
    """Make a validator that says one sentence about a wrong value, in place of one for each kind it could have."""

    def validate(value: object, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise refusal([Problem((), f"{message}, got {typed(value)}")]) from None

    return WrapValidator(validate)


# ---- errors ----------------------------------------------------------------------------------------------------------


def validated(model: type[_Model], data: object, *, subject: str) -> _Model:
    """Validate `data` as `model`; raise ConfigError with all problems, naming `subject`."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError(explain(error), subject=subject) from None


def refusal(problems: Iterable[Problem]) -> ValidationError:
    """Pack problems into one error: raised inside a validator, pydantic puts the outer path before each."""
    # The template is constant and the text goes in as context, so braces in a user's text are never read as fields.
    details = [
        InitErrorDetails(
            type=PydanticCustomError(_OURS, "{message}", {"message": problem.message, "hint": problem.hint}),
            loc=problem.path,
            input=None,
        )
        for problem in problems
    ]
    return ValidationError.from_exception_data("configuration", details)


_OURS = "smpkit"
"""The type of errors that are sentences of ours; their context holds the message and, perhaps, the hint."""
_MISSING = "is required"
_UNKNOWN = "unknown field"
# A default that depends on a field which is itself wrong; only the wrong field is reported.
_CONSEQUENCE = "default_factory_not_called"

_KINDS = {
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "dict_type": "a mapping",
    "list_type": "a list",
}
_BOUNDS = {
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
}
_SENTENCES = {
    "missing": _MISSING,
    "extra_forbidden": _UNKNOWN,
    "string_unicode": "must be text that can be written as UTF-8",
    "too_long": "must have at most {max_length} entries",
    "recursion_loop": "refers to itself, or is nested too deeply",
}
_UNQUOTED = {
    "int_type": r"[-+]?[0-9]+",
    "float_type": r"[-+]?[0-9]*\.?[0-9]+([eE][-+]?[0-9]+)?",
    "bool_type": r"(?i:true|false)",
}
"""Texts that were probably meant as a value of another type."""
_YAML_1_1 = {"yes": "true", "y": "true", "on": "true", "no": "false", "n": "false", "off": "false"}


def explain(error: ValidationError) -> list[Problem]:
    """Turn every error of a validation into a problem, in the order found."""
    return [_problem(detail) for detail in error.errors(include_url=False) if detail["type"] != _CONSEQUENCE]


def _problem(detail: ErrorDetails) -> Problem:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    path: KeyPath = detail["loc"]
    is_name = path[-1:] == ("[key]",)  # what pydantic writes behind a name that is wrong in a mapping
    if is_name:
        path = (*path[:-2], str(path[-2]) or quoted(""))
    hint: str | None = None
    if kind == _OURS:
        message, hint = context["message"], context["hint"]
    elif kind == "invalid_key" or (is_name and kind == "string_type"):
        message, hint = f"a name must be text, got {typed(value if is_name else path[-1])}", "put it in quotes"
    elif kind == "literal_error":
        options = [option.strip("'") for option in str(context["expected"]).replace(" or ", ", ").split(", ")]
        one_of = "one of " if len(options) > 1 else ""
        message = f"must be {one_of}{', '.join(f'`{option}`' for option in options)}, got {typed(value)}"
        hint = suggestion(value, options) if isinstance(value, str) else None
    elif kind in _KINDS:
        message, hint = f"must be {_KINDS[kind]}, got {typed(value)}", _hint(kind, value)
    elif kind in _BOUNDS:
        message = f"must be {_BOUNDS[kind].format(**context)}, got {quoted(value)}"
    elif kind in _SENTENCES:
        message = _SENTENCES[kind].format(**context)
    else:
        message = re.sub("^(Input|String) should", "must", detail["msg"].removesuffix("."))
        message = message[:1].lower() + message[1:]
    return Problem(path, hide_in_message(path, message), hint)


def _hint(kind: str, value: object) -> str | None:
    if kind == "string_type" and isinstance(value, (bool, int, float)):
        return "put it in quotes"
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"write `{int(value)}`"
    if kind == "bool_type" and isinstance(value, str) and value.lower() in _YAML_1_1:
        return f"write `{_YAML_1_1[value.lower()]}`: in YAML 1.2 `{value}` is text"
    if isinstance(value, str) and re.fullmatch(_UNQUOTED.get(kind, "(?!)"), value):
        return "write it without quotes"
    return None
