"""What commands that talk to the cloud share: the options, opening it, and following a job.

::

    @click.command()
    @cloud_options
    def stop(name: str, cloud: CloudChoice) -> None:
        Job(name, cloud.open()).stop()
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import shlex
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from smpkit.cli import _console
from smpkit.config.words import coloured, printable, quoted
from smpkit.errors import SmpkitError, UsageError

if TYPE_CHECKING:
    from smpkit_estimator.cloud import Cloud
    from smpkit_estimator.follow import Notice
    from smpkit_estimator.job import Job
    from smpkit_estimator.log_reader import LogLine
    from smpkit_estimator.sagemaker import Session

__all__ = ["CloudChoice", "cloud_options", "follow_job", "print_lines", "tell_if_interrupted"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

_FASTEST = 1e6
_HOST_COLORS = ("cyan", "green", "yellow", "magenta", "blue", "red")


@dataclass(frozen=True)
class CloudChoice:
    """Which cloud the user means."""

    profile: str | None = None
    region: str | None = None
    backend: str = "sagemaker"

    def open(self) -> Cloud:
        """Return the cloud; nothing is asked of it yet."""
        from smpkit_estimator.cloud import Cloud
        from smpkit_estimator.sagemaker import open_session

        return Cloud(_demonstration() if self.backend == "fake" else open_session(self.profile, self.region))


def cloud_options(function: _Function) -> _Function:
    """Give a command `--profile`, `--region` and `--backend`, as the argument `cloud`."""

    @functools.wraps(function)
    def command(*args: Any, profile: str | None, region: str | None, backend: str, **options: Any) -> Any:
        console = _carry_options(("profile", profile), ("region", region), ("backend", backend))
        try:
            return function(*args, cloud=CloudChoice(profile, region, backend), **options)
        except SmpkitError as error:
            if error.hint is not None:
                error.hint = console.complete(error.hint)
            raise

    profile = click.option("--profile", metavar="NAME", help="AWS profile; default: as the AWS CLI has it.")
    region = click.option("--region", metavar="NAME", help="AWS region; default: as the AWS CLI has it.")
    backend = click.option(
        "--backend",
        type=click.Choice(["sagemaker", "fake"]),
        default="sagemaker",
        show_default=True,
        envvar="SMPKIT_BACKEND",
        help="`fake` plays a job on this machine in seconds, for demonstrations.",
    )
    decorated: Any = profile(region(backend(command)))
    return decorated  # type: ignore[no-any-return]


def _carry_options(*given: tuple[str, str | None]) -> _console.Console:
    """Repeat the options of this command in commands that messages name; those of the environment apply anyway."""
    ctx = click.get_current_context()
    typed = [
        f" --{name} {shlex.quote(value)}"
        for name, value in given
        if value is not None and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
    ]
    ctx.obj = replace(_console.current(), options="".join(typed))
    return _console.current()


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


def follow_job(job: Job) -> int:
    """Show a job's lines until it is over, and its end; return the exit code. Ctrl-C ends the showing, not the job."""
    from smpkit.cli._show import show_end

    try:
        print_lines(job.logs(follow=True))
    except KeyboardInterrupt:
        console = _console.current()
        console.note(f"\n`{job.name}` goes on; this only stopped following it")
        console.hint(f"`smpkit logs -f {job.name}` follows it again, `smpkit stop {job.name}` stops it")
        return 130
    return show_end(job.status())


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


# ---- the demonstration ----------------------------------------------------------------------------------------------


def _demonstration() -> Session:
    """Return a fake that keeps its jobs between commands; in a second about a minute of its time passes."""
    # By name: the product imports nothing of `smpkit.testing`, which import-linter checks.
    testing: Any = importlib.import_module("smpkit.testing")
    play: Any = importlib.import_module("smpkit.testing.fake_sagemaker.demonstration")
    speed, folder = _speed(), _demonstration_folder()
    try:
        clock = testing.FastClock(speed, _origin(folder))
        fake: Session = testing.FakeSageMaker(play.demonstration_script, clock=clock, file=folder / "jobs.json")
    except ValueError:
        raise UsageError(
            f"the jobs of the fake in {folder} are damaged", hint=f"`rm -r {folder}` forgets them"
        ) from None
    return fake


def _speed() -> float:
    text = os.environ.get("SMPKIT_FAKE_SPEED", "60")
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0 < speed <= _FASTEST:
        raise UsageError(f"SMPKIT_FAKE_SPEED is {quoted(text)}, and must be a number from above 0 to {_FASTEST:,.0f}")
    return speed


def _demonstration_folder() -> Path:
    chosen = os.environ.get("SMPKIT_FAKE_DIR")
    folder = Path(chosen) if chosen else Path(tempfile.gettempdir()) / f"smpkit-fake-{os.getuid()}"
    hint = "set SMPKIT_FAKE_DIR to a folder of yours"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"{printable(str(folder))} cannot be made: {reason}", hint=hint) from None
    if folder.stat().st_uid != os.getuid():
        raise UsageError(f"{printable(str(folder))} belongs to somebody else", hint=hint)
    return folder


def _origin(folder: Path) -> datetime:
    """Return when the demonstration began: all its processes count from there."""
    file = folder / "began"
    if not file.exists():
        file.write_text(datetime.now(timezone.utc).isoformat(), encoding="utf-8")
    return datetime.fromisoformat(file.read_text(encoding="utf-8"))
