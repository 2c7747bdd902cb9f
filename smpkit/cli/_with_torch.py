"""Ask a process that imports torch, which this one does not: `python -m smpkit.torch...`, which prints JSON."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence

from smpkit.cli import _console
from smpkit.config.words import printable
from smpkit.errors import DeadlineError, SmpkitError, UsageError
from smpkit.modules import module_command


def ask(module: str, arguments: Sequence[str], what: str, needs: str, deadline_seconds: float | None) -> str:
    """Return what a module prints.

    Args:
        what: the sentence for a process that fails: "`zoo:Net` could not be described".
        needs: what needs torch, as the start of a sentence: "planning a model".
        deadline_seconds: None for work that takes as long as there is data.
    """
    command = [*module_command(module), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_seconds, check=False)
    except subprocess.TimeoutExpired:
        raise DeadlineError(f"{what} within {deadline_seconds:g} s") from None
    if done.stderr:
        _console.detail(done.stderr.rstrip())
    if done.returncode == 0:
        return done.stdout
    try:
        answer = json.loads(done.stdout)
        kind = UsageError if answer["exit_code"] == UsageError.exit_code else SmpkitError
        raise kind(printable(answer["error"]), hint=answer["hint"])
    except (ValueError, KeyError, TypeError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        hint = f"`-v` shows all it said; {needs} needs `pip install smpkit[torch]`"
        raise SmpkitError(f"{what} (exit code {done.returncode}): {printable(last)}", hint=hint) from None
