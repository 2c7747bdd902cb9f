"""What one microbatch sends to and receives from other ranks, and the segments into which that cuts its work.

All ranks see the same transfers in the same order and give them the same numbers.

[Note: segments] A rank's work for one microbatch is cut where it receives after it has sent: what it then receives may
depend on what it sent, so it may have to wait, and its backward runs in as many parts. A value made in one segment and
used in a later one is detached there; see `backward.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from smpkit.torch.pipeline.backward import BackwardWork
from smpkit.torch.pipeline.located import StageTensor, make_stage_tensor, refuse_foreign_graph
from smpkit.torch.pipeline.messages import version_of
from smpkit.torch.pipeline.record import DIVERGED, P2PTransfer, TransferRecord
from smpkit.torch.pipeline.sharing import stale_alias_error
from smpkit.torch.pipeline.specs import TensorSpec, to_layout
from smpkit.torch.pipeline.weights import StageParameters

if TYPE_CHECKING:
    from smpkit.torch.pipeline.carried import ModuleStateTracker
    from smpkit.torch.pipeline.stage import StageContext

__all__ = ["MicrobatchTransfers"]


class MicrobatchTransfers:
    """What travels for one microbatch, as this rank sees it.

    Args:
        stage: what this rank is and holds.
        index: which microbatch of the step.
    """

    record: TransferRecord | None = None
    """The transfers that it should make; None if it is the first of its kind, or each may differ."""
    diverged = False
    """Whether it has diverged from the record. All ranks must detect this at the same transfer, or they deadlock."""
    has_mutations = False
    """Whether a call has changed in place what it was given, on whichever rank."""
    before_wait: Callable[[], None] | None = None
    """Called where a new segment begins: lets other work of this rank go first."""
    state_tracker: ModuleStateTracker | None = None
    """Compares the state of modules where a new segment begins; None once that is known."""
    _in_hooks = 0

    def __init__(self, stage: StageContext, index: int) -> None:
        self.stage = stage
        self.index = index
        self.transfers: list[P2PTransfer] = []
        self.call_trace: list[str] = []
        """The names of all calls in order: the same on every rank, or the ranks run different programs."""
        self._sent_versions: list[tuple[int, torch.Tensor, int]] = []
        self._rank, self._device_type = stage.rank, stage.device.type
        self._segments = [0] * stage.size
        self._sent = [False] * stage.size
        self.weights = StageParameters(stage, self._segments)
        self.backward_work = BackwardWork(stage.transport, index)
        self.unsplittable: set[int] = set()
        """Segments of this rank in which hooks were used that run in every walk through the graph."""

    @property
    def num_segments(self) -> tuple[int, ...]:
        """How many segments each rank has had so far."""
        return tuple(segment + 1 for segment in self._segments)

    def segment_of(self, rank: int) -> int:
        """Return the segment that a rank is in."""
        return self._segments[rank]

    @property
    def num_own_segments(self) -> int:
        """How many of them this rank has had."""
        return self._segments[self._rank] + 1

    def _transfer_once(self, tensor: torch.Tensor, owner: int) -> torch.Tensor:
        """Return the value as rank `owner` has it, transferring it there the first time."""
        if type(tensor) is not StageTensor:
            return tensor
        if (grad_fn := tensor.grad_fn) is not None:
            refuse_foreign_graph(grad_fn)
        if tensor.owner == owner:
            return tensor
        copy = tensor.copies.get(owner)
        if copy is None:
            copy = self._transfer(tensor, owner, tensor.spec)
            tensor.copies = {**tensor.copies, owner: copy}
        return copy

    def replicate(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the data of a value on every rank, without its graph."""
        if type(tensor) is not StageTensor:
            return tensor
        spec = tensor.spec.without_gradient
        copies = [self._transfer(tensor, rank, spec) for rank in range(self.stage.size) if rank != tensor.owner]
        mine = tensor if tensor.owner == self.stage.rank else next(c for c in copies if c.owner == self.stage.rank)
        # With the same strides on all ranks.
        return to_layout(self._local_value(mine).detach(), tensor.spec.as_sent.order)

    def _transfer(self, tensor: StageTensor, target: int, spec: TensorSpec) -> StageTensor:
        stage, source, spec = self.stage, tensor.owner, spec.as_sent
        begins = self._sent[target]
        if begins:
            self._segments[target] += 1
            self._sent[target] = False
        self._sent[source] = True
        transfer = self._next_transfer(source, target, spec)
        self.transfers.append(transfer)
        if source == self._rank:
            sent = self._local_value(tensor)
            self._send(sent.detach(), transfer)  # first: somebody waits for it
            if spec.requires_grad:
                self.backward_work.add_send(sent, transfer, self._segments[source])
        elif target == self._rank and begins:
            if self.state_tracker is not None:
                self.state_tracker.cut()
            if self.before_wait is not None:
                self.before_wait()
        received = make_stage_tensor(spec, stage.device, target, None, self._segments[target])
        if target == self._rank:
            received.value = self._receive(transfer)
        return received

    def _receive(self, transfer: P2PTransfer) -> torch.Tensor:
        """Return a value that this rank gets, a leaf of its segment."""
        work, segment, transport = self.backward_work, self._segments[self._rank], self.stage.transport
        if self._in_hooks:
            self.unsplittable.add(segment)
        if not transfer.spec.requires_grad:
            return transport.receive(self.index, transfer)
        is_mutable = self.record is None or self.diverged or self.record.has_mutations
        return transport.receive(
            self.index, transfer, lambda value: work.add_receive(value, transfer, segment, is_mutable=is_mutable)
        )

    def _next_transfer(self, source: int, target: int, spec: TensorSpec) -> P2PTransfer:
        """Return the transfer as the record has it; where that has another, or none, this microbatch has diverged."""
        number, record = len(self.transfers), self.record
        if record is not None and not self.diverged:
            known = record.transfers[number] if number < len(record.transfers) else None
            if (
                known is not None
                and (known.source, known.target) == (source, target)
                and (known.spec is spec or known.spec == spec)
            ):
                return known
            self._diverge()
        # Other numbers, hence other tags: receives that were posted for the record's transfers must not get these.
        number += DIVERGED * self.diverged
        consumer = self.call_trace[-1] if self.call_trace else ""
        return P2PTransfer(number, source, target, self._segments[source], self._segments[target], spec, consumer)

    def _diverge(self) -> None:
        """Diverge from the record, and let everything run first that follows it."""
        if self.record is not None and not self.diverged:
            self.diverged = True
            self.stage.transport.leave_channels()
            if self.before_wait is not None:
                self.before_wait()

    def _send(self, sent: torch.Tensor, transfer: P2PTransfer) -> None:
        """Send a value; a copy of it where the record does not say that it stays as it is while it travels."""
        is_unchanged = self.record is not None and not self.diverged and transfer.number not in self.record.mutated
        if not is_unchanged:
            self._sent_versions.append((transfer.number, sent, version_of(sent)))
        self.stage.transport.send(sent, self.index, transfer, copy=not is_unchanged)

    def end_forward(self) -> None:
        """Note that the code of this microbatch has run to its end."""
        self.call_trace.append("the end of the step function")
        if self.record is not None and len(self.transfers) < len(self.record.transfers):
            self.diverged = True
            self.stage.transport.leave_channels()

    def make_record(self) -> TransferRecord:
        """Return the transfers that this microbatch has made, for others to follow."""
        mutated = [number for number, sent, version in self._sent_versions if version_of(sent) != version]
        self._sent_versions.clear()
        return TransferRecord(tuple(self.transfers), frozenset(mutated), self.has_mutations)

    def _local_value(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the data of a value whose owner this is, detached if an earlier segment made it."""
        segment = self._segments[self._rank]
        if type(tensor) is not StageTensor:
            outside = segment > 0 and tensor.requires_grad and not tensor.is_leaf
            return self.backward_work.cut(tensor, 0, segment) if outside else tensor
        value = tensor.value
        if value is None:
            raise stale_alias_error(tensor)
        made_earlier = tensor.segment != segment and value.requires_grad
        return self.backward_work.cut(value, tensor.segment, segment) if made_earlier else value
