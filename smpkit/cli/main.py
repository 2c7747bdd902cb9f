"""The `smpkit` command: a table of commands that are imported only when they run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

import smpkit
from smpkit.cli import _console
from smpkit.cli._boundary import exit_code_of
from smpkit.cli._commit import commit
from smpkit.config.words import printable, suggestion
from smpkit.errors import UsageError

__all__ = ["COMMANDS", "cli", "main"]


COMMANDS: dict[str, str] = {
    "init": "Write a job file, and a script that trains where there is none.",
    "run": "Run a job on this machine, with the launcher of the training image or in the image itself.",
    "plan": "Show what a job would do: ranks, schedule, parts, memory.",
    "report": "Write a run as one HTML file, or two side by side.",
    "doctor": "Check this machine, the back end, and what a job names.",
    "validate": "Check a job file and report every problem, with its line.",
    "plan-offload-model": "Show what a step of smpkit.OffloadModel takes and holds, on one device.",
    "calibrate": "Measure this machine, for `smpkit tune` and `smpkit plan`.",
    "tune": "Search for the fastest configuration of a job.",
    "schema": "Print the JSON Schema of the configuration.",
    "compat": "Run a command in which `import smdistributed.modelparallel.torch` finds smpkit.",
    "image": "Build the training image on any base.",
    "submit": "Start a managed job, on SageMaker or a cluster, and print its name.",
    "jobs": "List managed jobs, newest first.",
    "status": "Show what a job is doing, or why it failed.",
    "logs": "Print the log of a run or a job, by rank or host if asked.",
    "stop": "Stop a job, with time to save.",
    "resume": "Start a job that goes on from another's checkpoints.",
    "export": "Write the weights of a checkpoint for other programs.",
    "runs": "List the runs below this folder, or show how one ended.",
    "timeline": "Show a step as it was executed, beside the planned one.",
}
"""Each command with its line in `--help`, which so needs no command's imports; a test keeps the texts equal.

Command `x-y` is the object `x_y` of the module `smpkit.cli.x_y`.
"""
_FIRST = 5
"""So many come first in `--help`; the rest is under "More"."""


class _Commands(click.Group):
    """Imports a command when it is asked for, and turns every error into a message and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        command: click.Command = getattr(importlib.import_module(f"smpkit.cli.{name}"), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            hint = suggestion(args[0], COMMANDS) or "`smpkit --help` shows the usage"
            raise UsageError(f"no such command: `{printable(args[0])}`", hint=hint)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        width = max(map(len, COMMANDS))
        lines = [(name.ljust(width), text) for name, text in COMMANDS.items()]
        for section, part in (("Commands", lines[:_FIRST]), ("More", lines[_FIRST:])):
            with formatter.section(section):
                formatter.write_dl(part)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run, and leave with an exit code; without `standalone_mode` errors are the caller's, as click has it."""

        def run() -> Any:
            return super(_Commands, self).main(args, prog_name or self.name, complete_var, False, **extra)

        if not standalone_mode:
            return run()
        sys.exit(exit_code_of(run))


def _show_version(ctx: click.Context) -> None:
    known = commit()
    click.echo(f"smpkit, version {smpkit.__version__}" + (f" (commit {known})" if known else ""))
    ctx.exit()


@click.group(
    "smpkit",
    cls=_Commands,
    invoke_without_command=True,
    subcommand_metavar="COMMAND [ARGS]...",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=lambda ctx, _, asked: _show_version(ctx) if asked else None,
    help="Show the version and exit.",
)
@click.option("-v", "--verbose", count=True, help="Say more.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing but errors.")
@click.pass_context
def cli(ctx: click.Context, verbose: int, quiet: bool) -> None:
    """Train PyTorch models that do not fit on one GPU."""
    _console.set_up(ctx, -1 if quiet else verbose)
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line with `arguments` (those of the process if None), and exit."""
    cli.main(arguments)
    raise AssertionError("the command line always exits")
