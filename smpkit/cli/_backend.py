"""What commands for managed jobs share: the options, opening the back end, and following a job.

::

    @click.command()
    @backend_options
    def stop(name: str, chosen: BackendChoice) -> None:
        Job(name, chosen.open()).stop()
"""

from __future__ import annotations

import contextlib
import functools
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from smpkit.cli import _console
from smpkit.config.words import coloured
from smpkit.errors import SmpkitError

if TYPE_CHECKING:
    from smpkit.config.job import JobConfig
    from smpkit_estimator.backend import Backend, LogLine
    from smpkit_estimator.follow import Notice
    from smpkit_estimator.job import Job

__all__ = ["BackendChoice", "backend_options", "follow_job", "print_lines", "tell_if_interrupted", "wait_for_job"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

DEFAULT = "sagemaker"
_HOST_COLORS = ("cyan", "green", "yellow", "magenta", "blue", "red")


@dataclass(frozen=True)
class BackendChoice:
    """Which back end the user means."""

    profile: str | None = None
    region: str | None = None
    name: str | None = None
    """None: the one that the job file names, else SageMaker."""

    def open(self, job: JobConfig | None = None) -> Backend:
        """Return the back end; nothing is asked of it yet.

        Args:
            job: a job file whose choice counts where the command line has none.
        """
        from smpkit_estimator.backend import Access, open_backend

        named = job.backend.chosen if job is not None else None
        name, access = self.name or named or DEFAULT, Access(self.profile, self.region)
        options = f" --backend {named}" if self.name is None and named is not None else ""
        if name == "kubernetes" and job is not None:
            kubernetes = job.backend.kubernetes
            access = Access(self.profile or kubernetes.context, self.region or kubernetes.namespace)
            options += f" --profile {access.profile}" if access.profile != self.profile else ""
            options += f" --region {access.region}" if access.region != self.region else ""
        if options:
            console = _console.current()
            click.get_current_context().obj = replace(console, options=f"{console.options}{options}")
        return open_backend(name, access)


class _Name(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click only
    """The name of a back end; others than smpkit's own are looked for when one is asked for."""

    name = "backend"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002
        from smpkit_estimator.backend import known_backends

        return [CompletionItem(name) for name in known_backends() if name.startswith(incomplete)]


def backend_options(function: _Function) -> _Function:
    """Give a command `--profile`, `--region` and `--backend`, as the argument `chosen`."""

    @functools.wraps(function)
    def command(*args: Any, profile: str | None, region: str | None, backend: str | None, **options: Any) -> Any:
        _carry_options(("profile", profile), ("region", region), ("backend", backend))
        try:
            return function(*args, chosen=BackendChoice(profile, region, backend), **options)
        except SmpkitError as error:
            if error.hint is not None:
                error.hint = _console.current().complete(error.hint)
            raise

    profile = click.option("--profile", metavar="NAME", help="AWS profile, or context of the kubeconfig.")
    region = click.option("--region", metavar="NAME", help="AWS region, or namespace of Kubernetes.")
    backend = click.option(
        "--backend",
        type=_Name(),
        metavar="NAME",
        envvar="SMPKIT_BACKEND",
        help="`sagemaker`, `slurm`, `kubernetes` or `batch`. Default: the job file's, else `sagemaker`.",
    )
    decorated: Any = profile(region(backend(command)))
    return decorated  # type: ignore[no-any-return]


def _carry_options(*given: tuple[str, str | None]) -> None:
    """Repeat the options of this command in commands that messages name; those of the environment apply anyway."""
    ctx = click.get_current_context()
    typed = [
        f" --{name} {shlex.quote(value)}"
        for name, value in given
        if value is not None and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
    ]
    ctx.obj = replace(_console.current(), options="".join(typed))


@contextlib.contextmanager
def tell_if_interrupted(job: Job) -> Iterator[None]:
    """Say, if Ctrl-C comes while a job is being started, that there may be one: its name was not printed yet."""
    try:
        yield
    except KeyboardInterrupt:
        console = _console.current()
        console.note(f"\n`{job.name}` was being started, and may have been")
        console.hint(f"`smpkit status {job.name}` tells, `smpkit stop {job.name}` stops it")
        raise


def follow_job(job: Job, show: Callable[[], None] | None = None) -> int:
    """Show a job's lines until it is over, and its end; return the exit code. Ctrl-C ends the showing, not the job.

    Args:
        job: what to follow.
        show: prints the lines; None prints all of them.
    """
    from smpkit.cli._show import show_end

    try:
        if show is None:
            print_lines(job.logs(follow=True))
        else:
            show()
    except KeyboardInterrupt:
        console = _console.current()
        console.note(f"\n`{job.name}` goes on; this only stopped following it")
        console.hint(f"`smpkit logs -f {job.name}` follows it again, `smpkit stop {job.name}` stops it")
        return 130
    return show_end(job.status())


def wait_for_job(job: Job) -> int:
    """Wait for a job, saying each phase, and show its end; return the exit code. Ctrl-C ends only the waiting."""
    from smpkit.cli._show import show_end

    console = _console.current()
    try:
        state = job.wait(on_change=lambda each: None if each.over else console.note(f"{each.phase}: {each.message}"))
    except KeyboardInterrupt:
        console.note(f"\n`{job.name}` goes on; `smpkit stop {job.name}` stops it")
        return 130
    return show_end(state)


def print_lines(lines: Iterator[LogLine | Notice]) -> None:
    """Print lines to stdout with their host, and notices to stderr; without control characters."""
    from smpkit_estimator.follow import Notice

    console = _console.current()
    colors: dict[str, str] = {}
    for line in lines:
        if isinstance(line, Notice):
            (console.warn if line.warning else console.note)(coloured(line.text))
            continue
        color = colors.setdefault(line.host, _HOST_COLORS[len(colors) % len(_HOST_COLORS)])
        click.echo(f"{click.style(line.host, fg=color)} {coloured(line.text)}")
