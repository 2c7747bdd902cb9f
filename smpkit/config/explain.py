"""Say what is wrong, in plain sentences: one `Problem` each, without jargon, links or type names, with its line."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from smpkit.config.confidential import hide_in_line, hide_in_message, hide_in_text
from smpkit.config.words import printable, quoted, suggestion, typed
from smpkit.errors import ConfigError, Problem

__all__ = ["MISSING", "LocatedProblem", "excerpt", "explain", "validated", "validation_error"]

_Model = TypeVar("_Model", bound=BaseModel)

MISSING = "is required"
"""The message of a required field that is not there."""

# The type of errors that already are sentences of ours; their context holds the message and, perhaps, the hint.
_OURS = "smpkit"

# A default that depends on a field which is itself wrong; only the wrong field is reported.
_CONSEQUENCES = frozenset({"default_factory_not_called"})


def validated(model: type[_Model], data: object, *, subject: str) -> _Model:
    """Validate `data` as `model`; raise ConfigError with all problems, naming `subject`."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError(explain(error), subject=subject) from None


def explain(error: ValidationError) -> list[Problem]:
    """Turn every error of a validation into a problem, in the order found."""
    details = error.errors(include_url=False)
    return [_problem(detail) for detail in details if detail["type"] not in _CONSEQUENCES]


def validation_error(title: str, problems: Iterable[Problem]) -> ValidationError:
    """Pack problems into a ValidationError: raised inside a validator, pydantic puts the outer path before each."""
    return ValidationError.from_exception_data(
        title,
        [InitErrorDetails(type=_ours(problem), loc=problem.path, input=None) for problem in problems],
    )


def _ours(problem: Problem) -> PydanticCustomError:
    # The template is constant and the text goes in as context, so braces in a user's text are never read as fields.
    context = {"message": problem.message, "hint": problem.hint}
    return PydanticCustomError(_OURS, "{message}", context)


def _problem(detail: ErrorDetails) -> Problem:
    context = detail.get("ctx", {})
    path = detail["loc"]
    if detail["type"] == _OURS:
        return Problem(path, hide_in_message(path, context["message"]), context["hint"])
    say = _SENTENCES.get(detail["type"], _fallback)
    return Problem(path, hide_in_message(path, say(detail, context)), _hint(detail, context))


def _fallback(detail: ErrorDetails, _: Mapping[str, Any]) -> str:
    message = detail["msg"].removesuffix(".").replace("Input should", "must")
    return message[:1].lower() + message[1:]


def _must_be(what: str) -> Callable[[ErrorDetails, Mapping[str, Any]], str]:
    return lambda detail, _: f"must be {what}, got {typed(detail['input'])}"


def _bound(words: str, key: str) -> Callable[[ErrorDetails, Mapping[str, Any]], str]:
    return lambda detail, context: f"must be {words} {context[key]}, got {quoted(detail['input'])}"


def _choice(detail: ErrorDetails, context: Mapping[str, Any]) -> str:
    options = ", ".join(f"`{option}`" for option in _options(context))
    return f"must be {'one of ' if ', ' in options else ''}{options}, got {typed(detail['input'])}"


def _options(context: Mapping[str, Any]) -> list[str]:
    """Read the options out of pydantic's text `'simple', 'interleaved' or '_only_forward'`."""
    return [part.strip("'") for part in str(context["expected"]).replace(" or ", ", ").split(", ")]


_SENTENCES: dict[str, Callable[[ErrorDetails, Mapping[str, Any]], str]] = {
    "missing": lambda _, __: MISSING,
    "extra_forbidden": lambda _, __: "unknown field",
    "invalid_key": lambda detail, _: f"a name must be text, got {typed(detail['loc'][-1])}",
    "int_type": _must_be("an integer"),
    "int_parsing": _must_be("an integer"),
    "int_from_float": _must_be("an integer"),
    "int_parsing_size": lambda _, __: "is too large a number",
    "float_type": _must_be("a number"),
    "float_parsing": _must_be("a number"),
    "finite_number": _must_be("a finite number"),
    "bool_type": _must_be("true or false"),
    "bool_parsing": _must_be("true or false"),
    "string_type": _must_be("text"),
    "string_unicode": lambda _, __: "must be text that can be written as UTF-8",
    "string_too_short": lambda _, context: f"must have at least {context['min_length']} characters",
    "string_too_long": lambda _, context: f"must have at most {context['max_length']} characters",
    "too_long": lambda _, context: f"must have at most {context['max_length']} entries",
    "dict_type": _must_be("a mapping"),
    "mapping_type": _must_be("a mapping"),
    "model_type": _must_be("a mapping"),
    "list_type": _must_be("a list"),
    "literal_error": _choice,
    "greater_than_equal": _bound("at least", "ge"),
    "greater_than": _bound("more than", "gt"),
    "less_than_equal": _bound("at most", "le"),
    "less_than": _bound("less than", "lt"),
    "recursion_loop": lambda _, __: "refers to itself",
    "value_error": lambda _, context: str(context["error"]),
    "assertion_error": lambda _, context: str(context["error"]),
}


# Forms of texts that were probably meant as a value of another type.
_UNQUOTED = {
    "int_type": re.compile(r"[-+]?[0-9]+"),
    "float_type": re.compile(r"[-+]?[0-9]*\.?[0-9]+([eE][-+]?[0-9]+)?"),
    "bool_type": re.compile(r"true|false", re.IGNORECASE),
}
_NOTHING = re.compile(r"(?!)")


def _hint(detail: ErrorDetails, context: Mapping[str, Any]) -> str | None:
    value = detail["input"]
    if detail["type"] == "literal_error" and isinstance(value, str):
        return suggestion(value, _options(context))
    if detail["type"] in ("int_type", "int_from_float") and isinstance(value, float) and value.is_integer():
        return f"write `{int(value)}`"
    if detail["type"] == "string_type" and isinstance(value, (bool, int, float)):
        return "put it in quotes"
    if isinstance(value, str) and _UNQUOTED.get(detail["type"], _NOTHING).fullmatch(value):
        return "write it without quotes"
    return None


_WIDTH = 100


@dataclass(frozen=True)
class LocatedProblem(Problem):
    """A problem and where its text is.

    Args:
        source: the file as the user named it, or what else the value came from: `--set compute.spot`, a variable.
        line: counted from 1; None if the source has no lines.
        column: counted from 1.
        text: the whole source, for the excerpt; empty for none.
        exact: the very character matters, as in a syntax error: show the column, and a mark under it.
    """

    source: str = ""
    line: int | None = None
    column: int | None = None
    text: str = ""
    exact: bool = False

    @property
    def place(self) -> str:
        """The place as editors and terminals understand it: `job.yaml:4`, `job.yaml:4:17`."""
        numbers = (self.line, self.column if self.exact else None)
        return self.source + "".join(f":{number}" for number in numbers if number is not None)

    def __str__(self) -> str:
        known = self.source == f"--set {printable(self.where)}"
        where = f"{printable(self.where)}: " if self.path and not known else ""
        lines = [f"{self.place}: {where}{self.message}"]
        shown = ""
        if self.line is not None:
            shown = excerpt(self.text, self.line, self.column if self.exact else None)
        if shown:
            lines.append(shown)
        if self.hint is not None:
            lines += ["", f"    hint: {self.hint}"] if shown else [f"    hint: {self.hint}"]
        return "\n".join(lines)


@functools.lru_cache(maxsize=8)
def _lines(text: str) -> Sequence[str]:
    """Split a text once, not once for each of its problems."""
    return hide_in_text(text)


@functools.lru_cache(maxsize=128)
def _shown_line(text: str, line: int) -> str:
    lines = _lines(text)
    return hide_in_line(lines[line - 1]) if 1 <= line <= len(lines) else ""


def excerpt(text: str, line: int, column: int | None = None) -> str:
    """Show one line of `text` behind its number, with a mark under `column`; empty if there is nothing to show.

    What is probably a secret is shown as stars.

    ::

            3 | {"microbatches": four}
              |                  ^
    """
    whole = _shown_line(text, line)
    if not whole.strip():
        return ""
    # Long lines (a whole JSON document on one) are cut to the part around the column.
    start = max(0, (column or 1) - _WIDTH // 2) if len(whole) > _WIDTH else 0
    shown = whole[start : start + _WIDTH]
    gutter = f"    {line} | "
    result = gutter + printable(shown).rstrip()
    if column is not None:
        before = printable(shown[: column - 1 - start])
        result += "\n" + " " * (len(gutter) - 2) + "| " + " " * len(before) + "^"
    return result
