"""How long the launcher of a host waits, and what it knows when all processes of its host have ended."""

from __future__ import annotations

from dataclasses import dataclass

from smpkit_container.root_cause import RankEnd

__all__ = ["Outcome", "Timeouts"]


@dataclass(frozen=True)
class Timeouts:
    """How long each wait may take, in seconds."""

    start: float = 900.0
    """Until every rank has started."""
    settle: float = 2.0
    """For the other ranks to fail by themselves after the first one did."""
    ask: float = 0.5
    """For ranks that still run to finish writing their stacks, once the last of them has begun."""
    answer: float = 5.0
    """For all of them to begin: a busy machine takes its time, but a rank that cannot write must not delay the end."""
    watcher: float = 10.0
    """For the watcher of a rank that has ended to say how: it first ends what the rank left running."""
    end: float = 3.0
    """Between SIGTERM and SIGKILL when a run has failed."""
    grace: float = 110.0
    """Between SIGTERM and SIGKILL when the run was asked to stop; SageMaker kills the container after 120."""
    leave: float = 10.0
    """For torchrun or mpirun to exit after the ranks."""
    hear: float = 10.0
    """For another host to say why it ended when ranks here noticed only that others were gone."""


@dataclass(frozen=True)
class Outcome:
    """All that is known when the processes of this host are gone."""

    ends: tuple[RankEnd, ...]
    """How each rank ended that was started."""
    missing: tuple[int, ...]
    """Ranks that never started."""
    launcher_status: int
    launcher_output: str
    stop_signal: int = 0
    """The signal that asked the run to stop; 0 if none did."""
    late: bool = False
    """Whether the run was given up because ranks did not start in time."""
    overdue: bool = False
    """Whether ranks had to be killed because the grace period was over."""
    seconds: float = 0.0

    @property
    def clean(self) -> bool:
        """Whether every rank was started and ended with exit code 0."""
        return not self.missing and all(end.status == 0 and not end.failed for end in self.ends)
