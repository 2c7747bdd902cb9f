"""Turn hyperparameters into the script's command-line arguments, as the AWS training toolkit maps them.

Lists and mappings are the exception: they are JSON, which SDK v3's scripts give too. The toolkit writes lists as Python
does (`[1, None]`), and mappings as `a=1,b=None`, which nothing can read back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["MP_PARAMETERS", "compact", "script_arguments"]

MP_PARAMETERS = "mp_parameters"


def script_arguments(
    hyperparameters: Mapping[str, Any], extra: Sequence[str] = (), *, pass_mp_parameters: bool = False
) -> list[str]:
    """Return `--key value ...` sorted by key (`-k value` for one letter), followed by `extra` as it is.

    `mp_parameters` is left off unless asked for: most scripts do not declare it, and it reaches them through
    `SM_HP_MP_PARAMETERS` anyway. When asked for, it has the toolkit's form `--mp_parameters ddp=True,microbatches=4`.
    """
    arguments: list[str] = []
    for name in sorted(hyperparameters):
        value = hyperparameters[name]
        if name != MP_PARAMETERS:
            arguments += [f"-{name}" if len(name) == 1 else f"--{name}", _text(value)]
        elif pass_mp_parameters and value:
            pairs = (f"{key}={_text(value[key])}" for key in sorted(value))
            arguments += [f"--{name}", ",".join(pairs)]
    return [*arguments, *extra]


def compact(value: Any) -> str:
    """Return `value` as JSON without blanks and with sorted keys: one value, one text, on every host."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _text(value: Any) -> str:
    """Return the argument's text: containers as JSON, null as an empty text, else as Python prints it (`True`)."""
    if value is None:
        return ""
    return json.dumps(value, sort_keys=True) if isinstance(value, dict | list) else str(value)
