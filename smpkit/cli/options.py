"""Options that several commands share, each with one meaning: job files, back ends, images, numbers, lengths of time.

`refuse` is for those that a command cannot use as it is called.

::

    @click.command()
    @job_arguments
    @backend_options
    def submit(file: Path, overrides: list[Override], chosen: BackendChoice) -> None:
        job = read_job(file, overrides)      # a LoadedJob; every problem is reported by `smpkit.cli.main`
        backend = chosen.open(job.config)
"""

from __future__ import annotations

import functools
import math
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from click.core import ParameterSource

from smpkit.cli import _console
from smpkit.errors import UsageError

if TYPE_CHECKING:
    from smpkit.config.job import JobConfig
    from smpkit.config.load import LoadedJob, Override
    from smpkit_estimator.backend import Backend

_Function = TypeVar("_Function", bound=Callable[..., Any])
Texts = tuple[str, ...]


def refuse(names: Iterable[str], why: str, hint: str) -> None:
    """Refuse parameters of the present command that its command line has: they cannot be given `why`."""
    if options := [f"`{_shown(param)}`" for param in _on_command_line(names)]:
        raise UsageError(f"{' and '.join(options)} cannot be given {why}", hint=hint)


def _on_command_line(names: Iterable[str]) -> list[click.Parameter]:
    """Return those that the command line has; what the environment sets applies where it can."""
    ctx, wanted = click.get_current_context(), frozenset(names)
    params = [param for param in ctx.command.params if param.name in wanted]
    return [param for param in params if ctx.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE]


def _shown(param: click.Parameter) -> str:
    return max(param.opts, key=len) if isinstance(param, click.Option) else param.human_readable_name


# ---- a job file ------------------------------------------------------------------------------------------------------


def job_arguments(function: _Function) -> _Function:
    """Give a command the argument FILE (as `file`) and `--set`, `-p` and `-H` (together as `overrides`)."""
    return click.argument("file", type=click.Path(path_type=Path))(override_options(function))


def override_options(function: _Function) -> _Function:
    """Give a command `--set`, `-p` and `-H`; it gets them in this order as `overrides`, as `load_job` takes them."""
    setting = "Change a setting for this call, such as `compute.instance_count=4`; values are read as YAML."
    parameter = "Change a modelparallel parameter for this call, such as `microbatches=8`."
    hyperparameter = "Change a hyperparameter for this call: short for `--set hyperparameters.KEY=VALUE`."
    repeatable = functools.partial(click.option, multiple=True, metavar="KEY=VALUE")

    @repeatable("--set", "settings", help=setting)
    @repeatable("-p", "parameters", help=parameter)
    @repeatable("-H", "hyperparameters", help=hyperparameter)
    @functools.wraps(function)
    def command(*args: Any, settings: Texts, parameters: Texts, hyperparameters: Texts, **kwargs: Any) -> Any:
        values = {"--set": settings, "-p": parameters, "-H": hyperparameters}
        return function(*args, overrides=[(flag, text) for flag in values for text in values[flag]], **kwargs)

    return command  # type: ignore[return-value]


def read_job(file: Path, overrides: Sequence[Override], *, script: bool = False) -> LoadedJob:
    """Read and check a job file, or with `script` also a script that has none, and print its warnings."""
    from smpkit.config.load import is_script, load_job, load_script

    job = load_script(file, overrides) if script and is_script(file) else load_job(file, overrides)
    for notice in job.notices:
        _console.warn(notice)
    return job


# ---- a back end ------------------------------------------------------------------------------------------------------

_DEFAULT: Final = "sagemaker"
ACCESS: Final = ("profile", "region", "backend")
"""The parameters of `backend_options`."""
OF_A_JOB: Final = ("without the name of a job", "`smpkit jobs` lists them")
"""Why `ACCESS` is refused where no name is given."""


@dataclass(frozen=True)
class BackendChoice:
    """Which back end the user means."""

    profile: str | None = None
    region: str | None = None
    name: str | None = None
    """None: the one that the job file names, else SageMaker."""
    asked: bool = False
    """Whether the command line says any of this."""

    def open(self, job: JobConfig | None = None) -> Backend:
        """Return the back end, where the command line names none that of the job; nothing is asked of it yet."""
        from smpkit_estimator.backend import Access, open_backend

        named = job.backend.chosen if job is not None else None
        name, access = self.name or named or _DEFAULT, Access(self.profile, self.region)
        if name == "slurm":
            refuse(("profile", "region"), "for Slurm, which has neither", "remove it")
        options = f" --backend {named}" if self.name is None and named is not None else ""
        if name == "kubernetes" and job is not None:
            kubernetes = job.backend.kubernetes
            access = Access(self.profile or kubernetes.context, self.region or kubernetes.namespace)
            options += f" --profile {access.profile}" if access.profile != self.profile else ""
            options += f" --region {access.region}" if access.region != self.region else ""
        if options:
            _console.repeat_in_commands(options)
        return open_backend(name, access)


def backend_options(function: _Function) -> _Function:
    """Give a command `--profile`, `--region` and `--backend`, as the argument `chosen`."""
    known = "`sagemaker`, `slurm`, `kubernetes` or `batch`. Default: the job file's, else `sagemaker`."

    @click.option("--profile", metavar="NAME", help="AWS profile, or context of the kubeconfig.")
    @click.option("--region", metavar="NAME", help="AWS region, or namespace of Kubernetes.")
    @click.option("--backend", metavar="NAME", envvar="SMPKIT_BACKEND", help=known)
    @functools.wraps(function)
    def command(*args: Any, profile: str | None, region: str | None, backend: str | None, **options: Any) -> Any:
        asked = [param.name for param in _on_command_line(ACCESS)]
        for name, value in zip(ACCESS, (profile, region, backend), strict=True):
            if value is not None and name in asked:
                _console.repeat_in_commands(f" --{name} {shlex.quote(value)}")
        return function(*args, chosen=BackendChoice(profile, region, backend, bool(asked)), **options)

    return command  # type: ignore[return-value]


# ---- files and images ------------------------------------------------------------------------------------------------

FILE: Final = click.Path(path_type=Path, dir_okay=False)
_FOLDER: Final = click.Path(path_type=Path, file_okay=False)
_BASE: Final = "python:3.12-slim-bookworm"
"""`smpkit_estimator.image.DEFAULT_BASE_IMAGE`, which `--help` must not import."""


def recipe_options(function: _Function) -> _Function:
    """Give a command the options that say what an image is made of: the fields of `smpkit_estimator.image.Recipe`."""
    network = "Docker's network for the build, such as `host`."
    options = (
        click.option("--base-image", default=_BASE, show_default=True, help="Any image with apt or dnf."),
        click.option("--torch", default="torch>=2.11", show_default=True, help="What pip is asked to install."),
        click.option("--wheels", type=_FOLDER, help="A folder of wheels that are preferred over the index."),
        click.option(
            "--ca", "authority", type=FILE, help="Certificates (PEM) that the build must trust, behind a proxy."
        ),
        click.option("--build-network", "network", metavar="NETWORK", help=network),
    )
    for option in reversed(options):  # the first one stands first in the help
        function = option(function)
    return function


# ---- numbers ---------------------------------------------------------------------------------------------------------


def numbers(least: float, most: float) -> Callable[[str], float]:
    """Return the type of an option that is a number: click's own let `nan` pass, and nobody can plan for `inf`."""

    def number(value: str) -> float:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not least <= number <= most:
            raise click.BadParameter(f"`{value}` is not a number from {least:g} to {most:,}")
        return number

    return number


POSITIVE: Final = numbers(1e-6, 10**9)
RANKS: Final = click.IntRange(1, 10**6)
HOSTS: Final = click.IntRange(1, 10**5)
COUNT: Final = click.IntRange(1, 10**9)


# ---- lengths of time -------------------------------------------------------------------------------------------------

_LONGEST: Final = timedelta(days=36_500)
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def length(value: str) -> timedelta:
    """The type of an option that is a length of time: `90s`, `10m`, `2h`, `1d`."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)([smhd])", value)
    if match is None:
        raise click.BadParameter(f"`{value}` is not a length of time such as `90s`, `10m`, `2h`, `1d`")
    span = timedelta(**{_UNITS[match[2]]: float(match[1])})
    if span > _LONGEST:
        raise click.BadParameter(f"`{value}` is longer than {_LONGEST.days:,} days")
    return span
