"""Pack gradients into flat buffers, so that a few large reductions replace hundreds of small ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import NoneType
from typing import Final, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from smpkit.torch.core import devices

__all__ = ["NEVER", "Bucket", "ReduceTarget", "chunks_of", "kind_of", "plan_buckets"]

FIRST_BUCKET_BYTES: Final = 1024 * 1024  # small, so that the first reduction starts soon after backward does
NEVER: Final = sys.maxsize
_CACHED_BYTES: Final = 1024 * 1024
"""Of a bucket that stays in a processor's cache: there a second pass over it costs less than calls of Python."""

_Tensor = TypeVar("_Tensor", bound=torch.Tensor)
_Kind = TypeVar("_Kind")

_gradient_of: Final = attrgetter("grad")
kind_of: Final = attrgetter("requires_grad", "dtype", "device")
"""What decides which tensors a message holds: where it changes for one, messages are made anew."""


@dataclass(frozen=True)
class ReduceTarget:
    """Where gradients are reduced: over `group` (the default one if None), to all of it or to the rank at `owner`."""

    group: dist.ProcessGroup | None = None
    owner: int | None = None


ALL_RANKS = ReduceTarget()


class Bucket:
    """Gradients that are reduced together over one group, in one flat buffer of one dtype on one device.

    ::

        buffer   [ grad 0 | grad 1 | ... | grad n-1 | used 0 ... used n-1 ]

    All ranks of the group get the sum, or only its `owner`, where the optimizer state is sharded.

    A used flag is 1 where this rank's backward reached the parameter, so after the sum every rank knows, without
    another message, whether any rank did. A parameter that none reached keeps its gradient (`None` included), as it
    would in one process; torch's reducer leaves such parameters unreduced or fills them with zeros.

    """

    def __init__(self, position: int, parameters: Sequence[nn.Parameter], target: ReduceTarget = ALL_RANKS) -> None:
        self.position = position
        self.group = target.group
        self.owner = target.owner
        self.is_owner = target.owner is None or target.owner == dist.get_rank(target.group)
        self.params = list(parameters)
        self.numels = [param.numel() for param in parameters]
        self.used: set[int] = set()  # slots that earlier backwards reached since the last reduction
        self.arrived: list[int] = []  # slots that the backward now running has reached, each time that it did
        self.num_packed = 0  # arrivals at the latest `pack`
        self.listens_from = NEVER  # arrivals from which on the reducer wants to hear of each; its hooks only count
        self.reduced: set[int] = set()  # with an owner: slots whose gradient is a result, not this rank's part of one
        self.earlier_results: dict[int, torch.Tensor] = {}  # results that the next one is added to
        first = parameters[0]
        self.length = sum(self.numels)
        self.flat = torch.zeros(self.length + len(self.params), dtype=first.dtype, device=first.device)
        """Gradients and flags: what travels."""
        self._is_asynchronous = devices.is_asynchronous(first.device)
        self._buffer, self.flags = self.flat[: self.length], self.flat[self.length :]
        self.views = [
            piece.view(param.shape)
            for piece, param in zip(torch.split(self._buffer, self.numels), parameters, strict=True)
        ]

    def index(self) -> int:
        return self.position

    def is_ready(self) -> bool:
        """Tell whether the backward now running has finished every gradient of this bucket."""
        return len(set(self.arrived)) == len(self.params)

    def begin_backward(self, listens_from: int = NEVER) -> None:
        """Count the gradients of the coming backward, and listen from so many arrivals on."""
        self.used.update(self.arrived)
        self.arrived.clear()
        self.listens_from = listens_from

    def _all_used(self) -> bool:
        return len(self.used) == len(self.params)

    def pack(self, divisor: int) -> None:
        """Copy this rank's gradients, divided by `divisor`, and its flags into the buffer.

        Dividing before the sum, not after, keeps half-precision sums from overflowing.
        """
        self.used.update(self.arrived)
        self.num_packed = len(self.arrived)
        for slot in list(self.reduced):
            self.stash_result(slot)
        gradients = list(map(_gradient_of, self.params))
        if NoneType not in map(type, gradients) and (self.flat.nbytes <= _CACHED_BYTES or self._is_asynchronous):
            torch._foreach_copy_(self.views, gradients)
            self._buffer.div_(divisor)
        else:
            # One pass over memory instead of two, for one call of Python for each gradient.
            for gradient, view in zip(gradients, self.views, strict=True):
                if gradient is None:
                    view.zero_()
                else:
                    torch.div(gradient, divisor, out=view)  # which may be the gradient itself
        if self._all_used():
            self.flags.fill_(1)
        else:
            self.flags.zero_()
            for start, stop in self._used_ranges():  # not from a tensor of the host: the copy would wait for the device
                self.flags[start:stop].fill_(1)

    def _used_ranges(self) -> list[tuple[int, int]]:
        """Return the slots that a backward has reached, as ranges of (first, last + 1)."""
        ranges: list[tuple[int, int]] = []
        for slot in sorted(self.used):
            if ranges and ranges[-1][1] == slot:
                ranges[-1] = (ranges[-1][0], slot + 1)
            else:
                ranges.append((slot, slot + 1))
        return ranges

    @property
    def needs_flags(self) -> bool:
        """Whether `unpack` needs the flags: this rank left out a parameter, which another may have used.

        Else they are not read, because the host would wait for the device.
        """
        return self.is_owner and not self._all_used()

    def unpack(self, as_view: bool, flags: Sequence[float] | None = None) -> None:
        """Give each parameter that any rank's backward reached its reduced gradient, if this rank is its owner.

        Args:
            flags: those of the sum, read from the device, if `needs_flags`.
        """
        if not self.is_owner:
            for param in self.params:
                param.grad = None
            self.reset()
            return
        params, views = self.params, self.views
        unused = set() if flags is None else {slot for slot in range(len(params)) if flags[slot] == 0}  # by no rank
        for slot, earlier in self.earlier_results.items():
            if slot in unused:
                params[slot].grad = earlier
            else:
                views[slot].add_(earlier)
        if unused:
            params = [param for slot, param in enumerate(params) if slot not in unused]
            views = [view for slot, view in enumerate(views) if slot not in unused]
        if as_view:
            for param, view in zip(params, views, strict=True):
                param.grad = view
        elif params:
            _copy_to_gradients(params, views)
        self.reset()
        if self.owner is not None:
            self.reduced = {slot for slot, param in enumerate(self.params) if param.grad is not None}

    def reset(self) -> None:
        """Forget which gradients this rank has contributed to."""
        self.used.clear()
        self.arrived.clear()
        self.reduced.clear()
        self.earlier_results.clear()

    def stash_result(self, slot: int) -> None:
        """Move a result out of `param.grad`, which this rank's next contribution needs.

        See [Note: results on one rank] in reducer.py.
        """
        self.reduced.discard(slot)
        grad = self.params[slot].grad
        if grad is not None:  # `zero_grad` may have cleared it in the meantime
            self.earlier_results[slot] = grad.clone() if self._in_place(slot) else grad
            self.params[slot].grad = None

    def make_grad_view(self, slot: int) -> None:
        """Make the gradient a view of the buffer, freeing the tensor that autograd made for it."""
        grad = self.params[slot].grad
        if grad is not None and not self._in_place(slot):
            self.views[slot].copy_(grad)
            self.params[slot].grad = self.views[slot]

    def _in_place(self, slot: int) -> bool:
        grad = self.params[slot].grad
        return grad is not None and grad.data_ptr() == self.views[slot].data_ptr() and grad.is_contiguous()


def _copy_to_gradients(params: list[nn.Parameter], results: list[torch.Tensor]) -> None:
    if NoneType in map(type, map(_gradient_of, params)):
        for param, result in zip(params, results, strict=True):
            if param.grad is None:
                param.grad = torch.empty_like(result)
    torch._foreach_copy_(list(map(_gradient_of, params)), results)


def chunks_of(
    tensors: Iterable[tuple[_Tensor, _Kind]], cap_bytes: int, first_cap_bytes: int | None = None
) -> list[tuple[_Kind, list[_Tensor]]]:
    """Group tensors, in their order, into chunks of one kind, dtype and device, and of at most `cap_bytes`.

    A tensor larger than the cap has a chunk of its own. Chunks are in the order in which their first tensors come.
    """
    chunks: list[tuple[_Kind, list[_Tensor]]] = []
    latest: dict[object, tuple[list[_Tensor], int]] = {}
    for tensor, kind in tensors:
        key = (tensor.dtype, tensor.device, kind)
        chunk, filled = latest.get(key, ([], 0))
        limit = first_cap_bytes if first_cap_bytes and chunks and chunk is chunks[0][1] else cap_bytes
        if not chunk or filled + tensor.nbytes > limit:
            chunk, filled = [], 0
            chunks.append((kind, chunk))
        chunk.append(tensor)
        latest[key] = chunk, filled + tensor.nbytes
    return chunks


def plan_buckets(
    parameters: Sequence[nn.Parameter],
    cap_bytes: int,
    reduce_target_of: Callable[[nn.Parameter], ReduceTarget] = lambda _: ALL_RANKS,
) -> list[Bucket]:
    """Group parameters, given in the order their gradients become ready, into buckets of at most `cap_bytes`.

    A bucket holds one dtype of one device for one target; a parameter larger than the cap has a bucket of its own.
    Buckets are in the order in which their last gradients become ready.
    """
    first_cap_bytes = min(FIRST_BUCKET_BYTES, cap_bytes)
    contents = chunks_of([(param, reduce_target_of(param)) for param in parameters], cap_bytes, first_cap_bytes)
    ready_order = {id(param): index for index, param in enumerate(parameters)}
    contents.sort(key=lambda content: ready_order[id(content[1][-1])])
    return [Bucket(index, params, target) for index, (target, params) in enumerate(contents)]
