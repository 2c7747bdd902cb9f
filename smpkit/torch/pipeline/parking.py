"""Let a microbatch wait in the middle of the user's code while this rank works on another.

Only ranks that a microbatch visits more than once need it. Each live microbatch then runs in a thread of its own, but
only the thread that holds the baton runs; so there is no concurrency to reason about, only interruption.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from smpkit.errors import DeadlineError
from smpkit.torch import cuda_on_cpu
from smpkit.torch.pipeline.random import RandomStreams
from smpkit.torch.state import state

__all__ = ["Parked"]


class _Abandoned(BaseException):
    """Unwinds a parked microbatch whose step has failed; no `except Exception` of the user's may catch it."""


class Parked:
    """The run of `body` in a thread that stops where it calls `park` and goes on where `resume` is called.

    Args:
        body: what to run.
        random: the generators, which belong to the process: each thread finds them as it left them.
        device: for autocast, which like grad mode belongs to a thread and is carried over from the one that starts it.
    """

    def __init__(self, body: Callable[[], Any], random: RandomStreams, device: torch.device) -> None:
        self.done = False
        self.output: Any = None
        self._body = body
        self._random = random
        self._modes = _modes_of(device)
        self._go = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        self._abandoned = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="smpkit-microbatch", daemon=True)

    def resume(self) -> None:
        """Run until the body parks or ends; raises what it raised."""
        if not self._thread.is_alive():
            self._thread.start()
        self._go.release()
        # The body's own waits have deadlines, and Python code in it may take its time; this one catches neither.
        self._back.acquire()
        if self._error is not None:
            raise self._error

    def park(self) -> None:
        """Hand the baton back, from inside the body, and wait to be resumed."""
        kept = self._random.state()
        self._back.release()
        if not self._go.acquire(timeout=10 * state.timeout.total_seconds()):
            raise DeadlineError("a parked microbatch was never resumed")
        if self._abandoned:
            raise _Abandoned
        self._random.restore(kept)

    def abandon(self) -> None:
        """End the thread of a step that has failed."""
        if self._thread.is_alive() and not self.done:
            self._abandoned = True
            self._go.release()
            self._thread.join(timeout=10)

    def _main(self) -> None:
        self._go.acquire()
        try:
            if not self._abandoned:
                with self._modes():
                    self.output = self._body()
        except _Abandoned:
            pass
        except BaseException as error:  # handed to the thread that resumed this one
            self._error = error
        self.done = True
        self._back.release()


def _modes_of(device: torch.device) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a context that sets up grad mode and autocast as they are now, in the thread that started the step."""
    grad = torch.is_grad_enabled()
    autocast = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type)

    @contextlib.contextmanager
    def modes() -> Iterator[None]:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        autocasting = torch.autocast(device.type, dtype=dtype, enabled=autocast)
        with torch.set_grad_enabled(grad), autocasting, cuda_on_cpu.carried_over():
            yield

    return modes
