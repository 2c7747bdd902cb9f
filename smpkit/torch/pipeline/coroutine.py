"""Suspend a microbatch in the middle of the user's code, and let this rank work on another one meanwhile.

Each live microbatch runs in a thread of its own, but only one thread runs at a time: coroutines, with interruption and
without concurrency.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as _dispatch_modes
from torch.utils._python_dispatch import _pop_mode as pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as push_dispatch_mode

from smpkit.errors import DeadlineError
from smpkit.torch.core import devices
from smpkit.torch.core.runtime import state
from smpkit.torch.pipeline.random_streams import RandomStreams


class MicrobatchCoroutine:
    """The run of `body` in a thread of its own, which `suspend` interrupts and `resume` continues.

    Only one of the two threads runs at a time. Both see the same modes, hooks, autocast and CUDA stream, which torch
    keeps by thread, and the same context variables.

    Args:
        streams: the generators belong to the process: a suspended body saves their state and finds it again.
        device: its current stream is that of the thread that makes this object.
        seed: of Python's and numpy's generators in the body. From common ones, ranks that interrupt their bodies
            elsewhere would draw other numbers for the same microbatch.
    """

    def __init__(self, body: Callable[[], Any], streams: RandomStreams, device: torch.device, seed: int) -> None:
        self.done = False
        self.output: Any = None
        self._body = body
        self._streams, self._seed = streams, seed
        self._torch_thread_state = _torch_thread_state(device)
        self._context = contextvars.copy_context()
        self._resumed = threading.Semaphore(0)
        self._yielded = threading.Semaphore(0)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="smpkit-microbatch", daemon=True)

    def resume(self) -> None:
        """Run until the body suspends itself or ends; raises what it raised."""
        if not self._thread.is_alive():
            self._thread.start()
        self._resumed.release()
        # Without a timeout: waits of the body for other ranks have deadlines, and its own code may take any time.
        self._yielded.acquire()
        if self.done:
            self._thread.join()  # until then it holds what the body has made
        if self._error is not None:
            raise self._error

    def suspend(self) -> None:
        """Let the thread that resumed the body run, until it resumes the body again; called inside the body."""
        kept, python, numpy = self._streams.state(), random.getstate(), np.random.get_state()
        self._yielded.release()
        if not self._resumed.acquire(timeout=10 * state.timeout.total_seconds()):
            raise DeadlineError("a suspended microbatch was never resumed")
        self._streams.restore(kept)
        random.setstate(python)
        np.random.set_state(numpy)

    def _main(self) -> None:
        self._resumed.acquire()
        random.seed(self._seed)
        np.random.seed(self._seed)
        try:
            with self._torch_thread_state():
                self.output = self._context.run(self._body)
        except BaseException as error:
            self._error = error  # `resume` raises it in the thread that waits
        self.done = True
        self._yielded.release()


def _torch_thread_state(device: torch.device) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a context manager that gives another thread this one's thread-local state of torch.

    Torch has no public function for it; its autograd engine copies such state in C++ (`at::ThreadLocalState`).
    """
    grad = torch.is_grad_enabled()
    kinds = {device.type, "cpu"}
    autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    caches = torch.is_autocast_cache_enabled()
    stream = devices.current_stream(device)
    # The default device is one of these modes (torch.set_default_device, `with torch.device(...)`).
    function_modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    dispatch_modes = _dispatch_modes()
    # Only the innermost hooks on saved tensors have an effect.
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    hooked = contextlib.nullcontext if hooks is None else functools.partial(saved_tensors_hooks, *hooks)

    @contextlib.contextmanager
    def thread_state() -> Iterator[None]:
        for kind, enabled, dtype in autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(caches)
        if any(enabled for _, enabled, _ in autocast):
            # The caller's autocast is still open: only its end may empty the cache, not one that the body ends.
            torch.autocast_increment_nesting()
        with contextlib.ExitStack() as stack:
            stack.enter_context(devices.on_stream(stream))
            stack.enter_context(torch.set_grad_enabled(grad))
            stack.enter_context(hooked())
            # Push modes last: what the lines above do is not an operation of the step.
            for mode in dispatch_modes:
                push_dispatch_mode(mode)
                stack.callback(pop_dispatch_mode)
            for mode in function_modes:
                torch.overrides._push_mode(mode)  # type: ignore[no-untyped-call]
                stack.callback(torch.overrides._pop_mode)
            yield

    return thread_state
