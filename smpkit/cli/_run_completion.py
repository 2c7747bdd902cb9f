"""Completion of the names of runs in the shell."""

from __future__ import annotations

from pathlib import Path

import click
from click.shell_completion import CompletionItem

__all__ = ["complete_run"]


def complete_run(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001
    """Complete the name of a run, the newest first."""
    from smpkit.observe.runs import find_runs

    return [CompletionItem(run.label) for run in reversed(find_runs(Path.cwd())) if run.label.startswith(incomplete)]
