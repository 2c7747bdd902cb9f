"""Recognise what is probably a secret, by its name or by its form, and hide it in all that is shown."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

HIDDEN = "(hidden)"
"""What is shown in place of a secret."""

# The words of some run together, as in `PGPASSWORD` and `NGROK_AUTHTOKEN`, and some are numbered.
_SECRET_NAME = re.compile(
    r"(?:^|_)(?:[a-z0-9]*(?:password|passwd|passphrase|secrets?|token|credentials?|apikey)"
    r"|pwd|authorization|connection_string|(?:db|database|user|admin|smtp|redis|pg)_?pass"
    r"|(?:api|app|application|access|secret|priv|private|auth|account|client|service|storage|database|db|ssh|deploy"
    r"|encryption|signing|license|wandb|openai)_?key(?:_id)?)(?:_?v?\d+)?$"
)
_SPECIAL_TOKEN = re.compile(
    r"(?:^|_)(?:eos|bos|pad|padding|unk|sep|cls|mask|image|start|end|stop|special|separator|fill|prefix|suffix|begin"
    r"|first|last|next|prev|new|class|audio|video|per|sub|fim|eot|sot|null|blank|end_of_text)_?tokens?(?:_?\d+)?$"
)
_KNOWN = re.compile(
    r"(?<![A-Za-z0-9])(?:(?:AKIA|ASIA)[0-9A-Z]{16}|hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{36,}"
    r"|github_pat_[A-Za-z0-9_]{40,}|glpat-[A-Za-z0-9_-]{20,}|xox[abprs]-[A-Za-z0-9-]{10,}|sk-[A-Za-z0-9_-]{20,}"
    r"|AIza[A-Za-z0-9_-]{35}|eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*)(?![A-Za-z0-9])"
    r"|(?<=://hooks\.slack\.com/services/)[A-Za-z0-9/]+"
    r"|(?<=://)(?:[^\s/:@]*:[^\s/]+|[\w.~-]{20,})(?=@(?!sha256:))"
    r"|-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----"
)
"""Forms of keys: AWS, Hugging Face, GitHub, GitLab, Slack, OpenAI, Google, JWT, `user:password@` and `token@` in URLs,
private keys."""

_HARMLESS_VALUE = re.compile(r"\s*|true|false|none|null|auto|default|[-+.\d]+|<.*>|\[.*\]|(?:/|\./|s3://|~/).*", re.I)
# Names are short and have a beginning, or a search in a long word would take hours.
_SETTING = re.compile(
    r"""(?<!\w)(?P<name>[A-Za-z_][\w.-]{0,255})["']?\s*[:=]\s*"""
    r"""(?P<value>"(?:[^"\\]|\\.)*"|'[^']*'|(?:(?:Bearer|Basic|Token) +)?[^\s,{}\[\]"'#]+)"""
)
_OPTION = re.compile(r"""(?<!\S)--(?P<name>[A-Za-z][\w.-]{0,255})\s+(?P<value>"(?:[^"\\]|\\.)*"|'[^']*'|[^\s"'-]\S*)""")

_SECTIONS = frozenset({"env", "environment", "secrets"})
"""What is below them is not shown in errors, whatever its name: variables are how programs get their secrets."""

_GOT = re.compile(r"\bgot (?!(?:a list|a mapping|a tuple|null|an object of type \w+)$).*", re.DOTALL)
_NAME = re.compile(r"""(?<!\w)(?P<name>[A-Za-z_][\w.-]{0,255})["']?\s*:(?:\s+|(?=["'\[{])|$)""")
_FIRST_NAME = re.compile(r"""\s*(?:-\s+)*(?:(?:"[^"]*"|'[^']*'|[\w.-]+)\s*:(?:\s+|(?=["'\[{])|$))?""")
_QUOTED = re.compile(r""""(?:[^"\\]|\\.)*"?|'[^']*'?""")


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
    if looks_secret(name, value):
        return HIDDEN
    return hide_in_line(value) if isinstance(value, str) else value


def hide_known(text: str) -> str:
    """Hide what has the form of a key in any text."""
    return _KNOWN.sub(HIDDEN, text)


def hide_in_line(line: str) -> str:
    """Hide secrets in a line of a file, script or command, each character by a star, so that columns stay."""

    def stars(match: re.Match[str], inside: Callable[[str], str] = str) -> str:
        start, end = match.start("value") - match.start(), match.end("value") - match.start()
        whole, value = match.group(), match["value"]
        hidden = looks_secret(match["name"], value.strip("\"'"))
        return whole[:start] + ("*" * len(value) if hidden else inside(value)) + whole[end:]

    def outer(match: re.Match[str]) -> str:  # `--export=HF_TOKEN=...` is a setting in a setting
        return stars(match, lambda value: _SETTING.sub(stars, value))

    return _KNOWN.sub(lambda match: "*" * len(match.group()), _OPTION.sub(stars, _SETTING.sub(outer, line)))


def is_confidential(path: Iterable[str | int]) -> bool:
    """Tell whether no value at this path of a configuration is to be shown: a variable's, or that of a secret name."""
    return any(isinstance(name, str) and (name in _SECTIONS or _names_a_secret(name)) for name in path)


def hide_in_message(path: Iterable[str | int], message: str) -> str:
    """Hide the value that the message of a problem at `path` ends with, if that is confidential."""
    return _GOT.sub(f"got {HIDDEN}", message) if is_confidential(path) else message


@functools.lru_cache(maxsize=8)
def hide_in_text(text: str) -> list[str]:
    """Return the lines of a configuration file without secrets: behind a confidential name there are stars.

    An excerpt is most often shown of a text that is broken, so this reads lines and does not parse. To a confidential
    name belongs the rest of its line, and what is indented further or enclosed by its brackets.
    """
    lines: list[str] = []
    inside: int | None = None  # how far the confidential name is indented
    depth = 0  # of its brackets
    for line in text.splitlines():
        content = line.lstrip()
        indent = len(line) - len(content)
        goes_on = content[:1] in ("", "#") or (indent == inside and content[:1] == "-")
        if inside is not None and depth <= 0 and indent <= inside and not goes_on:
            inside = None
        shown = line
        if inside is not None:
            first = _FIRST_NAME.match(line)
            shown = first.group() if first else ""
        else:
            name = next((name for name in _NAME.finditer(line) if is_confidential([name["name"]])), None)
            if name is not None:
                shown, inside, depth = line[: name.end()], indent, 0
        hidden = line[len(shown) :].rstrip()
        brackets = _QUOTED.sub("", hidden)
        depth += sum(map(brackets.count, "[{")) - sum(map(brackets.count, "]}"))
        lines.append(hide_in_line(shown) + "*" * len(hidden))
    return lines


def _names_a_secret(name: str) -> bool:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", "_", name.rpartition(".")[2]).lower()
    return _SECRET_NAME.search(words) is not None and _SPECIAL_TOKEN.search(words) is None
