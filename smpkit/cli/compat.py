"""`smpkit compat -- COMMAND`: run a command that finds smpkit under the name of SMP v1."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import click

from smpkit.cli import _console
from smpkit.config.words import printable
from smpkit.errors import LaunchError, UsageError
from smpkit.units import things


@click.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "--parameters",
    metavar="JSON|FILE",
    help="Model-parallel parameters for the command, as `SM_HP_MP_PARAMETERS`; they are checked first.",
)
@click.option(
    "--cuda-on-cpu",
    is_flag=True,
    help="For scripts that insist on CUDA: `torch.cuda` looks as if there were a GPU, and uses the CPU.",
)
@click.option(
    "--check",
    "only_check",
    is_flag=True,
    help="Do not run the given scripts and folders: list imports that fail, and unknown names of SMP v1.",
)
@click.option("--json", "as_json", is_flag=True, help="With `--check`: print the findings as JSON.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def compat(parameters: str | None, cuda_on_cpu: bool, only_check: bool, as_json: bool, command: tuple[str, ...]) -> int:
    """Run a command in which `import smdistributed.modelparallel.torch` finds smpkit.

    \b
    `smpkit compat -- python train.py --epochs 3`
    `smpkit compat --parameters '{"partitions": 2}' -- torchrun --nproc-per-node 2 train.py`
    `smpkit compat --check train.py`

    Put `--` before the command. Where SMP v1 itself is installed, that is what the command finds, and a note says so.
    Packages that are gone, such as Apex, have stand-ins with the names that public scripts import. `--check` ends with
    1 if a script cannot run.
    """  # noqa: D301  a backspace is how click is told to keep lines as they are
    if only_check:
        return _check(command, as_json=as_json)
    if as_json:
        raise UsageError("`--json` is for `--check`", hint="put `--` before a command that has such an option itself")
    from smpkit.config.modelparallel import ENVIRONMENT_VARIABLE
    from smpkit.drop_in import installed_one, with_drop_in, with_startup

    program = shutil.which(command[0])
    if program is None:
        raise LaunchError(f"`{command[0]}` cannot be run: there is no such program", hint="check the name and PATH")
    environ = {**os.environ, **(_parameters(parameters) if parameters is not None else {})}
    installed = installed_one()
    if installed is not None:
        _console.note(f"note: {installed} is installed and used; smpkit's is not needed")
    else:
        environ = with_drop_in(environ)
        _console.detail(f"PYTHONPATH={environ['PYTHONPATH']}")
    if cuda_on_cpu:
        environ = with_startup({**environ, "SMPKIT_CUDA_ON_CPU": "1", "CUDA_VISIBLE_DEVICES": ""})
    if ENVIRONMENT_VARIABLE in environ:  # Hugging Face's Trainer reads it, and whether the platform has enabled MPI
        environ = {"SM_FRAMEWORK_PARAMS": json.dumps({"sagemaker_mpi_enabled": True}), **environ}
    try:
        os.execve(program, list(command), environ)  # noqa: S606  what this command is for
    except OSError as error:
        raise LaunchError(f"`{program}` cannot be run: {error.strerror}") from None


def _check(paths: Sequence[str], *, as_json: bool) -> int:
    """Print what fails; 1 if the scripts cannot run because of it."""
    from smpkit.drop_in.check import check

    findings = check([Path(path) for path in paths])
    problems = sum(not finding.optional for finding in findings)
    if as_json:
        _console.print_json({"can_run": not problems, "findings": findings})
    else:
        for finding in findings:
            optional = " (where the script gets there)" if finding.optional else ""
            click.echo(printable(f"{finding.file}:{finding.line} {finding.name}: {finding.message}{optional}"))
        click.echo(f"cannot run: {things(problems, 'problem')}" if problems else "can run")
    return min(problems, 1)


def _parameters(parameters: str) -> dict[str, str]:
    """Return the variable that holds the parameters, from JSON or from a file of it."""
    from smpkit.config.modelparallel import ENVIRONMENT_VARIABLE, ModelParallelConfig

    text = parameters
    if not parameters.lstrip().startswith("{"):
        try:
            text = Path(parameters).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            hint = "give a JSON object, or the path of a file that holds one"
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise UsageError(f"`--parameters {parameters}` cannot be read: {reason}", hint=hint) from None

    class Part(ModelParallelConfig):
        """The job's parameters, without rules between them: `smp.init` in the script may give others."""

        def broken_rules(self) -> tuple[()]:
            return ()

    Part.from_sources(None, text)
    return {ENVIRONMENT_VARIABLE: text}
