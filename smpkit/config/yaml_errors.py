"""Say what is wrong with YAML, and on which line to mend it: PyYAML says where it gave up, which is often later."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from smpkit.config.words import printable

__all__ = ["SyntaxProblem", "explain_syntax"]

_QUOTE_IT = "put the value in quotes"
_NAME = re.compile(r"""(?:-\s+)*("[^"]*"|'[^']*'|[^\s#"'\[{-][^:#]*):(?:\s+(?P<value>[^#\s].*)|\s*(?:#.*)?)$""")
_OPENERS = {"flow sequence": ("[", "]"), "flow mapping": ("{", "}")}


class SyntaxProblem(NamedTuple):
    """What is wrong, where (both counted from 1), and what to do."""

    message: str
    line: int | None = None
    column: int | None = None
    hint: str | None = None


class _Line(NamedTuple):
    number: int
    indent: int
    text: str

    @property
    def name(self) -> re.Match[str] | None:
        return _NAME.match(self.text)


def explain_syntax(error: Any, text: str) -> SyntaxProblem:
    """Explain PyYAML's MarkedYAMLError about `text`."""
    problem, context = error.problem or "", error.context or ""
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark is not None else (None, None)
    opened = error.context_mark
    if "found character '\\t'" in str(error):
        return SyntaxProblem("a tab used for indentation", line, column, "indent with spaces")
    for kind, (opening, closing) in _OPENERS.items():
        if kind in context and opened is not None:
            message = f"the `{opening}` here is not closed by `{closing}`, or a `,` is missing after it"
            return SyntaxProblem(message, opened.line + 1, opened.column + 1)
    if "quoted scalar" in context and opened is not None:
        return SyntaxProblem("the quotation mark here is never closed", opened.line + 1, opened.column + 1)
    if "found '<stream end>'" in problem:
        return SyntaxProblem("the text ends where a value should stand", line, column)
    if "cannot start any token" in problem and mark is not None:
        character = printable(text[mark.index : mark.index + 1])
        return SyntaxProblem(f"a value cannot start with `{character}`", line, column, _QUOTE_IT)
    if problem.startswith("found undefined alias"):
        message = "undefined alias: `*` refers to a value marked with `&` further up"  # its name may be a password
        return SyntaxProblem(message, line, column, "put it in quotes if it is text")
    if line is not None and ("mapping values" in problem or "<block" in problem or "expected ':'" in problem):
        found = _misplaced(text, line) or _without_colon(text, line, opened) or _second_colon(text, line, column)
        if found is not None:
            return found
    return SyntaxProblem(printable(" ".join(part for part in (context, problem) if part)), line, column)


def _lines(text: str, last: int) -> Iterator[_Line]:
    for number, line in enumerate(text.splitlines()[:last], start=1):
        stripped = line.lstrip(" ")
        if stripped and not stripped.startswith("#"):
            yield _Line(number, len(line) - len(stripped), stripped)


def _misplaced(text: str, number: int) -> SyntaxProblem | None:
    """Find a line that is indented like none of the blocks it could belong to."""
    *above, line = [_Line(0, 0, ""), *_lines(text, number)]
    above = above[1:]
    if line.number != number or not above or (line.name is None and not line.text.startswith("- ")):
        return None
    open_blocks: list[_Line] = []
    for other in above:
        while open_blocks and open_blocks[-1].indent >= other.indent:
            open_blocks.pop()
        open_blocks.append(other)
    name = open_blocks[-1].name
    if line.indent > open_blocks[-1].indent:
        if name is None or not name["value"]:
            return None
        message = f"is indented further than line {open_blocks[-1].number}, which has a value already"
        return _indented(line, message, [open_blocks[-1]])
    if any(line.indent == block.indent for block in open_blocks):
        return None
    inner = next(block for block in open_blocks if block.indent > line.indent)
    outer = [block for block in open_blocks if block.indent < line.indent]
    return _indented(line, "is indented like no line above it", [inner, *outer[-1:]])


def _indented(line: _Line, message: str, like: list[_Line]) -> SyntaxProblem:
    choices = [
        f"by {block.indent} space{'s' * (block.indent != 1)} like line {block.number}"
        if block.indent
        else f"not at all, like line {block.number}"
        for block in like
    ]
    hint = f"indent line {line.number} {', or '.join(choices)}"
    return SyntaxProblem(f"line {line.number} {message}", line.number, line.indent + 1, hint)


def _without_colon(text: str, number: int, opened: Any) -> SyntaxProblem | None:
    """Find the line without `:` that PyYAML took for the beginning of a long name or text."""
    first = opened.line + 1 if opened is not None else max(number - 1, 1)
    for line in _lines(text, number):
        if line.number >= first and ":" not in line.text and not line.text.startswith(("-", "#")):
            message = f"line {line.number} is neither `name: value` nor an item of a list"
            return SyntaxProblem(message, line.number, line.indent + 1, "put a `:` after the name")
    return None


def _second_colon(text: str, number: int, column: int | None) -> SyntaxProblem | None:
    line = next((line for line in _lines(text, number) if line.number == number), None)
    if line is None or line.text.count(": ") + line.text.endswith(":") < 2:
        return None
    return SyntaxProblem("a second `:` in a value", number, column, _QUOTE_IT)
