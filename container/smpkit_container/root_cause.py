"""Decide why a run failed: which rank was the first to fail of its own accord, and which only followed it."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from smpkit.observe.status import RankStatus

_CONSEQUENCE_NAMES = frozenset({
    "BrokenPipeError",
    "ConnectionAbortedError",
    "ConnectionRefusedError",
    "ConnectionResetError",
    "smpkit.errors.DeadlineError",
    "smpkit.errors.RemoteError",
    "torch.distributed.DistNetworkError",
    "torch.distributed.DistStoreError",
})  # fmt: skip

_CONSEQUENCE_TEXT = re.compile(
    r"connection (was )?(closed|reset|aborted|refused)|broken pipe|closed by (remote )?peer|socket (is |was )?closed"
    r"|gloo[^\n]*(timed out|timeout)|timed out waiting|application timeout|wait timeout|socket timeout"
    r"|watchdog caught collective|remote process exited|ncclremoteerror|ncclsystemerror|nccl communicator was aborted",
    re.IGNORECASE,
)
"""What gloo, NCCL and torch's store say to the ranks that were left waiting for one that is gone."""


_SIGNAL_REASONS = {"SIGKILL": "the machine may be out of memory", "SIGSEGV": "a crash in compiled code"}


@dataclass(frozen=True)
class RankError:
    """An uncaught exception, as the rank itself reported it."""

    name: str
    """Qualified name of its class, without `builtins` and `__main__`."""
    message: str
    """What Python prints last: class and text."""
    traceback: str
    chain: Sequence[str] = ()
    """The texts of the exception and of what it was raised from, each as Python prints it: `class: text`."""
    frames: Sequence[tuple[str, int, str]] = ()
    """File, line and function, innermost last."""
    hint: str | None = None
    exit_code: int = 1
    seconds: float = 0.0

    @property
    def is_consequence(self) -> bool:
        """Whether it says only that another rank is gone or silent."""
        return any(
            text.partition(": ")[0] in _CONSEQUENCE_NAMES or _CONSEQUENCE_TEXT.search(text) for text in self.chain
        )


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended, or that it never did; `seconds` are since the epoch."""

    rank: int
    status: int | None
    """Exit code; minus the signal's number if one killed it; None if it was still running when it had to be stopped."""
    seconds: float
    error: RankError | None = None
    stopped: bool = False
    """Whether it was still running when the launcher began to end the run; then its status says nothing."""
    last_lines: tuple[str, ...] = ()
    stack: str = ""
    """Where it was when it was asked, or when it crashed: Python frames, innermost first."""
    peak_bytes: int = 0
    """The most memory of the host that its process held at once; 0 if that is not known."""
    doing: RankStatus | None = None
    """What it did as it ended, if it uses smpkit."""

    @property
    def failed(self) -> bool:
        return not self.stopped and (self.error is not None or bool(self.status))

    @property
    def failed_at(self) -> float:
        return self.error.seconds if self.error else self.seconds

    @property
    def is_consequence(self) -> bool:
        if self.error is not None:
            return self.error.is_consequence
        # NCCL's watchdog ends its process by SIGABRT when another rank is silent.
        aborted = self.status == -signal.SIGABRT
        return aborted and any(_CONSEQUENCE_TEXT.search(line) for line in self.last_lines)

    @property
    def exit_code(self) -> int:
        """The code as a shell reports it: 128 + n after signal n."""
        if self.error is not None and (self.status is None or self.status <= 0):
            return self.error.exit_code  # it raised, could not end by itself, and was killed
        if self.status is None:
            return 128 + signal.SIGKILL
        return self.status if self.status >= 0 else 128 - self.status

    @property
    def headline(self) -> str:
        """What went wrong, in one line: the exception if there is one, else how the process ended."""
        if self.error is not None and self.error.name != "SystemExit":
            return self.error.message
        if self.error is not None:  # whatever ended it then, such as the signal that asks for stacks, as Python ends
            text = self.error.message.removeprefix("SystemExit").removeprefix(": ")
            more = f": {text}" if text and not text.isdigit() else ""
            return f"the script exited with code {self.exit_code}{more}"
        if self.status is None:
            return "the process did not end, not even after SIGKILL"
        if self.status >= 0:
            return f"the script exited with code {self.exit_code}"
        name = signal_name(-self.status)
        why = [_SIGNAL_REASONS[name]] if name in _SIGNAL_REASONS else []
        if name == "SIGKILL" and self.peak_bytes:
            why.append(f"its process took up to {self.peak_bytes / 2**30:.1f} GiB")
        return f"the process was killed by {name}" + (f" ({'; '.join(why)})" if why else "")


@dataclass(frozen=True)
class RootCause:
    """The rank to blame, with who only followed, who had left before, and who was still waiting."""

    culprit: RankEnd
    followers: tuple[int, ...] = ()
    left_early: tuple[RankEnd, ...] = ()
    still_running: tuple[RankEnd, ...] = ()

    def is_older_than(self, news_seconds: float) -> bool:
        """Whether the run failed here, and not because of the bad news that came from another host at that time."""
        culprit = self.culprit
        return not culprit.is_consequence and (culprit.error is not None or culprit.failed_at <= news_seconds)


def find_root_cause(ends: Sequence[RankEnd]) -> RootCause | None:
    """Name the first failing rank; None if no rank failed.

    A rank that was killed or failed by itself goes before ranks whose error is a mere consequence (connection lost,
    collective timed out), however early those noticed. If there are only consequences, some rank must have let the
    others wait: those that ended with exit code 0, and those that still run, are named beside the earliest.
    """
    failed = sorted((end for end in ends if end.failed), key=lambda end: end.failed_at)
    if not failed:
        return None
    causes = [end for end in failed if not end.is_consequence]
    culprit = (causes or failed)[0]
    followers = tuple(sorted(end.rank for end in ends if end.rank != culprit.rank and (end.failed or end.stopped)))
    if causes:
        return RootCause(culprit, followers)
    left = tuple(end for end in ends if end.status == 0 and not end.failed and not end.stopped)
    still = tuple(end for end in ends if end.stopped)
    followers = tuple(end.rank for end in failed if end is not culprit)
    return RootCause(culprit, followers, left, still)


def signal_name(number: int) -> str:
    """Return a signal's name, for numbers that have one."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
