"""Stop cleanly when the platform sends SIGTERM: a reclaimed spot instance, a stopped job, a time limit.

Two ways, of which a script uses one:

- `smp.on_stop(callback)`: run the callback and exit. Python runs signal handlers between bytecodes of the main thread,
  so a rank that is blocked in a collective runs it when that call returns. Ranks are at different places when the
  signal comes, so the callback must not wait for other ranks: save what this rank has (`smp.save`).
- `if smp.stop_requested(): smp.save_checkpoint(...); break`: asked by all ranks once per step. All ranks get the same
  answer at the same step, so they may save together.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

import torch
import torch.distributed as dist

from smpkit.errors import UsageError
from smpkit.torch.core.runtime import state
from smpkit.torch.distributed.deadline import waiting

Callback = TypeVar("Callback", bound=Callable[[], object])


def on_stop(callback: Callback) -> Callback:
    """Call `callback()` in the main thread when SIGTERM arrives, once; then the process exits with code 0.

    Several callbacks run in the order of registration, even if one raises; the exception then ends the process with its
    traceback. A handler that was installed before runs after them. Usable as a decorator.

    Raises:
        UsageError: not called in the main thread, or `smp.stop_requested` is used as well.
    """
    if _sigterm_handler.cooperative:
        raise _exclusive_use_error()
    _sigterm_handler.install("smp.on_stop")
    _sigterm_handler.callbacks.append(callback)
    return callback


def stop_requested() -> bool:
    """Return whether any rank has received SIGTERM: the same answer on all ranks, which must all ask.

    From the first call on, SIGTERM no longer ends the process; the script does, after it has seen True. Costs one small
    all-reduce.

    Raises:
        UsageError: not in the main thread (first call), before `smp.init()`, or `smp.on_stop` is used as well.
        DeadlineError: not all ranks asked.
    """
    group = state.object_group
    if _sigterm_handler.callbacks:
        raise _exclusive_use_error()
    _sigterm_handler.install("smp.stop_requested")
    _sigterm_handler.cooperative = True
    answer = torch.tensor([int(_sigterm_handler.requested)], device="cpu")
    with waiting("stop_requested", group):
        dist.all_reduce(answer, dist.ReduceOp.MAX, group=group)
    return bool(answer.item())


def _exclusive_use_error() -> UsageError:
    return UsageError(
        "smp.on_stop and smp.stop_requested exclude each other",
        hint="a loop that asks smp.stop_requested() can itself do what the callback would",
    )


class _SigtermHandler:
    """The handler of SIGTERM and its state."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[], object]] = []
        self.cooperative = False
        """Whether the script asks `stop_requested`, and ends by itself."""
        self.requested = False
        self._stopping = False
        self._previous: Callable[[int, FrameType | None], object] | int | None = None

    def install(self, call: str) -> None:
        """Install this handler, and remember the one before."""
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            return
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(f"{call} must be called in the main thread", hint="only that thread may handle signals")
        self._previous = signal.signal(signal.SIGTERM, self._on_sigterm)

    def reset(self) -> None:
        """Restore the handler before, and forget the callbacks (on `smp.shutdown()`)."""
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            before = self._previous if self._previous is not None else signal.SIG_DFL
            # Launchers repeat the signal: it must not kill a script that is stopping because of the first.
            signal.signal(signal.SIGTERM, signal.SIG_IGN if self.requested else before)
        self.callbacks.clear()
        self.cooperative = self.requested = self._stopping = False
        self._previous = None

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        # A repeated signal must not start a save again that is under way.
        if self.cooperative or self._stopping:
            return
        self._stopping = True
        try:
            self._run_callbacks()
            if callable(self._previous):
                self._previous(number, frame)
        finally:
            # Python restores the default handler long before the process ends: a repeated signal would kill it then.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(0)

    def _run_callbacks(self) -> None:
        """Run all callbacks in order, even if one raises, since each may have work to save; then raise its error."""
        with contextlib.ExitStack() as stack:
            for callback in reversed(self.callbacks):
                stack.callback(callback)


_sigterm_handler = _SigtermHandler()
state.reset_hooks.append(_sigterm_handler.reset)
