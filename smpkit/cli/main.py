"""The `smpkit` command: a table of commands that are imported only when they run, and what their errors become.

==== ==========================================================================
0    done
1    the job or the operation failed (and most other errors of smpkit)
2    wrong usage or configuration
3    a bug in smpkit: the only case with a traceback
4    the cloud refused or could not be reached
130  interrupted
143  ended by SIGTERM (`run`: 1)
==== ==========================================================================
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NoReturn

import click

import smpkit
from smpkit.cli import _console
from smpkit.config.words import closest, printable, suggestion
from smpkit.errors import SmpkitError, UsageError

COMMANDS: Final[dict[str, str]] = {
    "init": "Write a job file, and a script that trains where there is none.",
    "run": "Run a job on this machine, with the launcher of the training image or in the image itself.",
    "plan": "Show what a job would do: ranks, schedule, parts, memory.",
    "report": "Write a run as one HTML file, or two side by side.",
    "doctor": "Check this machine, the cloud or cluster, and everything the job file refers to.",
    "validate": "Check a job file and report every problem, with its line.",
    "plan-offload-model": "Show what a step of smpkit.OffloadModel takes and holds, on one device.",
    "calibrate": "Measure this machine, for `smpkit tune` and the summaries of runs.",
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
_FIRST: Final = 5
"""So many come first in `--help`; the rest is under "More"."""
_RANKS: Final = {"-n", "-np", "--np", "--nproc-per-node", "--nproc_per_node"}
"""How mpirun, srun and torchrun spell `--ranks`."""
_SHORT_DEGREES: Final = {"--pp": "pipeline_parallel_degree", "--tp": "tensor_parallel_degree"}
"""Options of `smpkit plan`."""


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

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run, and leave with an exit code; without `standalone_mode` errors are the caller's, as click has it."""
        run = functools.partial(super().main, *args, standalone_mode=False, **extra)
        return sys.exit(exit_code_of(run)) if standalone_mode else run()


@click.group(
    "smpkit",
    cls=_Commands,
    invoke_without_command=True,
    subcommand_metavar="COMMAND [ARGS]...",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
@click.option("--version", is_flag=True, help="Show the version and exit.")
@click.option("-v", "--verbose", count=True, help="Say more.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing but errors.")
@click.pass_context
def cli(ctx: click.Context, version: bool, verbose: int, quiet: bool) -> None:
    """Train PyTorch models that do not fit on one GPU."""
    _console.set_up(ctx, -1 if quiet else verbose)
    if version:
        from smpkit.version import commit

        source = commit()
        click.echo(f"smpkit, version {smpkit.__version__}" + (f" (commit {source})" if source else ""))
        ctx.exit()
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line with `arguments` (those of the process if None), and exit."""
    cli.main(arguments, "smpkit")
    raise AssertionError("the command line always exits")


# ---- errors ----------------------------------------------------------------------------------------------------------


def exit_code_of(action: Callable[[], Any]) -> int:
    """Run `action`, print what goes wrong, and return the exit code; an integer that it returns is one itself."""
    try:
        result = action()
        sys.stdout.flush()  # a closed pipe must raise here, where it is caught
    except click.ClickException as error:
        return _usage(error)
    except (click.Abort, KeyboardInterrupt):
        _console.print_failure("interrupted")
        return 130
    except SmpkitError as error:
        _console.print_error(error)
        return error.exit_code
    except BrokenPipeError:
        _drop_output()
        return 1
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        if error.filename is None:  # an error of writing to an open stream
            _drop_output()
            _console.print_failure(f"cannot write: {reason}")
        else:
            _console.print_failure(f"cannot use `{printable(os.fsdecode(error.filename))}`: {reason}")
        return 1
    except Exception as error:
        sys.excepthook(*sys.exc_info())  # prints it, without the import of traceback
        hint = "send these lines with what `smpkit doctor --report` says"
        _console.print_failure(f"a bug in smpkit: {type(error).__name__}", hint)
        return 3
    return result if isinstance(result, int) else 0


def _usage(error: click.ClickException) -> int:
    """Print wrong usage like other errors: one sentence in lower case, literals in backticks, and a hint."""
    ctx = getattr(error, "ctx", None)
    message = error.format_message()
    hint = f"`{ctx.command_path} --help` shows the usage" if ctx is not None else None
    if isinstance(error, click.NoSuchOption):
        message = f"no such option: `{printable(error.option_name)}`"
        names = [name for param in ctx.command.get_params(ctx) for name in param.opts] if ctx is not None else []
        meant = _meant(error.option_name, names)
        hints = [f"did you mean `{meant}`?"] if meant else []
        # Behind the script of `run`, python and torchrun take anything.
        if "--pdb" in names and not meant.startswith(("--ranks", "-p ")):
            is_module, option = error.option_name in ("-m", "--module"), printable(error.option_name)
            module = "name a script that holds `import runpy; runpy.run_module('NAME', run_name='__main__')`"
            hints.append(module if is_module else f"`smpkit run SCRIPT -- {option} ...` gives it to the script")
        hint = " ".join(hints) or hint
    message = message.replace("valid integer range", "valid integer")
    message = re.sub(r"\s+", " ", re.sub(r"'([^' ]+)'", r"`\1`", message)).strip().rstrip(".")
    _console.print_failure(message[:1].lower() + message[1:], hint)
    return error.exit_code


def _meant(option: str, names: Sequence[str]) -> str:
    """Return what was probably meant by an option that a command lacks, of those that it has; empty if unknown."""
    from smpkit.config.modelparallel import ModelParallelConfig

    parameter = _SHORT_DEGREES.get(option, option.removeprefix("--").replace("-", "_"))
    if option in _RANKS and "--ranks" in names:
        return "--ranks"
    if parameter in ModelParallelConfig.model_fields and "-p" in names:
        return f"-p {parameter}=..."
    return closest(option, names) or ""


def _drop_output() -> None:
    """Send the rest of the output nowhere: Python flushes it at exit, and would fail there again."""
    with suppress(OSError):  # a stream of a test has no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
