"""What one microbatch sends to and receives from other ranks, and the segments into which that cuts its work.

All ranks see the same moves in the same order and give them the same numbers.

[Note: segments] A rank's work for one microbatch is cut where it receives after it has sent: what it then receives may
depend on what it sent, so it may have to wait, and its backward runs in as many parts. A value made in one segment and
used in a later one is cut off its graph there; see `backward.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from smpkit.torch.pipeline.backward import BackwardWork
from smpkit.torch.pipeline.located import Located, locate, refuse_foreign_graph
from smpkit.torch.pipeline.messages import version_of
from smpkit.torch.pipeline.record import STRAYED, Move, Record
from smpkit.torch.pipeline.sharing import left_behind
from smpkit.torch.pipeline.specs import TensorSpec, laid
from smpkit.torch.pipeline.weights import LocatedWeights

if TYPE_CHECKING:
    from smpkit.torch.pipeline.carried import Carried
    from smpkit.torch.pipeline.stage import Stage

__all__ = ["Moves"]


class Moves:
    """What travels for one microbatch, as this rank sees it.

    Args:
        stage: what this rank is and holds.
        index: which microbatch of the step.
    """

    record: Record | None = None
    """Which way it should go; None if it is the first of its kind, or each may go another way."""
    strayed = False
    """Whether it has gone another way than the record. All ranks notice alike, or they run different programs."""
    changes = False
    """Whether a call has changed in place what it was given, on whichever rank."""
    before_wait: Callable[[], None] | None = None
    """Called where a new segment begins: lets other work of this rank go first."""
    carried: Carried | None = None
    """Looks at what modules keep where a new segment begins; None if that is known."""
    _in_hooks = 0

    def __init__(self, stage: Stage, index: int) -> None:
        self.stage = stage
        self.index = index
        self.moves: list[Move] = []
        self.path: list[str] = []
        """The names of all calls in order: the same on every rank, or the ranks run different programs."""
        self._handed_over: list[tuple[int, torch.Tensor, int]] = []
        self._rank, self._device_type = stage.rank, stage.device.type
        self._segments = [0] * stage.size
        self._sent = [False] * stage.size
        self.weights = LocatedWeights(stage, self._segments)
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

    def _bring(self, tensor: torch.Tensor, home: int) -> torch.Tensor:
        """Return the value as rank `home` has it, moving it there the first time."""
        if type(tensor) is not Located:
            return tensor
        if (grad_fn := tensor.grad_fn) is not None:
            refuse_foreign_graph(grad_fn)
        if tensor.home == home:
            return tensor
        copy = tensor.copies.get(home)
        if copy is None:
            copy = self._move(tensor, home, tensor.spec)
            tensor.copies = {**tensor.copies, home: copy}
        return copy

    def everywhere(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the data of a value on every rank, without its graph."""
        if type(tensor) is not Located:
            return tensor
        spec = tensor.spec.without_gradient
        copies = [self._move(tensor, rank, spec) for rank in range(self.stage.size) if rank != tensor.home]
        mine = tensor if tensor.home == self.stage.rank else next(c for c in copies if c.home == self.stage.rank)
        return laid(self._real(mine).detach(), tensor.spec.as_sent.order)  # with the same strides on all ranks

    def _move(self, tensor: Located, target: int, spec: TensorSpec) -> Located:
        stage, source, spec = self.stage, tensor.home, spec.as_sent
        begins = self._sent[target]
        if begins:
            self._segments[target] += 1
            self._sent[target] = False
        self._sent[source] = True
        move = self._next_move(source, target, spec)
        self.moves.append(move)
        if source == self._rank:
            sent = self._real(tensor)
            self._hand_over(sent.detach(), move)  # first: somebody waits for it
            if spec.requires_grad:
                self.backward_work.departs(sent, move, self._segments[source])
        elif target == self._rank and begins:
            if self.carried is not None:
                self.carried.cut()
            if self.before_wait is not None:
                self.before_wait()
        moved = locate(spec, stage.device, target, None, self._segments[target])
        if target == self._rank:
            moved.value = self._received(move)
        return moved

    def _received(self, move: Move) -> torch.Tensor:
        """Return a value that this rank gets, a leaf of its segment."""
        work, segment, transport = self.backward_work, self._segments[self._rank], self.stage.transport
        if self._in_hooks:
            self.unsplittable.add(segment)
        if not move.spec.requires_grad:
            return transport.receive(self.index, move)
        may_change = self.record is None or self.strayed or self.record.changes
        return transport.receive(
            self.index, move, lambda value: work.arrives(value, move, segment, may_change=may_change)
        )

    def _next_move(self, source: int, target: int, spec: TensorSpec) -> Move:
        """Return the move as the record has it; where that has another, or none, this microbatch has strayed."""
        number, record = len(self.moves), self.record
        if record is not None and not self.strayed:
            known = record.moves[number] if number < len(record.moves) else None
            if (
                known is not None
                and (known.source, known.target) == (source, target)
                and (known.spec is spec or known.spec == spec)
            ):
                return known
            self._stray()
        # Other numbers, hence other tags: receives that were posted for the record's moves must not get these.
        number += STRAYED * self.strayed
        unit = self.path[-1] if self.path else ""
        return Move(number, source, target, self._segments[source], self._segments[target], spec, unit)

    def _stray(self) -> None:
        """Leave the record, and let everything go first that follows it."""
        if self.record is not None and not self.strayed:
            self.strayed = True
            self.stage.transport.leave()
            if self.before_wait is not None:
                self.before_wait()

    def _hand_over(self, sent: torch.Tensor, move: Move) -> None:
        """Send a value; a copy of it where the record does not say that it stays as it is while it travels."""
        stays = self.record is not None and not self.strayed and move.number not in self.record.changed
        if not stays:
            self._handed_over.append((move.number, sent, version_of(sent)))
        self.stage.transport.send(sent, self.index, move, copy=not stays)

    def end_forward(self) -> None:
        """Note that the code of this microbatch has run to its end."""
        self.path.append("the end of the step function")
        if self.record is not None and len(self.moves) < len(self.record.moves):
            self.strayed = True
            self.stage.transport.leave()

    def recorded(self) -> Record:
        """Return the way that this microbatch has gone, for others to follow."""
        changed = [number for number, sent, version in self._handed_over if version_of(sent) != version]
        self._handed_over.clear()
        return Record(tuple(self.moves), frozenset(changed), self.changes)

    def _real(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the data of a value whose home this is, cut off its graph if that belongs to an earlier segment."""
        segment = self._segments[self._rank]
        if type(tensor) is not Located:
            outside = segment > 0 and tensor.requires_grad and not tensor.is_leaf
            return self.backward_work.cut(tensor, 0, segment) if outside else tensor
        value = tensor.value
        if value is None:
            raise left_behind(tensor)
        made_earlier = tensor.segment != segment and value.requires_grad
        return self.backward_work.cut(value, tensor.segment, segment) if made_earlier else value
