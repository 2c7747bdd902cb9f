"""What a job of the fake will do: how long each phase takes, what it logs, how it ends."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Line", "Script"]


@dataclass(frozen=True)
class Line:
    """One line of a log."""

    at: float
    """Seconds after the beginning of training."""
    text: str
    host: int = 0
    """Which host logs it, counted from 0."""


@dataclass(frozen=True)
class Script:
    """The course of a job; all times are in seconds.

    ::

        Script(lines=(Line(1, "hello"),))                          a good job
        Script(failure="AlgorithmError: ...", training=4)          one whose script fails
        Script(interruptions=(30.0,), lines=...)                   a spot job, taken away once after 30 s of training
    """

    starting: float = 60.0
    downloading: float = 20.0
    training: float = 60.0
    """Time to the end of the script, in the attempt that is not interrupted."""
    uploading: float = 10.0
    lines: tuple[Line, ...] = ()
    """What the script logs, in every attempt anew, as far as it comes."""
    resumed_lines: tuple[Line, ...] | None = None
    """What attempts after an interruption log instead, of a script that goes on from a checkpoint."""
    failure: str | None = None
    """FailureReason; None if the script ends well."""
    interruptions: tuple[float, ...] = ()
    """For each attempt that is taken away: after how much training."""
    waiting: float = 120.0
    """How long capacity is missing after an interruption."""
    saving: float = 15.0
    """How long the script takes to end when it is asked to."""
    log_delay: float = 2.0
    """How long a line takes until it can be read."""
    silent_hosts: frozenset[int] = frozenset()
    """Hosts whose log never arrives."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Final metrics."""
