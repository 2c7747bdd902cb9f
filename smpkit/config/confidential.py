"""Recognise what is probably a secret, by its name or by its form, and hide it in all that is shown."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

__all__ = [
    "HIDDEN",
    "hide_in_line",
    "hide_in_message",
    "hide_in_text",
    "hide_known",
    "is_confidential",
    "looks_secret",
    "masked",
]

HIDDEN = "(hidden)"
"""What is shown in place of a secret."""

_SECRET_NAME = re.compile(
    r"(?:^|_)(?:password|passwd|passphrase|pwd|secret|secrets|token|credential|credentials|apikey"
    r"|(?:api|access|secret|private|auth|account|encryption|signing|license|wandb|openai)_?key(?:_id)?)$"
)
_SPECIAL_TOKEN = re.compile(
    r"(?:^|_)(?:eos|bos|pad|padding|unk|sep|cls|mask|image|start|end|stop|special|separator|fill|prefix|suffix|begin"
    r"|first|last|new|class|audio|video|per|fim|eot|sot|null|blank|end_of_text)_tokens?$"
)
_KNOWN = re.compile(
    r"(?<![A-Za-z0-9])(?:(?:AKIA|ASIA)[0-9A-Z]{16}|hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{36,}"
    r"|github_pat_[A-Za-z0-9_]{40,}|glpat-[A-Za-z0-9_-]{20,}|xox[abprs]-[A-Za-z0-9-]{10,}|sk-[A-Za-z0-9_-]{20,}"
    r"|AIza[A-Za-z0-9_-]{35}|eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*)(?![A-Za-z0-9])"
    r"|(?<=://)[^\s/:@]+:[^\s/@]+(?=@)|-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----"
)
"""Forms of keys: AWS, Hugging Face, GitHub, GitLab, Slack, OpenAI, Google, JWT, `user:password@`, private keys."""

_HARMLESS_VALUE = re.compile(r"\s*|true|false|none|null|auto|default|[-+.\d]+|<.*>|\[.*\]|(?:/|\./|s3://|~/).*", re.I)
# Names are short and have a beginning, or a search in a long word would take hours.
_SETTING = re.compile(
    r"""(?<!\w)(?P<name>[A-Za-z_][\w.-]{0,255})["']?\s*[:=]\s*(?P<value>"(?:[^"\\]|\\.)*"|'[^']*'|[^\s,{}\[\]"'#]+)"""
)

_SECTIONS = frozenset({"env", "environment", "secrets"})
"""What is below them is not shown in errors, whatever its name: variables are how programs get their secrets."""

_GOT = re.compile(r"\bgot (?!(?:a list|a mapping|a tuple|null|an object of type \w+)$).*", re.DOTALL)
_NAME = re.compile(r"""(?<!\w)(?P<name>[A-Za-z_][\w.-]{0,255})["']?\s*:(?:\s+|(?=["'\[{])|$)""")
_FIRST_NAME = re.compile(r"""^\s*(?:-\s+)*(?:(?:"[^"]*"|'[^']*'|[\w.-]+)\s*:(?:\s+|(?=["'\[{])|$))?""")
_BRACKET = re.compile(r"[\[{]")
_QUOTED = r""""(?:[^"\\]|\\.)*"|'[^']*'"""
_MAYBE_OPEN = re.compile(r""""(?:[^"\\]|\\.)*"?|'[^']*'?""")
_VALUE = re.compile(rf"""{_QUOTED}|\{{(?:{_QUOTED}|[^{{}}"'])*\}}|\[(?:{_QUOTED}|[^\[\]"'])*\]|[^\s"'\[{{][^,\]}}]*""")
"""A whole value inside braces or brackets, and on one line."""


def looks_secret(name: str, value: object) -> bool:
    """Tell whether the value of this name is probably a secret; numbers, paths and special tokens are not."""
    if not isinstance(value, str):
        return False
    return _KNOWN.search(value) is not None or (_names_a_secret(name) and _HARMLESS_VALUE.fullmatch(value) is None)


def masked(name: str, value: Any) -> Any:
    """Return a value with everything hidden in it that is probably a secret."""
    if isinstance(value, dict):
        return {key: masked(str(key), item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [masked(name, item) for item in value]
    return HIDDEN if looks_secret(name, value) else value


def hide_known(text: str) -> str:
    """Hide what has the form of a key in any text."""
    return _KNOWN.sub(HIDDEN, text)


def hide_in_line(line: str) -> str:
    """Hide secrets in a line of a configuration file, each character by a star, so that columns stay."""

    def stars(match: re.Match[str]) -> str:
        start, end = match.start("value") - match.start(), match.end("value") - match.start()
        whole, value = match.group(), match["value"]
        hidden = looks_secret(match["name"], value.strip("\"'"))
        return whole[:start] + "*" * len(value) + whole[end:] if hidden else whole

    return _KNOWN.sub(lambda match: "*" * len(match.group()), _SETTING.sub(stars, line))


def is_confidential(path: Iterable[str | int]) -> bool:
    """Tell whether no value at this path of a configuration is to be shown: a variable's, or that of a secret name."""
    return any(isinstance(name, str) and (name in _SECTIONS or _names_a_secret(name)) for name in path)


def hide_in_message(path: Iterable[str | int], message: str) -> str:
    """Hide the value that the message of a problem at `path` ends with, if that is confidential."""
    return _GOT.sub(f"got {HIDDEN}", message) if is_confidential(path) else message


def hide_in_text(text: str) -> list[str]:
    """Return the lines of a configuration file, with stars for what has a confidential name, whatever kind it is of.

    An excerpt is most often shown of a text that is broken, so this reads lines and does not parse. What belongs to a
    confidential name is what is indented further, or what its brackets enclose; where that is not sure, it is hidden.
    """
    lines: list[str] = []
    inside: int | None = None  # how far the confidential name is indented
    depth = 0  # of its brackets
    is_json = text.lstrip()[:1] in ("{", "[")
    for line in text.splitlines():
        content = line.lstrip()
        indent = len(line) - len(content)
        is_in_list = indent == inside and content.startswith("-")
        if inside is not None and depth <= 0 and indent <= inside and not is_in_list and content[:1] not in ("", "#"):
            inside = None
        was_open = inside is not None and depth > 0
        if inside is None:
            shown, goes_on = _hide_inside(line, is_json)
            inside, depth = indent if goes_on else None, 0
        else:
            shown = "".join(_FIRST_NAME.findall(line)[:1])
        hidden = line[len(shown) :].rstrip()
        lines.append(shown + "*" * len(hidden))
        if not hidden:
            continue
        brackets = _MAYBE_OPEN.sub("", hidden)
        depth += sum(map(brackets.count, "[{")) - sum(map(brackets.count, "]}"))
        if was_open and depth <= 0:
            inside = None
    return lines


def _hide_inside(line: str, is_json: bool) -> tuple[str, bool]:
    """Hide the confidential values that end on this line; of another one, end the line behind its name.

    Returns:
        The line, and whether there is such another one.
    """
    bracket = _BRACKET.search(line)
    parts: list[str] = []
    done = position = 0
    while (name := _NAME.search(line, position)) is not None:
        position = name.end()
        if is_confidential([name["name"]]):
            parts.append(line[done:position])
            value = _VALUE.match(line, position) if is_json or (bracket and bracket.start() < name.start()) else None
            if value is None:
                return "".join(parts), True
            parts.append("*" * len(value.group().rstrip()))
            done = position = position + len(parts[-1])
    return "".join([*parts, line[done:]]), False


def _names_a_secret(name: str) -> bool:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", "_", name.rpartition(".")[2]).lower()
    return _SECRET_NAME.search(words) is not None and _SPECIAL_TOKEN.search(words) is None
