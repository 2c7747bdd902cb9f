"""A managed job that exists: look at it, wait for it, stop it, read its log, go on where it ended."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from smpkit.config.words import coloured
from smpkit.errors import CheckpointError, DeadlineError, JobError
from smpkit_estimator import follow as following
from smpkit_estimator.backend import Backend, LogLine, Plan
from smpkit_estimator.follow import LogFilter, Notice, Patience
from smpkit_estimator.status import JobStatus


class Job:
    """A job of this name on a back end; nothing is asked when it is made."""

    def __init__(self, name: str, backend: Backend) -> None:
        self.name = name
        self._backend = backend

    def __repr__(self) -> str:
        return f"Job({self.name!r})"

    def describe(self) -> dict[str, Any]:
        """Return what `DescribeTrainingJob` or `DescribeJobs` returns; empty on clusters."""
        return dict(self.status().raw)

    def status(self) -> JobStatus:
        """Return what the job is doing now."""
        return self._backend.describe(self.name)

    def wait(self, timeout: float | None = None, on_change: Callable[[JobStatus], None] = lambda _: None) -> JobStatus:
        """Wait until the job is over, and return how it ended.

        Network failures of up to five minutes are waited out.

        Args:
            timeout: in seconds; None means for ever, which the job's own limits bound.
            on_change: called with the status whenever the phase is another.

        Raises:
            DeadlineError: the job is not over in time; it goes on.
        """
        clock, patience = self._backend.clock, Patience(self._backend)
        began, phase, num_phases = clock.now(), "out of reach", 0
        while True:
            status = patience.ask(self.status)
            if status is not None and (status.phase, len(status.phases)) != (phase, num_phases):
                phase, num_phases = status.phase, len(status.phases)
                on_change(status)
            if status is not None and status.over:
                return status
            waited = (clock.now() - began).total_seconds()
            if timeout is not None and waited >= timeout:
                message = f"waited {waited:.0f} s for job `{self.name}`, which is {phase}"
                raise DeadlineError(message, hint=f"it goes on; `smpkit stop {self.name}` stops it")
            if status is not None:  # else `patience` has paused
                clock.sleep(self._backend.pace if timeout is None else min(self._backend.pace, timeout - waited))

    def check(self) -> JobStatus:
        """Return the status of a job that is over and succeeded.

        Raises:
            JobError: it failed, or was stopped.
        """
        status = self.status()
        if status.over and not status.succeeded:
            raise _failed(status)
        return status

    def stop(self, *, wait: bool = False) -> None:
        """Ask the job to stop: its ranks get SIGTERM, and time to save. With `wait`, return when it is over."""
        self._backend.stop(self.name)
        if wait:
            self.wait()

    def logs(
        self,
        *,
        follow: bool = False,
        tail: int | None = None,
        since: datetime | timedelta | None = None,
        ranks: Sequence[int] = (),
        hosts: Sequence[str] = (),
        grep: str | None = None,
    ) -> Iterator[LogLine | Notice]:
        """Yield lines of the log, merged by time, and notices about the job and about gaps.

        Args:
            follow: go on until the job is over; otherwise what there is so far.
            tail: begin with so many of the last lines of each host, before lines are chosen.
            since: only lines from this time on, or of so long ago.
            ranks, hosts, grep: only lines of these ranks or hosts, or that match this regular expression.
        """
        if isinstance(since, timedelta):
            since = self._backend.clock.now() - since
        wanted = LogFilter(frozenset(ranks), frozenset(hosts), re.compile(grep) if grep is not None else None)
        read = following.follow if follow else following.snapshot
        return read(self._backend, self.name, wanted=wanted, tail=tail, since=since)

    @property
    def model_data(self) -> str:
        """S3 URI of the model.

        Raises:
            JobError: the job is not over, or ended without one.
        """
        status = self.status()
        if not status.over:
            raise JobError(
                f"job `{self.name}` is {status.phase} and has no model yet", hint="`job.wait()` waits for it"
            )
        if status.model_data is None:
            raise JobError(f"job `{self.name}` ended without a model")
        return status.model_data

    @property
    def latest_checkpoint(self) -> str | None:
        """S3 URI or path of the newest whole checkpoint; None if there is none yet.

        Raises:
            CheckpointError: the job keeps no checkpoints.
        """
        return self._backend.latest_checkpoint(self.checkpoints)

    def resumed(self, job_name: str | None = None, changes: Mapping[str, Any] | None = None) -> Plan:
        """Return what would be sent for a new job that goes on from this one's checkpoints; sends nothing.

        Args:
            job_name: name of the new job; made of this one's and the time if None.
            changes: `InstanceCount`, `InstanceType` and `MaxRuntimeInSeconds`, as far as they are to be different.

        Raises:
            CheckpointError: the job keeps no checkpoints.
        """
        _ = self.checkpoints
        return self._backend.resumed(self.name, job_name, changes)

    def resume(self, job_name: str | None = None, changes: Mapping[str, Any] | None = None) -> Job:
        """Start a new job like this one that goes on from its checkpoints, and return it; arguments as of `resumed`."""
        plan = self.resumed(job_name, changes)
        self._backend.submit(plan)
        return Job(plan.name, self._backend)

    @property
    def checkpoints(self) -> str:
        """S3 URI or path of the folder with its checkpoints.

        Raises:
            CheckpointError: the job keeps none.
        """
        uri = self.status().checkpoints
        if uri is None:
            message = f"job `{self.name}` keeps no checkpoints"
            raise CheckpointError(message, hint="set `checkpoints`, and save to SMPKIT_CHECKPOINT_DIR")
        return uri


def show(lines: Iterator[LogLine | Notice]) -> None:
    """Write lines to stdout and notices to stderr, for notebooks and scripts."""
    for line in lines:
        words = coloured(line.text)
        stream, text = (sys.stderr, words) if isinstance(line, Notice) else (sys.stdout, f"{line.host} {words}")
        stream.write(f"{text}\n")
        stream.flush()


def _failed(status: JobStatus) -> JobError:
    if status.failure is None:
        return JobError(f"job `{status.name}` was stopped ({status.phase})")
    failure = status.failure
    place = f" (rank {failure.rank} on {failure.host}, exit {failure.exit_code})" if failure.rank is not None else ""
    details = "".join(f"\n{line}" for line in failure.details)
    return JobError(f"job `{status.name}` failed{place}: {failure.headline}{details}", hint=failure.hint)
