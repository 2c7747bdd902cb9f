"""Recognise what is probably a secret, by its name or by its form, and hide it in all that is shown."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["HIDDEN", "hide_in_line", "hide_known", "looks_secret", "masked"]

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
_SETTING = re.compile(
    r"""(?P<name>[A-Za-z_][\w.-]*)["']?\s*[:=]\s*(?P<value>"(?:[^"\\]|\\.)*"|'[^']*'|[^\s,{}\[\]"'#]+)"""
)


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


def _names_a_secret(name: str) -> bool:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", "_", name.rpartition(".")[2]).lower()
    return _SECRET_NAME.search(words) is not None and _SPECIAL_TOKEN.search(words) is None
