"""Suspend a microbatch in the middle of the user's code while this rank works on another.

Only ranks that a microbatch visits more than once need it. Each live microbatch then runs in a thread of its own, but
only one of them runs at a time: coroutines, with no concurrency to reason about, only interruption.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as _dispatch_modes
from torch.utils._python_dispatch import _pop_mode as pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as push_dispatch_mode

from smpkit.errors import DeadlineError
from smpkit.torch import devices
from smpkit.torch.pipeline.random import RandomStreams
from smpkit.torch.state import state

__all__ = ["MicrobatchCoroutine"]


class _Abandoned(BaseException):
    """Unwinds a suspended microbatch whose step has failed; no `except Exception` of the user's may catch it."""


class MicrobatchCoroutine:
    """The run of `body` in a thread that stops where it calls `suspend` and goes on where `resume` is called.

    Args:
        body: what to run.
        random: the generators, which belong to the process: each thread finds them as it left them.
        device: whose current stream, like modes and hooks, belongs to a thread and is that of the one that starts it.
    """

    def __init__(self, body: Callable[[], Any], random: RandomStreams, device: torch.device) -> None:
        self.done = False
        self.output: Any = None
        self._body = body
        self._random = random
        self._torch_thread_state = _torch_thread_state(device)
        self._context = contextvars.copy_context()
        self._resumed = threading.Semaphore(0)
        self._yielded = threading.Semaphore(0)
        self._abandoned = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="smpkit-microbatch", daemon=True)

    def resume(self) -> None:
        """Run until the body suspends itself or ends; raises what it raised."""
        if not self._thread.is_alive():
            self._thread.start()
        self._resumed.release()
        # The body's own waits have deadlines, and Python code in it may take its time; this one catches neither.
        self._yielded.acquire()
        if self._error is not None:
            raise self._error

    def suspend(self) -> None:
        """Yield to the thread that resumed this one, from inside the body, and wait to be resumed."""
        kept = self._random.state()
        self._yielded.release()
        if not self._resumed.acquire(timeout=10 * state.timeout.total_seconds()):
            raise DeadlineError("a parked microbatch was never resumed")
        if self._abandoned:
            raise _Abandoned
        self._random.restore(kept)

    def abandon(self) -> None:
        """End the thread of a step that has failed."""
        if self._thread.is_alive() and not self.done:
            self._abandoned = True
            self._resumed.release()
            self._thread.join(timeout=10)

    def _main(self) -> None:
        self._resumed.acquire()
        try:
            if not self._abandoned:
                with self._torch_thread_state():
                    self.output = self._context.run(self._body)
        except _Abandoned:
            pass
        except BaseException as error:  # handed to the thread that resumed this one
            self._error = error
        self.done = True
        self._yielded.release()


def _torch_thread_state(device: torch.device) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a context that gives another thread this one's thread-local state of torch.

    Torch has no public way to hand all of it on at once, as its autograd engine does for threads of its own.
    """
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    kinds = {device.type, "cpu"}
    autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    caches = torch.is_autocast_cache_enabled()
    stream = devices.current_stream(device)
    # The default device is one of these modes (torch.set_default_device, `with torch.device(...)`).
    function_modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    dispatch_modes = _dispatch_modes()
    # Only the innermost ones take part.
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    hooked = contextlib.nullcontext if hooks is None else functools.partial(saved_tensors_hooks, *hooks)

    @contextlib.contextmanager
    def thread_state() -> Iterator[None]:
        for kind, enabled, dtype in autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(caches)
        if any(enabled for _, enabled, _ in autocast):
            torch.autocast_increment_nesting()  # the caller's autocast is around: its end empties the cache, no other
        with contextlib.ExitStack() as stack:
            stack.enter_context(devices.on_stream(stream))
            if inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(grad))
            stack.enter_context(hooked())
            # Innermost: whatever is done above is none of the step's operations.
            for mode in dispatch_modes:
                push_dispatch_mode(mode)
                stack.callback(pop_dispatch_mode)
            for mode in function_modes:
                torch.overrides._push_mode(mode)  # type: ignore[no-untyped-call]
                stack.callback(torch.overrides._pop_mode)
            yield

    return thread_state
