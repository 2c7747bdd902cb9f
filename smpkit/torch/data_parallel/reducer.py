"""Average gradients over ranks, during backward or after it.

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
drop their part: there a reduced gradient is not equal on all ranks. The owner therefore stashes it when a backward
adds to it, before it does, and adds it to the next result.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from smpkit.errors import UnsupportedError, UsageError
from smpkit.torch.data_parallel.buckets import NEVER, Bucket, ReduceTarget, kind_of, plan_buckets
from smpkit.torch.distributed.deadline import waiting

__all__ = ["GradientReducer"]


class GradientReducer:
    """Reduces the gradients of parameters, each over its own group.

    Args:
        parameters: name, parameter and target; those that do not require gradients are left out until they do.
        bucket_cap_bytes: most bytes reduced at once.
        as_view: let gradients be views of the buckets, which saves one copy of all gradients.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter, ReduceTarget]],
        *,
        bucket_cap_bytes: int,
        as_view: bool = False,
    ) -> None:
        self._parameters = [param for _, param, _ in parameters]
        self._names = {id(param): name for name, param, _ in parameters}
        self._targets = {id(param): target for _, param, target in parameters}
        self._bucket_cap_bytes = bucket_cap_bytes
        self._as_view = as_view
        self._lock = threading.Lock()  # a model on two devices runs its hooks on two autograd threads
        self._signature: list[Any] = []
        self._buckets: list[Bucket] = []
        self._frozen_results: set[int] = set()
        self._handles: list[RemovableHandle] = []
        self._overlaps = False
        self._pending: list[dist.Work] = []
        self._on_backward_end: Callable[[], None] | None = None
        self._end_queued = False
        self.refresh()

    @property
    def buckets(self) -> Sequence[Bucket]:
        return self._buckets

    @property
    def has_parameters(self) -> bool:
        return bool(self._parameters)

    def refresh(self) -> None:
        """Plan buckets anew if parameters were frozen, unfrozen, cast or moved since the last time."""
        signature = list(map(kind_of, self._parameters))
        if signature == self._signature:
            return
        self._signature = signature
        for handle in self._handles:
            handle.remove()
        used, reduced = self._used_and_reduced()  # of the old buckets: an accumulation may be under way
        # Gradients become final from the last layer to the first: the reverse of registration is a good guess.
        live = [param for param in reversed(self._parameters) if param.requires_grad]
        self._buckets = plan_buckets(live, self._bucket_cap_bytes, lambda param: self._targets[id(param)])
        self._handles, planned = [], set()
        for bucket in self._buckets:
            for slot, param in enumerate(bucket.params):
                planned.add(id(param))
                if id(param) in used:
                    bucket.used.add(slot)
                if id(param) in reduced:
                    bucket.reduced.add(slot)
                self._handles.append(param.register_post_accumulate_grad_hook(self._listener(bucket, slot)))  # type: ignore[no-untyped-call]
                if bucket.owner is not None and bucket.is_owner:
                    stash = functools.partial(self._stash_earlier_result, bucket, slot)
                    self._handles.append(param.register_hook(stash))  # type: ignore[no-untyped-call]
        self._frozen_results = reduced - planned

    def _used_and_reduced(self) -> tuple[set[int], set[int]]:
        """Return the ids of parameters that this rank has contributed to, and of those whose gradient is a result."""
        used = {id(bucket.params[slot]) for bucket in self._buckets for slot in (*bucket.used, *bucket.arrived)}
        reduced = {id(bucket.params[slot]) for bucket in self._buckets for slot in bucket.reduced}
        return used, reduced | self._frozen_results

    def release(self) -> None:
        """Remove the hooks from the parameters: they would keep the process group alive as long as these live."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._signature = [], []

    def begin_pass(self, on_backward_end: Callable[[], None] | None = None) -> None:
        """Prepare for backwards that do not overlap with reductions.

        Args:
            on_backward_end: called when each of them is over.
        """
        self.refresh()
        self._on_backward_end = on_backward_end
        self._overlaps = False
        self._begin_backward(NEVER)

    def overlap_next_backward(self) -> None:
        """Make the coming backward start reductions as its gradients become final."""
        self._overlaps = True
        self._begin_backward(None)

    def _begin_backward(self, listens_from: int | None) -> None:
        """Listen from so many gradients of a bucket on, or from its last; from its first where each must be seen."""
        if self._as_view or self._on_backward_end is not None:
            listens_from = 0
        for bucket in self._buckets:
            bucket.begin_backward(len(bucket.params) if listens_from is None else listens_from)

    @property
    def active(self) -> bool:
        """Whether reductions have started that are not finished."""
        return bool(self._pending)

    def finish(self) -> None:
        """Start what has not started, wait for everything, and give every parameter its averaged gradient.

        Raises:
            DeadlineError, RemoteError: a rank of the group did not come or failed.
        """
        self._overlaps = False
        while len(self._pending) < len(self._buckets):
            self._start(self._buckets[len(self._pending)])
        # Buckets that need their flags read wait until all reductions are done: then one read serves them all.
        needs_flags_read = []
        for bucket, reduction in zip(self._buckets, self._pending, strict=True):
            with waiting(f"the reduction of gradients (bucket {bucket.index()})", _group_of(bucket)):
                reduction.wait()
            if bucket.needs_flags:
                needs_flags_read.append(bucket)
            else:
                bucket.unpack(self._as_view)
        for bucket, flags in zip(needs_flags_read, _flags_of(needs_flags_read), strict=True):
            bucket.unpack(self._as_view, flags)
        self._pending = []

    def abandon(self) -> None:
        """Drop what an exception interrupted, so that the next step starts clean."""
        self._overlaps = False
        self._end_queued = False
        self._pending = []
        for bucket in self._buckets:
            bucket.reset()

    def _stash_earlier_result(self, bucket: Bucket, slot: int, _: torch.Tensor) -> None:
        with self._lock:
            if slot in bucket.reduced:
                bucket.stash_result(slot)

    def _listener(self, bucket: Bucket, slot: int) -> Callable[[torch.Tensor], None]:
        """Return a parameter's hook, which runs inside backward after each accumulation into its gradient."""
        arrived = bucket.arrived

        def on_gradient(_: torch.Tensor) -> None:  # hundreds of times in a step: the least that tells what arrived
            arrived.append(slot)
            if len(arrived) >= bucket.listens_from:
                self._on_gradient(bucket, slot)

        return on_gradient

    def _on_gradient(self, bucket: Bucket, slot: int) -> None:
        with self._lock:
            if bucket.index() < len(self._pending) and len(bucket.arrived) > bucket.num_packed:
                raise UsageError(
                    f"parameter `{self._names[id(bucket.params[slot])]}` received another gradient in the same"
                    " backward, after its reduction had started",
                    hint="checkpoint with use_reentrant=False, or pass overlapping_allreduce=False to DistributedModel",
                )
            if self._as_view:
                self._refuse_sparse(bucket.params[slot])
                bucket.make_grad_view(slot)
            if self._on_backward_end is not None and not self._end_queued:
                self._end_queued = True
                # As torch's own DDP does: called when the whole backward is over. The name is private.
                Variable._execution_engine.queue_callback(self._end_of_backward)
            # Only the next bucket in the fixed order may start, even if a later one is ready: another rank's hooks may
            # fire in another order, and collectives that start in different orders deadlock.
            while self._overlaps and len(self._pending) < len(self._buckets):
                candidate = self._buckets[len(self._pending)]
                if not candidate.is_ready():
                    return
                self._start(candidate)

    def _end_of_backward(self) -> None:
        self._end_queued = False
        if self._on_backward_end is not None:
            self._on_backward_end()

    def _refuse_sparse(self, param: nn.Parameter) -> None:
        if param.grad is not None and param.grad.layout is not torch.strided:
            raise UnsupportedError(
                f"parameter `{self._names[id(param)]}` has a sparse gradient, which data parallelism does not reduce",
                hint="make its embedding with sparse=False",
            )

    def _start(self, bucket: Bucket) -> None:
        with torch.no_grad():
            try:
                bucket.pack(dist.get_world_size(_group_of(bucket)))
            except RuntimeError:
                for param in bucket.params:
                    self._refuse_sparse(param)
                raise
            self._pending.append(_reduce(bucket))


def _flags_of(buckets: Sequence[Bucket]) -> list[list[float]]:
    """Return the flags of each bucket: read in one copy per device and dtype, because the host waits for each copy."""
    known: dict[Bucket, list[float]] = {}
    by_device_and_dtype: defaultdict[tuple[torch.device, torch.dtype], list[Bucket]] = defaultdict(list)
    for bucket in buckets:
        by_device_and_dtype[bucket.flags.device, bucket.flags.dtype].append(bucket)
    for of_one_kind in by_device_and_dtype.values():
        values = iter(torch.cat([bucket.flags for bucket in of_one_kind]).tolist())
        known.update((bucket, list(itertools.islice(values, len(bucket.params)))) for bucket in of_one_kind)
    return [known[bucket] for bucket in buckets]


def _all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    work: dist.Work = dist.all_reduce(tensor, group=group, async_op=True)
    return work


def _reduce(bucket: Bucket) -> dist.Work:
    """Start to sum the packed buffers of the group, on all ranks or on the owner."""
    if bucket.owner is None:
        return _all_reduce(bucket.flat, _group_of(bucket))
    work: dist.Work = dist.reduce(bucket.flat, group=_group_of(bucket), group_dst=bucket.owner, async_op=True)
    return work


def _group_of(bucket: Bucket) -> dist.ProcessGroup:
    assert bucket.group is not None, "a reducer plans its buckets with groups"
    return bucket.group
