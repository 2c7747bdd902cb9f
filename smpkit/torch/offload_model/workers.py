"""Threads that update weights while the main thread computes."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Final

import torch

from smpkit.errors import DeadlineError, UsageError
from smpkit.torch.devices import make_current
from smpkit.torch.offload.cores import own_cores
from smpkit.torch.offload_model.kernels import FlatRange, Kernel, Rule, choose_kernel
from smpkit.torch.offload_model.transfers import DEADLINE_SECONDS

__all__ = ["Workers"]

_CPU: Final = torch.device("cpu")
_CHUNK: Final = 1 << 20  # elements of one piece of work: half a millisecond


class Workers:
    """Applies rules to spans, in the order in which they come.

    Args:
        num_threads: None: this rank's part of the cores but two, which feed the device; at least one.
        device: whose copies the threads wait for.
    """

    def __init__(self, num_threads: int | None = None, device: torch.device = _CPU) -> None:
        if num_threads is not None and num_threads < 1:
            raise UsageError(f"num_threads is {num_threads}; it must be at least 1")
        self.num_threads = num_threads or max(1, own_cores() - 2)
        self._pool = ThreadPoolExecutor(
            self.num_threads, thread_name_prefix="smpkit-update", initializer=make_current, initargs=(device,)
        )
        self._kernels: dict[tuple[object, object], Kernel] = {}
        weakref.finalize(self, self._pool.shutdown, wait=False)

    def run(
        self, flat_ranges: Sequence[tuple[Rule, FlatRange]], ready: Callable[[], object], after: Sequence[Future[None]]
    ) -> list[Future[None]]:
        """Start to apply rules.

        Args:
            flat_ranges: disjoint pieces of memory.
            ready: returns when the gradients are there; called in the threads.
            after: earlier work on the same memory.
        """
        # Made now, for the spans of later steps may be others; taken from the left until there are none, so threads end
        # together and pay for a piece only its slicing.
        pieces = deque(
            (rule, flat_range.part(start, start + _CHUNK), self.kernel(flat_range))
            for rule, flat_range in flat_ranges
            for start in range(0, flat_range.master.numel(), _CHUNK)
        )

        def work() -> None:
            for earlier in after:
                earlier.result(DEADLINE_SECONDS)
            ready()
            while True:
                try:
                    rule, piece, kernel = pieces.popleft()
                except IndexError:
                    return
                kernel(rule, piece)

        return [self._pool.submit(work) for _ in range(min(self.num_threads, len(pieces)))]

    def wait(self, work: Future[None], what: str) -> None:
        """Block until some work is done.

        Raises:
            DeadlineError: it is not done after ten minutes.
        """
        try:
            work.result(DEADLINE_SECONDS)
        except FutureTimeoutError:
            if work.done():
                raise
            raise DeadlineError(f"the computation waited {DEADLINE_SECONDS:.0f} s for {what}") from None

    def kernel(self, flat_range: FlatRange) -> Kernel:
        """Return what applies rules to such spans; the first time, measure what is fastest."""
        key = (flat_range.gradient.dtype, None if flat_range.weight is None else flat_range.weight.dtype)
        if key not in self._kernels:
            self._kernels[key] = choose_kernel(*key)
        return self._kernels[key]
