"""What commands that read a job file share: the argument, `--set` with its short forms, and reading with its warnings.

::

    @click.command()
    @job_arguments
    def plan(file: Path, overrides: tuple[str, ...]) -> None:
        job = read_job(file, overrides)   # a LoadedJob; every problem is reported by the boundary
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from smpkit.cli import _console

if TYPE_CHECKING:
    from smpkit.config.load import LoadedJob

__all__ = ["job_arguments", "looks_like_a_file", "override_options", "read_job"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def job_arguments(function: _Function) -> _Function:
    """Give a command the argument FILE (as `file`) and `--set`, `-p` and `-H` (together as `overrides`)."""
    return click.argument("file", type=click.Path(path_type=Path))(override_options(function))


def override_options(function: _Function) -> _Function:
    """Give a command `--set`, `-p` and `-H`; it gets them in this order as `overrides`, as `load_job` takes them."""

    @functools.wraps(function)
    def command(*args: Any, parameters: tuple[str, ...], hyperparameters: tuple[str, ...], **kwargs: Any) -> Any:
        kwargs["overrides"] = (
            *kwargs["overrides"],
            *(f"-p {each}" for each in parameters),
            *(f"-H {each}" for each in hyperparameters),
        )
        return function(*args, **kwargs)

    for option in (
        click.option(
            "-H",
            "hyperparameters",
            multiple=True,
            metavar="KEY=VALUE",
            help="Change a hyperparameter for this call: short for `--set hyperparameters.KEY=VALUE`.",
        ),
        click.option(
            "-p",
            "parameters",
            multiple=True,
            metavar="KEY=VALUE",
            help="Change a modelparallel parameter for this call, such as `microbatches=8`.",
        ),
        click.option(
            "--set",
            "overrides",
            multiple=True,
            metavar="KEY=VALUE",
            help="Change a setting for this call, such as `compute.instance_count=4`; values are read as YAML.",
        ),
    ):
        command = option(command)
    return command  # type: ignore[return-value]


def read_job(file: Path, overrides: Sequence[str], *, script: bool = False) -> LoadedJob:
    """Read and check a job file, or with `script` also a script that has none, and print its warnings.

    Raises:
        ConfigError: with all problems; let it go, the boundary prints them and exits with 2.
    """
    from smpkit.config.load import is_script, load_job, load_script

    job = load_script(file, overrides) if script and is_script(file) else load_job(file, overrides)
    for notice in job.notices:
        _console.current().warn(notice)
    return job


def looks_like_a_file(text: str) -> bool:
    """Tell whether this is a file, not the name of a managed job, which has neither dots nor slashes."""
    return "." in text or "/" in text or Path(text).is_file()
