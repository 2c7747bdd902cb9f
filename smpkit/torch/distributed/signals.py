"""Stop cleanly when the platform sends SIGTERM: a reclaimed spot instance, a stopped job, a time limit.

`if smp.stop_requested(): smp.save_checkpoint(...); break`, asked by all ranks once per step. The signal reaches ranks
at different places; all get the same answer at the same step, so they may save together.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

import torch
import torch.distributed as dist

from smpkit.errors import UsageError
from smpkit.torch.core.runtime import state
from smpkit.torch.distributed.deadline import waiting


def stop_requested() -> bool:
    """Return whether any rank has received SIGTERM: the same answer on all ranks, which must all ask.

    From the first call on, SIGTERM no longer ends the process; the script does, after it has seen True. Costs one small
    all-reduce.

    Raises:
        UsageError: not in the main thread (first call), or before `smp.init()`.
        DeadlineError: not all ranks asked.
    """
    group = state.object_group
    _sigterm_handler.install()
    answer = torch.tensor([int(_sigterm_handler.requested)], device="cpu")
    with waiting("stop_requested", group):
        dist.all_reduce(answer, dist.ReduceOp.MAX, group=group)
    return bool(answer.item())


class _SigtermHandler:
    """Notes SIGTERM, which launchers may repeat."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: Callable[[int, FrameType | None], object] | int | None = None

    def install(self) -> None:
        """Install this handler, and remember the one before."""
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            return
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "smp.stop_requested must be called in the main thread", hint="only that thread may handle signals"
            )
        self._previous = signal.signal(signal.SIGTERM, self._on_sigterm)

    def reset(self) -> None:
        """Restore the handler before (on `smp.shutdown()`)."""
        # A repeated signal must not kill a script that is stopping because of the first.
        self._restore(signal.SIG_IGN if self.requested else self._previous)

    def leave(self) -> None:
        """Restore it in a forked process: `with multiprocessing.Pool()` ends its workers by SIGTERM, and waits."""
        self._restore(self._previous)

    def _restore(self, handler: Callable[[int, FrameType | None], object] | int | None) -> None:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is None else handler)
        self.requested, self._previous = False, None

    def _on_sigterm(self, *_: object) -> None:
        self.requested = True


_sigterm_handler = _SigtermHandler()
state.reset_hooks.append(_sigterm_handler.reset)
os.register_at_fork(after_in_child=_sigterm_handler.leave)
