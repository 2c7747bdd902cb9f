"""The optimizers' arithmetic on flat memory: gradient in, master weight and state updated, working copy out.

There are two kernels with the same results up to rounding. `one_pass` reads memory once, in C++ that is compiled for
this machine's processor (`compiled.py`). `tiled` runs torch's operations on a cache-sized tile at a time, for dtypes
that are not compiled and where there is no compiler. Dtypes and the machine alone decide between them, never a
measurement: weights must be the same to the bit in each run. `Workers` are the threads that update weights while the
device computes.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from smpkit.errors import DeadlineError, UsageError
from smpkit.torch.core.devices import make_current
from smpkit.torch.distributed.cores import own_cores
from smpkit.torch.offload_model import compiled
from smpkit.torch.offload_model.counted_link import DEADLINE_SECONDS

__all__ = ["Adam", "FlatRange", "Kernel", "Rule", "Sgd", "Workers", "one_pass", "tiled"]

_CPU: Final = torch.device("cpu")
_CHUNK: Final = 1 << 20
"""Elements of one piece of work: half a millisecond."""
_TILE: Final = 131072
"""Elements: few enough for the caches, many enough that calls into torch take little of the time."""
_UNSPLIT_TILE: Final = 32768
"""The most that torch does not split over threads of its own."""


@dataclass(frozen=True)
class FlatRange:
    """Adjacent elements of one slice; flat tensors of equal length."""

    gradient: Tensor
    master: Tensor
    """fp32, or the parameter's own dtype where that is wider."""
    state: tuple[Tensor, ...]
    """Adam: first and second moment; SGD: the momentum, if any."""
    weight: Tensor | None
    """The working copy, where it is not the master itself."""

    def part(self, start: int, end: int) -> FlatRange:
        """Return the elements from `start` to before `end`."""
        return FlatRange(
            self.gradient[start:end],
            self.master[start:end],
            tuple(each[start:end] for each in self.state),
            None if self.weight is None else self.weight[start:end],
        )


@dataclass(frozen=True)
class Adam:
    """One step of `torch.optim.Adam` or, with decoupled weight decay, `AdamW`."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    step: int
    """How many steps these parameters have made, this one included."""
    factor: float
    """Factor for the gradients: clipping, loss scale, and -1 to maximize."""

    @property
    def constants(self) -> tuple[float, ...]:
        """The arguments of the compiled kernel.

        Beta 1 and 2, epsilon, decay factor, L2 factor, step size, root of the second bias correction, factor.
        """
        decay = 1 - self.lr * self.weight_decay if self.decoupled else 1.0
        l2 = 0.0 if self.decoupled else self.weight_decay
        size = self.lr / (1 - self.beta1**self.step)
        return self.beta1, self.beta2, self.eps, decay, l2, size, math.sqrt(1 - self.beta2**self.step), self.factor

    def apply(self, gradient: Tensor, flat_range: FlatRange) -> None:
        """Make the step with torch's fused kernel; `gradient` has the master's dtype, and the factor is applied."""
        first, second = flat_range.state
        fused = torch._fused_adamw_ if self.decoupled else torch._fused_adam_
        fused(
            [flat_range.master],
            [gradient],
            [first],
            [second],
            [],
            [torch.tensor(float(self.step), device="cpu")],
            lr=self.lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=self.weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )


@dataclass(frozen=True)
class Sgd:
    """One step of `torch.optim.SGD`."""

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    step: int
    factor: float

    @property
    def constants(self) -> tuple[float, ...]:
        """The arguments of the compiled kernel.

        Learning rate, L2 factor, how much of the momentum to keep, how much of the gradient to add to it, how much of
        the gradient and how much of the momentum to use, and the factor.
        """
        first = self.step == 1 or not self.momentum  # without momentum there is no dampening, as in torch
        keep, enter = (0.0, 1.0) if first else (self.momentum, 1 - self.dampening)
        of_gradient, of_momentum = (1.0, self.momentum) if self.nesterov else (0.0, 1.0)
        return self.lr, self.weight_decay, keep, enter, of_gradient, of_momentum, self.factor

    def apply(self, gradient: Tensor, flat_range: FlatRange) -> None:
        """Make the step with torch's operations; `gradient` has the master's dtype, and is overwritten."""
        lr, l2, keep, enter, of_gradient, of_momentum, _ = self.constants
        master = flat_range.master
        if l2:
            gradient.add_(master, alpha=l2)
        for momentum in flat_range.state:
            momentum.mul_(keep).add_(gradient, alpha=enter)
            gradient.mul_(of_gradient).add_(momentum, alpha=of_momentum)
        master.add_(gradient, alpha=-lr)


Rule = Adam | Sgd

Kernel = Callable[[Rule, FlatRange], None]


@torch.no_grad()
def tiled(rule: Rule, flat_range: FlatRange) -> None:
    """Apply a rule tile by tile, so that every tile is read from memory once."""
    length = flat_range.master.numel()
    size = min(length, _TILE if torch.get_num_threads() == 1 else _UNSPLIT_TILE)
    # One scratch buffer for all tiles: for blocks of this size, the allocator asks the system anew each time.
    scratch = torch.empty(size, dtype=flat_range.master.dtype, device=flat_range.master.device)
    for start in range(0, length, max(1, size)):
        tile = flat_range.part(start, min(start + size, length))
        gradient = scratch[: tile.master.numel()].copy_(tile.gradient)
        if rule.factor != 1.0:
            gradient.mul_(rule.factor)
        rule.apply(gradient, tile)
        if tile.weight is not None:
            tile.weight.copy_(tile.master)


def one_pass(rule: Rule, flat_range: FlatRange) -> None:
    """Apply a rule with the compiled kernel; dtypes it does not know go tile by tile."""
    function = _compiled(rule, flat_range)
    if function is None:
        tiled(rule, flat_range)
    else:
        weight = () if flat_range.weight is None else (flat_range.weight,)
        arrays = (flat_range.gradient, flat_range.master, *flat_range.state, *weight)
        function([each.data_ptr() for each in arrays], flat_range.master.numel(), rule.constants)


def _compiled(rule: Rule, flat_range: FlatRange) -> compiled.Function | None:
    """Return the compiled kernel of a rule for these dtypes, if there is one."""
    if any(each.dtype is not torch.float32 for each in (flat_range.master, *flat_range.state)):
        return None
    if isinstance(rule, Adam):
        name = "adam"
    else:
        name = "sgd_momentum" if flat_range.state else "sgd"
    weight = flat_range.weight
    return compiled.function(name, flat_range.gradient.dtype, None if weight is None else weight.dtype)


class Workers:
    """Threads that update weights while the main thread computes.

    Args:
        num_threads: None: this rank's part of all cores but two, which are left to feed the device; at least one.
        device: whose copies the threads wait for.
    """

    def __init__(self, num_threads: int | None = None, device: torch.device = _CPU) -> None:
        if num_threads is not None and num_threads < 1:
            raise UsageError(f"num_threads is {num_threads}; it must be at least 1")
        self.num_threads = num_threads or max(1, own_cores() - 2)
        self._pool = ThreadPoolExecutor(
            self.num_threads, thread_name_prefix="smpkit-update", initializer=make_current, initargs=(device,)
        )
        # Threads hold no reference to this object, so it is freed, and they end, with the optimizer.
        weakref.finalize(self, self._pool.shutdown, wait=False)

    def run(self, flat_ranges: Sequence[tuple[Rule, FlatRange]], ready: Callable[[], object]) -> list[Future[None]]:
        """Start to apply rules.

        Args:
            flat_ranges: disjoint pieces of memory.
            ready: blocks until the gradients are there; called in the threads. Earlier work on this memory has ended.
        """
        # All threads take small pieces from one queue, so that they end together. The pieces are cut here, in the order
        # of calls, because the ranges of a later step may be others.
        pieces = deque[tuple[Rule, FlatRange]]()
        for rule, flat_range in flat_ranges:
            _compiled(rule, flat_range)  # the first time here, and not in several threads at once
            for start in range(0, flat_range.master.numel(), _CHUNK):
                pieces.append((rule, flat_range.part(start, start + _CHUNK)))

        def work() -> None:
            ready()
            while True:
                try:
                    rule, piece = pieces.popleft()
                except IndexError:
                    return
                one_pass(rule, piece)

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
