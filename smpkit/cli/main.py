"""The `smpkit` command: a table of commands that are imported only when they run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import click

import smpkit
from smpkit.cli import _console
from smpkit.cli._boundary import exit_code_of
from smpkit.cli._commit import commit

__all__ = ["COMMANDS", "cli", "main"]


class Entry(NamedTuple):
    """A command before it is imported: where it is, and its lines in `smpkit --help`."""

    home: str
    help: str
    section: str


COMMANDS: dict[str, Entry] = {
    "init": Entry("smpkit.cli.init:init", "Write a job file, and a script that trains where there is none.", "Start"),
    "doctor": Entry(
        "smpkit.cli.doctor:doctor",
        "Check this machine, the back end, and what a job names.",
        "Start",
    ),
    "completion": Entry("smpkit.cli.completion:completion", "Print the completion script of SHELL.", "Start"),
    "validate": Entry(
        "smpkit.cli.validate:validate", "Check a job file and report every problem, with its line.", "Before"
    ),
    "plan": Entry("smpkit.cli.plan:plan", "Show what a job would do: ranks, schedule, parts, memory.", "Before"),
    "calibrate": Entry(
        "smpkit.cli.calibrate:calibrate", "Measure this machine, for `smpkit tune` and `smpkit plan`.", "Before"
    ),
    "tune": Entry("smpkit.cli.tune:tune", "Search for the fastest configuration of a job.", "Before"),
    "schema": Entry("smpkit.cli.schema:schema", "Print the JSON Schema of the configuration.", "Before"),
    "run": Entry(
        "smpkit.cli.run:run",
        "Run a job on this machine, with the launcher of the training image or in the image itself.",
        "Run",
    ),
    "compat": Entry(
        "smpkit.cli.compat:compat",
        "Run a command in which `import smdistributed.modelparallel.torch` finds smpkit.",
        "Run",
    ),
    "image": Entry("smpkit.cli.image:image", "Build the training image on any base.", "Run"),
    "submit": Entry(
        "smpkit.cli.submit:submit", "Start a managed job, on SageMaker or a cluster, and print its name.", "Run"
    ),
    "jobs": Entry("smpkit.cli.jobs:jobs", "List managed jobs, newest first.", "Run"),
    "status": Entry(
        "smpkit.cli.status:status",
        "Show what a job is doing, or why it failed.",
        "Run",
    ),
    "logs": Entry("smpkit.cli.logs:logs", "Print the log of a run or a job, by rank or host if asked.", "Run"),
    "wait": Entry(
        "smpkit.cli.wait:wait",
        "Wait for a job; the exit code is its fate.",
        "Run",
    ),
    "stop": Entry("smpkit.cli.stop:stop", "Stop a job, with time to save.", "Run"),
    "resume": Entry(
        "smpkit.cli.resume:resume",
        "Start a job that goes on from another's checkpoints.",
        "Run",
    ),
    "export": Entry(
        "smpkit.cli.export:export", "Write a checkpoint in the sharded layout of another library.", "After"
    ),
    "runs": Entry("smpkit.cli.runs:runs", "List the runs below this folder, or show one, or compare several.", "After"),
    "report": Entry("smpkit.cli.report:report", "Write a run as one HTML file, or two side by side.", "After"),
    "timeline": Entry(
        "smpkit.cli.timeline:timeline", "Show a step as it was executed, beside the planned one.", "After"
    ),
}
"""All commands in the order of `--help`, so that it needs no command's imports. A test keeps the texts equal."""


class _Commands(click.Group):
    """Imports a command when it is asked for, and turns every error into a message and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].home.partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            raise _console.UnknownCommand(args[0], list(COMMANDS), ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        width = max(map(len, COMMANDS))
        for section in dict.fromkeys(entry.section for entry in COMMANDS.values()):
            with formatter.section(section):
                formatter.write_dl(
                    [(name.ljust(width), entry.help) for name, entry in COMMANDS.items() if entry.section == section]
                )

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
@click.option("-v", "--verbose", count=True, help="Say more; twice for everything.")
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
