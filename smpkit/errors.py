"""Every error smpkit raises on purpose, as a tree.

::

    SmpkitError                        exit code 1: the job or the operation failed
    ├── ConfigError        ValueError  exit code 2: invalid configuration; carries every problem found
    ├── UsageError         RuntimeError  exit code 2: a call that is not allowed here or now
    ├── UnsupportedError               exit code 2: legal, but not something this version or machine can do
    ├── LaunchError                    exit code 1: the ranks could not be started
    ├── DeadlineError      TimeoutError  exit code 1: somebody waited too long; says who, for whom, how long
    ├── RemoteError                    exit code 1: another rank failed; says which and why
    ├── JobError                       exit code 1: a managed job failed or was stopped; says why
    ├── CheckpointError                exit code 1: a checkpoint is missing, incomplete or of another model
    ├── ScheduleError  AssertionError  exit code 3: an order of actions that cannot run (in smpkit.plan.schedule.graph)
    └── CloudError                     exit code 4: the back end of managed jobs refused or could not be reached
        └── UnreachableError           exit code 4: no answer came; trying again may help

A message says what happened with the values, in one sentence that starts in lower case and has no full stop; the hint
says the one thing to try. Exit code 3 is kept for bugs in smpkit itself, 130 for an interrupt.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = [
    "CheckpointError",
    "CloudError",
    "ConfigError",
    "DeadlineError",
    "JobError",
    "LaunchError",
    "Problem",
    "RemoteError",
    "SmpkitError",
    "UnreachableError",
    "UnsupportedError",
    "UsageError",
    "escaped",
]

_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def escaped(text: str) -> str:
    """Escape what a terminal would obey, such as a control sequence in the name of a file; lines and tabs stay."""
    return _OBEYED.sub(lambda match: match.group().encode("unicode_escape").decode("ascii"), text)


class SmpkitError(Exception):
    """Base of all errors that smpkit raises on purpose; Python prints them, too, so control characters are escaped.

    Args:
        message: what happened, with the values.
        hint: what to do next; shown on a line of its own.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        message = escaped(message)
        super().__init__(message)
        self.message = message
        self.hint = None if hint is None else escaped(hint)

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong (or, as a warning, without effect) in a configuration, and where it was written.

    Args:
        path: the place from the root of the document: `("compute", "instance_count")`, list positions as ints.
        message: what is wrong, with the value.
        hint: what to do.
        source: the file as the user named it, or the option that the value came from: `--set compute.spot`.
        line: counted from 1; None if the source has no lines.
        column: counted from 1.
        excerpt: the line itself, with a mark below if the very character matters.
        exact: whether it does: then `place` has the column.
    """

    path: tuple[str | int, ...]
    message: str
    hint: str | None = None
    source: str = ""
    line: int | None = None
    column: int | None = None
    excerpt: str = ""
    exact: bool = False

    @property
    def where(self) -> str:
        """The path as a user writes it: `compute.instance_count`, `tags[0].key`; empty for the whole document."""
        return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.path).removeprefix(".")

    @property
    def place(self) -> str:
        """The place as editors and terminals understand it: `job.yaml:4`, `job.yaml:4:17`; empty if not known."""
        numbers = (self.line, self.column if self.exact else None)
        return self.source + "".join(f":{number}" for number in numbers if number is not None)

    def below(self, *path: str | int) -> Problem:
        """Return the same problem with its path as seen from further up."""
        return replace(self, path=(*path, *self.path))

    def __str__(self) -> str:
        where = escaped(self.where).replace("\n", "\\n")
        option, _, key = self.source.partition(" ")
        known = option in (f"--{where}", "--set", "-p", "-H") and where.endswith(key)
        head = ": ".join(part for part in (self.place, "" if known else where, self.message) if part)
        lines = [head, self.excerpt] if self.excerpt else [head]
        if self.hint is not None:
            lines += ["", f"    hint: {self.hint}"] if self.excerpt else [f"    hint: {self.hint}"]
        return "\n".join(lines)


class ConfigError(SmpkitError, ValueError):
    """A configuration is invalid; `problems` holds every problem found, not only the first."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem], *, subject: str = "configuration") -> None:
        assert problems, "a ConfigError without a problem"
        self.problems = tuple(problems)
        self.subject = subject
        lines = "\n".join(str(problem) for problem in problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(f"{count} in the {subject}\n{lines}")


class UsageError(SmpkitError, RuntimeError):
    """A call that is not allowed here or now, for example a collective before `smp.init()`."""

    exit_code = 2


class UnsupportedError(SmpkitError):
    """A legal request that this version, machine or installation cannot serve."""

    exit_code = 2


class LaunchError(SmpkitError):
    """The ranks of a job could not be started."""


class DeadlineError(SmpkitError, TimeoutError):
    """A wait passed its deadline; the message names who waited, for whom and for how long."""


class RemoteError(SmpkitError):
    """Another rank failed; the message names the rank and its error."""


class JobError(SmpkitError):
    """A managed job failed, or was stopped before its end."""


class CheckpointError(SmpkitError):
    """A checkpoint is missing, incomplete, damaged, or belongs to another model."""


class CloudError(SmpkitError):
    """The back end of managed jobs, such as a cloud or a scheduler, refused or could not be reached."""

    exit_code = 4


class UnreachableError(CloudError):
    """No answer came from the back end of managed jobs; trying again may help."""
