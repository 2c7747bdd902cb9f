"""Average gradients over ranks, during backward or after it, in a few large messages.

::

    backward   ... grad 9  grad 8 | grad 7 ... grad 4 | grad 3 ... grad 0 |
    reduction                      [ bucket 0 ]        [ bucket 1 ]        [ bucket 2 ]   wait, unpack

A hook on each parameter notes when its gradient is final. In the last backward of a step (`overlap_next_backward`) a
bucket whose gradients are all final is reduced while backward goes on; `finish` starts what is left and waits. Buckets
start in one fixed order on every rank, whatever order the hooks fire in, because collectives that start in different
orders deadlock. What backward did not reach is sent when it is over, so an unused parameter neither hangs nor stays
unreduced. Parameters that are reduced over different groups lie in different buckets of the same order, for the same
reason.

[Note: why the result is right however often it is reduced] Averaging is linear, and a reduced gradient is equal on all
ranks, so averaging `reduced + new` gives `reduced + average(new)`. Several backwards in one step, accumulation over
steps and a second reduction all follow from this; no other bookkeeping is needed. A scale, where a gradient has one,
therefore multiplies each gradient as it arises, and not the result.

[Note: results on one rank] With sharded optimizer state only the owner of a parameter gets the result, and the others
drop their part: there a reduced gradient is not equal on all ranks. What a backward adds to a result on its owner is
therefore divided by the number of ranks as it arises, and the sum of both is not divided again. All of it lies in
`grad`, so that whoever clears or scales that, in whatever way, means all of it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from smpkit.errors import UnsupportedError, UsageError
from smpkit.torch.core import devices
from smpkit.torch.distributed.deadline import waiting

FIRST_BUCKET_BYTES: Final = 1024 * 1024  # small, so that the first reduction starts soon after backward does

_kind_of: Final = attrgetter("requires_grad", "dtype", "device")
"""Properties that decide which tensors share a message; where one changes, messages are planned anew."""


@dataclass(frozen=True)
class ReduceTarget:
    """Where gradients are reduced: over `group`, to all of it or to the rank at `owner`."""

    group: dist.ProcessGroup
    owner: int | None = None
    may_overlap: bool = True
    """Whether reductions may start while backward runs. Not where ranks of several pipeline stages take part: they run
    it at different times, and a collective that one of them starts early would hold up the others' messages."""


class Bucket:
    """Gradients that are reduced together over one group, in one flat buffer of one dtype on one device.

    ::

        flat   [ grad 0 | grad 1 | ... | grad n-1 | used 0 ... used n-1 ]

    All ranks of the group get the sum, or only its `owner`, where the optimizer state is sharded.

    A used flag is 1 where this rank's backward reached the parameter, so after the sum every rank knows, without
    another message, whether any rank did. A parameter that none reached keeps its gradient (`None` included), as it
    would in one process; torch's reducer leaves such parameters unreduced or fills them with zeros.
    """

    def __init__(self, params: Sequence[nn.Parameter], target: ReduceTarget) -> None:
        self.params = list(params)
        self.group, self.owner, self.may_overlap = target.group, target.owner, target.may_overlap
        self.is_owner = target.owner is None or target.owner == dist.get_rank(target.group)
        numels = [param.numel() for param in params]
        self.flat = torch.zeros(sum(numels) + len(params), dtype=params[0].dtype, device=params[0].device)
        *pieces, self.flags = torch.split(self.flat, [*numels, len(params)])
        self.views = [piece.view(param.shape) for piece, param in zip(pieces, params, strict=True)]
        self.ids = frozenset(map(id, params))
        self.missing = set(self.ids)
        """Parameters, by id, whose gradients the backward now running has not finished."""

    def pack(self, used: AbstractSet[int], results: AbstractSet[int]) -> None:
        """Copy this rank's gradients, divided by the number of ranks, and its flags into the buffer.

        Dividing before the sum, not after, keeps half-precision sums from overflowing. `used` has the ids of the
        parameters that backward has reached since the last reduction, `results` of those that are divided already.
        """
        size = dist.get_world_size(self.group)
        for param, view in zip(self.params, self.views, strict=True):
            if param.grad is None:
                view.zero_()
            else:
                torch.div(param.grad, 1 if id(param) in results else size, out=view)
        if self.ids <= used:
            self.flags.fill_(1)
        else:
            flags = [float(id(param) in used) for param in self.params]
            self.flags.copy_(devices.to_device(torch.tensor(flags, device="cpu"), self.flags.device))

    def reduce(self) -> dist.Work:
        """Start to sum the packed buffers of the group, on all ranks or on the owner."""
        work: dist.Work
        if self.owner is None:
            work = dist.all_reduce(self.flat, group=self.group, async_op=True)
        else:
            work = dist.reduce(self.flat, group=self.group, group_dst=self.owner, async_op=True)
        return work

    def unpack(self, used: AbstractSet[int]) -> None:
        """Give each parameter that any rank's backward reached its reduced gradient, if this rank is its owner."""
        if not self.is_owner:
            for param in self.params:
                param.grad = None
            return
        # The flags are read only where this rank left out a parameter, because the host waits for the device.
        flags = [1.0] * len(self.params) if self.ids <= used else self.flags.tolist()
        gradients, results = [], []
        for param, view, flag in zip(self.params, self.views, flags, strict=True):
            if flag == 0:  # used by no rank
                continue
            if param.grad is None:
                param.grad = torch.empty_like(view)
            gradients.append(param.grad)
            results.append(view)
        if gradients:
            torch._foreach_copy_(gradients, results)


def plan_buckets(
    params: Sequence[nn.Parameter], cap_bytes: int, target_of: Callable[[nn.Parameter], ReduceTarget]
) -> list[Bucket]:
    """Group parameters, in the order in which their gradients become ready, into buckets of at most `cap_bytes`.

    A bucket holds one dtype of one device for one target; a parameter larger than the cap has a bucket of its own.
    Buckets are in the order in which their last gradients become ready.
    """
    contents: list[list[nn.Parameter]] = []
    latest: dict[object, tuple[list[nn.Parameter], int]] = {}
    for param in params:
        kind = param.dtype, param.device, target_of(param)
        content, filled = latest.get(kind, ([], 0))
        cap = min(FIRST_BUCKET_BYTES, cap_bytes) if contents and content is contents[0] else cap_bytes
        if not content or filled + param.nbytes > cap:
            content, filled = [], 0
            contents.append(content)
        content.append(param)
        latest[kind] = content, filled + param.nbytes
    ready = {id(param): index for index, param in enumerate(params)}
    contents.sort(key=lambda content: ready[id(content[-1])])
    return [Bucket(content, target_of(content[0])) for content in contents]


class GradientReducer:
    """Reduces the gradients of parameters, each over its own group.

    Parameters that do not require gradients are left out until they do; what is frozen after a backward has reached it
    (the critic of a GAN, say) stays in until it is reduced.
    """

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter, ReduceTarget]], *, bucket_cap_bytes: int) -> None:
        self._parameters = [param for _, param, _ in parameters]
        self._names = {id(param): name for name, param, _ in parameters}
        self._targets = {id(param): target for _, param, target in parameters}
        self._bucket_cap_bytes = bucket_cap_bytes
        self.buckets: Sequence[Bucket] = ()
        self.trained: set[nn.Parameter] = set()
        """Those that have been in a bucket, now or before."""
        self._kinds: list[Any] = []
        self._is_reduced = True
        """Whether nothing has been trained since the last reduction."""
        self._handles: list[RemovableHandle] = []
        self._lock = threading.Lock()  # a model on two devices runs its hooks on two autograd threads
        # By ids of parameters, since buckets may be planned anew while an accumulation is under way.
        self._used: set[int] = set()
        """Parameters that earlier backwards reached since the last reduction."""
        self._results: set[int] = set()
        """Parameters whose gradient begins with a result that this rank alone has."""
        self._overlaps = False
        self._pending: list[dist.Work] = []
        self._on_backward_end: Callable[[], None] | None = None
        self._awaits_backward = False
        """Whether the first gradient of a backward has to announce its end."""
        self.plan()

    @property
    def active(self) -> bool:
        """Whether reductions have started that are not finished."""
        return bool(self._pending)

    def plan(self) -> None:
        """Plan buckets, anew if parameters were frozen, unfrozen, cast or moved since the last time."""
        kinds, is_reduced = list(map(_kind_of, self._parameters)), self._is_reduced
        self._is_reduced = False
        if kinds == self._kinds or self.active:
            return
        unreduced = frozenset[int]().union(*(bucket.ids for bucket in self.buckets if not is_reduced))
        self._expect_gradients()
        self.release()
        self._kinds = kinds
        # Gradients become final from the last layer to the first: the reverse of registration is a good guess.
        live = [param for param in reversed(self._parameters) if param.requires_grad or id(param) in unreduced]
        live.sort(key=lambda param: not self._targets[id(param)].may_overlap)
        self.trained.update(live)
        self.buckets = plan_buckets(live, self._bucket_cap_bytes, lambda param: self._targets[id(param)])
        for bucket in self.buckets:
            size = dist.get_world_size(bucket.group)
            for param in (param for param in bucket.params if param.requires_grad):
                self._handles.append(param.register_post_accumulate_grad_hook(self._listener(bucket, id(param))))  # type: ignore[no-untyped-call]
                if bucket.owner is not None and bucket.is_owner:
                    self._handles.append(param.register_hook(functools.partial(self._divide, param, size)))  # type: ignore[no-untyped-call]

    def release(self) -> None:
        """Remove the hooks from the parameters: they would keep the process group alive as long as these live."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._kinds = [], []

    # --- a step ------------------------------------------------------------------------------------------------------

    def begin_pass(self, on_backward_end: Callable[[], None] | None = None) -> None:
        """Prepare for backwards that do not overlap with reductions; `on_backward_end` is called after each of them."""
        self._expect_gradients()
        self.plan()
        self._on_backward_end = on_backward_end
        self._awaits_backward = on_backward_end is not None
        self._overlaps = False

    def overlap_next_backward(self) -> None:
        """Make the coming backward start reductions as its gradients become final."""
        self._expect_gradients()
        self._overlaps = True

    def _expect_gradients(self) -> None:
        """Note what the backwards until now have reached, and expect all gradients of the next one."""
        for bucket in self.buckets:
            self._used |= bucket.ids - bucket.missing
            bucket.missing |= bucket.ids

    def finish(self) -> None:
        """Start what has not started, wait for everything, and give every parameter its averaged gradient."""
        self._overlaps = False
        self._expect_gradients()
        while len(self._pending) < len(self.buckets):
            self._start_next()
        for number, (bucket, work) in enumerate(zip(self.buckets, self._pending, strict=True)):
            with waiting(f"the reduction of gradients (bucket {number})", bucket.group):
                work.wait()
            bucket.unpack(self._used)
            if bucket.owner is not None and bucket.is_owner:
                self._results |= {id(param) for param in bucket.params if param.grad is not None}
        self._pending = []
        self._is_reduced = True
        self._used.clear()

    def abandon(self) -> None:
        """Drop what an exception interrupted, so that the next step starts clean."""
        self._overlaps = False
        self._awaits_backward = self._on_backward_end is not None
        self._pending = []
        self._expect_gradients()
        self._used.clear()

    # --- within backward ---------------------------------------------------------------------------------------------

    def _listener(self, bucket: Bucket, number: int) -> Callable[[torch.Tensor], None]:
        """Return the hook of the parameter with the id `number`, which runs when a gradient has been added to its."""
        missing = bucket.missing

        def on_gradient(_: torch.Tensor) -> None:  # hundreds of times in a step: the least that tells what arrived
            if self._awaits_backward:
                self._announce_end()
            if number in missing:
                missing.remove(number)
            elif bucket in self.buckets[: len(self._pending)]:
                raise UsageError(
                    f"parameter `{self._names[number]}` received another gradient in the same backward, after its"
                    " reduction had started",
                    hint="checkpoint with use_reentrant=False, or pass overlapping_allreduce=False to DistributedModel",
                )
            if not missing and self._overlaps:
                self._start_ready()

        return on_gradient

    def _divide(self, param: nn.Parameter, size: int, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return a gradient as it is to be added to a result; None if it is added to none: see the note above."""
        if param.grad is None:  # cleared: spare the division
            self._results.discard(id(param))
        return gradient / size if id(param) in self._results else None

    def _announce_end(self) -> None:
        with self._lock:
            if self._awaits_backward:
                self._awaits_backward = False
                # As torch's own DDP does: called when the whole backward is over. The name is private.
                Variable._execution_engine.queue_callback(self._end_of_backward)

    def _end_of_backward(self) -> None:
        self._awaits_backward = self._on_backward_end is not None
        if self._on_backward_end is not None:
            self._on_backward_end()

    def _start_ready(self) -> None:
        # Only the next bucket in the fixed order may start, even if a later one is ready: another rank's hooks may
        # fire in another order, and collectives that start in different orders deadlock.
        with self._lock:
            for bucket in self.buckets[len(self._pending) :]:
                if bucket.missing or not bucket.may_overlap:
                    return
                self._start_next()

    def _start_next(self) -> None:
        bucket = self.buckets[len(self._pending)]
        self._used |= bucket.ids - bucket.missing
        with torch.no_grad():
            try:
                bucket.pack(self._used, self._results)
            except RuntimeError:
                for param in bucket.params:
                    if param.grad is not None and param.grad.layout is not torch.strided:
                        raise UnsupportedError(
                            f"parameter `{self._names[id(param)]}` has a sparse gradient, which data parallelism does"
                            " not reduce",
                            hint="make its embedding with sparse=False",
                        ) from None
                raise
            self._pending.append(bucket.reduce())
