"""Keep replicas of a model equal: same values at the start, averaged gradients after each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from smpkit.torch.comm import CommGroup
from smpkit.torch.initialize import extra_group
from smpkit.torch.reducer import CommHook, GradientReducer
from smpkit.torch.replicas import broadcast_tensors, check_same_model
from smpkit.torch.state import state

if TYPE_CHECKING:
    from smpkit.torch.join import JoinContext
    from smpkit.torch.step import StepRun

__all__ = ["DataParallel", "Reduction", "replicate"]


@dataclass(frozen=True)
class Reduction:
    """How gradients are reduced.

    Args:
        overlapping: reduce during the last backward of a pass, not after it.
        passes_per_reduction: passes whose gradients add up before they are reduced.
        bucket_cap_bytes, gradient_as_bucket_view: see GradientReducer.
        broadcast_buffers: copy the first replica's buffers to the others at the start of every training pass.
    """

    overlapping: bool
    passes_per_reduction: int
    bucket_cap_bytes: int
    broadcast_buffers: bool
    gradient_as_bucket_view: bool


def replicate(module: nn.Module, holders: Mapping[int, frozenset[int]], reduction: Reduction) -> DataParallel | None:
    """Make this rank's part of `module` equal to its replicas', and return what keeps it so; None if it has none.

    Args:
        holders: the pipeline ranks that hold each parameter (by its id); empty without a pipeline.
    """
    shares = _shares(module, holders)
    if state.cfg.ddp and state.dp_size > 1:
        check_same_model(module, state.process_group(CommGroup.DP_GROUP))
    return DataParallel(module, shares, reduction) if shares else None


@dataclass(frozen=True)
class _Share:
    """Parameters that the same ranks hold, and those ranks."""

    parameters: list[tuple[str, nn.Parameter]]
    group: dist.ProcessGroup
    copies: int
    """How many ranks of one pipeline hold them, each with a part of the gradient."""


def _shares(module: nn.Module, holders: Mapping[int, frozenset[int]]) -> list[_Share]:
    """Group this rank's parameters by the ranks that hold them; parameters that only it holds are left out."""
    alone = frozenset({state.pp_rank})
    found: dict[frozenset[int], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in module.named_parameters():
        ranks = holders.get(id(parameter), alone)
        if state.pp_rank in ranks:
            found.setdefault(ranks, []).append((name, parameter))
    replicated = state.cfg.ddp and state.dp_size > 1
    shares = []
    for ranks in sorted(found, key=sorted):
        if ranks == alone and replicated:
            shares.append(_Share(found[ranks], state.process_group(CommGroup.DP_GROUP), 1))
        elif ranks != alone:
            shares.append(_Share(found[ranks], extra_group(_union(ranks, replicated)), len(ranks)))
    return shares


def _union(pp_ranks: frozenset[int], replicated: bool) -> tuple[int, ...]:
    """Return the global ranks that hold the same parameters as the pipeline ranks `pp_ranks` of this pipeline."""
    mine = state.mesh.coordinates(state.rank)
    members = []
    for rank in range(state.size):
        place = state.mesh.coordinates(rank)
        same_pipeline = (place.tp, place.rdp) == (mine.tp, mine.rdp)
        if place.pp in pp_ranks and (replicated or same_pipeline):
            members.append(rank)
    return tuple(members)


class DataParallel:
    """One rank's part of a model, and the ranks that hold the same.

    A *pass* is one step with a backward, or outside steps one backward; every `passes_per_reduction`-th pass reduces.

    [Note: parameters on several ranks of one pipeline] Each of their ranks sees a part of the gradient; the whole is
    the sum. Every part is multiplied by the number of ranks as it arises, and then averaged like the gradients of
    replicas: so the note in reducer.py holds for them too.
    """

    def __init__(self, module: nn.Module, shares: Sequence[_Share], reduction: Reduction) -> None:
        self.group: dist.ProcessGroup = state.process_group(CommGroup.DP_GROUP)
        self.overlapping = reduction.overlapping
        self.joining: JoinContext | None = None
        self._module = module
        self._shares = shares
        self._passes = 0
        self._passes_per_reduction = reduction.passes_per_reduction
        self._broadcast_buffers = reduction.broadcast_buffers and state.cfg.ddp and state.dp_size > 1
        self.broadcast_state()
        for share in shares:
            _scale_gradients(share)
        self.reducers = [
            GradientReducer(
                share.parameters,
                share.group,
                bucket_cap_bytes=reduction.bucket_cap_bytes,
                as_view=reduction.gradient_as_bucket_view,
            )
            for share in shares
        ]

    def release(self) -> None:
        """Let go of the parameters, when the groups come to their end."""
        for reducer in self.reducers:
            reducer.release()

    def begin_step(self, training: bool) -> None:
        """Get ready for the microbatches of a step."""
        for reducer in self.reducers:
            reducer.on_backward_end = None
            reducer.disarm()
        self._begin_pass(training)

    def before_backward(self, run: StepRun) -> None:
        """Let the last backward of a step reduce while it runs."""
        if not self._reduces_now():
            return
        if any(reducer.active for reducer in self.reducers):
            # One backward more than last time: what is reduced already stays right, see the note in reducer.py.
            self._finish()
        elif run.is_last_backward:
            self.before_last_backward()

    def before_last_backward(self) -> None:
        """Let the backward that comes next reduce while it runs."""
        if self.overlapping and self._reduces_now():
            for reducer in self._independent():
                reducer.arm()

    def end_step(self, run: StepRun) -> None:
        """Make gradients final, where the step had a backward and ends an accumulation."""
        if run.total_backwards:
            self._end_pass()

    def abandon(self) -> None:
        """Forget a step that an exception ended."""
        for reducer in self.reducers:
            reducer.abandon()

    def begin_plain_pass(self, training: bool) -> None:
        """Get ready for a forward and backward outside any step."""
        if not torch.is_grad_enabled():
            return
        self._begin_pass(training)
        for reducer in self.reducers:
            reducer.on_backward_end = self._end_pass
        if self.overlapping and self._reduces_now():
            for reducer in self._independent():
                reducer.arm()

    def shadow_pass(self) -> None:
        """Take part, without inputs, in what the other replicas do in one training pass (see `join`)."""
        if self._broadcast_buffers:
            self._broadcast_all_buffers(0)
        if self._reduces_now():
            for reducer in self.reducers:
                reducer.shadow()
        self._passes += 1

    def broadcast_state(self, source: int = 0) -> None:
        """Copy the parameters and buffers of the replica with dp_rank `source` to the others."""
        for share in self._shares:
            broadcast_tensors([parameter for _, parameter in share.parameters], share.group, source)
        if state.cfg.ddp and state.dp_size > 1:
            self._broadcast_all_buffers(source)

    def set_comm_hook(self, hook_state: object, hook: CommHook) -> None:
        """Replace the all-reduce of gradients."""
        for reducer in self.reducers:
            reducer.set_comm_hook(hook_state, hook)

    @property
    def has_comm_hook(self) -> bool:
        return any(reducer.has_comm_hook for reducer in self.reducers)

    def _independent(self) -> list[GradientReducer]:
        """Return the reducers that may start inside backward.

        Those of parameters on several ranks of a pipeline wait for its end: their ranks get there at different times,
        and a collective that one of them starts early would hold up the others' messages.
        """
        return [reducer for reducer, share in zip(self.reducers, self._shares, strict=True) if share.copies == 1]

    def _broadcast_all_buffers(self, source: int) -> None:
        held = [buffer for buffer in self._module.buffers() if buffer.device.type != "meta"]
        broadcast_tensors(held, self.group, source)

    def _begin_pass(self, training: bool) -> None:
        for reducer in self.reducers:
            reducer.refresh()
        if not (training and torch.is_grad_enabled()):
            return
        if self.joining is not None:
            self.joining.notify()
        if self._broadcast_buffers:
            self._broadcast_all_buffers(0)

    def _finish(self) -> None:
        for reducer in self.reducers:
            reducer.finish()

    def _end_pass(self) -> None:
        if self._reduces_now():
            self._finish()
        self._passes += 1

    def _reduces_now(self) -> bool:
        return (self._passes + 1) % self._passes_per_reduction == 0


def _scale_gradients(share: _Share) -> None:
    """Multiply what each rank contributes, see [Note: parameters on several ranks of one pipeline]."""
    if share.copies == 1:
        return
    for _, parameter in share.parameters:
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient, copies=share.copies: gradient * copies)  # type: ignore[no-untyped-call]
