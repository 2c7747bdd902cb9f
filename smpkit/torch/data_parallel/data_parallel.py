"""Keep replicas of a model equal: same values at the start, averaged gradients after each step.

::

    replicate()       compare the models ──► broadcast the first replica's values
    each pass         broadcast buffers ──► forward, backward ──► GradientReducer averages (reducer.py)
    with zero-1       each gradient goes to the owner of its parameter only (state_sharding.py)
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from smpkit.errors import UsageError
from smpkit.plan.mesh import CommGroup
from smpkit.torch.core.runtime import state
from smpkit.torch.core.step_participants import StepParticipant
from smpkit.torch.data_parallel.reducer import GradientReducer
from smpkit.torch.data_parallel.replicas import (
    UPDATES_COMPARED,
    broadcast_tensors,
    check_same_model,
    check_same_weights,
)
from smpkit.torch.data_parallel.state_sharding import Zero1Partition, reduce_target_of
from smpkit.torch.placement.placement import ParameterPlacement, Placement
from smpkit.torch.placement.shards import is_tp_shard
from smpkit.torch.recording.recorder import recorded_work

if TYPE_CHECKING:
    from smpkit.torch.core.microbatches import StepProgress


_REPLICATED: Final = "the broadcast of parameters and buffers"


@dataclass(frozen=True)
class ReductionOptions:
    """How gradients are reduced."""

    overlapping: bool
    """During the last backward of a pass, not after it."""
    passes_per_reduction: int
    """Passes whose gradients add up before they are reduced, unless they are used before."""
    bucket_cap_bytes: int
    broadcast_buffers: bool
    """Whether the first replica's buffers are copied to the others at the start of every training pass."""


def replicate(module: nn.Module, placement: Placement, reduction: ReductionOptions) -> DataParallel | None:
    """Make this rank's part of `module` equal to its replicas', and return what keeps it so; None if it has none."""
    if state.cfg.ddp and state.dp_size > 1:
        check_same_model(module, placement)
    placement.make_groups()
    placements = placement.local
    if all(
        placed.replica_group is None and placed.reduce_group is None and placed.grad_scale == 1 for placed in placements
    ):
        return None
    return DataParallel(module, placements, reduction)


class DataParallel(StepParticipant):
    """One rank's part of a model, and the ranks that hold the same.

    A *pass* is one step with a backward, or outside steps one backward; every `passes_per_reduction`-th pass reduces.
    """

    def __init__(
        self, module: nn.Module, placements: Sequence[ParameterPlacement], reduction: ReductionOptions
    ) -> None:
        self._reduction = reduction
        # What is added to these modules later is seen; a module that is added later is no part of this rank's model.
        self._buffers_by_module = [part._buffers for part in module.modules()]
        self._passes = 0
        self._placements = placements
        self._comparisons_left = UPDATES_COMPARED
        self._has_replicas = state.cfg.ddp and state.dp_size > 1
        broadcast_parameters(placements)
        if self._has_replicas:
            self._broadcast_all_buffers()
        self._grad_scaling = GradientScaling((placed.parameter, placed.grad_scale) for placed in placements)
        reduced = [placed for placed in placements if placed.reduce_group is not None]
        self.reducer = GradientReducer(
            [(placed.name, placed.parameter, reduce_target_of(placed)) for placed in reduced],
            bucket_cap_bytes=reduction.bucket_cap_bytes,
        )
        is_sharded = state.cfg.shard_optimizer_state and state.cfg.ddp
        self.zero1 = Zero1Partition(placements, self.reducer) if is_sharded else None

    def release(self) -> None:
        """Remove the hooks from the parameters, at shutdown."""
        self.reducer.release()
        self._grad_scaling.release()

    def replace_parameters_of(self, optimizer: Any) -> None:
        """Make an optimizer hold the parameters that this rank updates; here it does already."""

    def begin_step(self, step: StepProgress) -> None:
        """Prepare for the microbatches of a step."""
        self._begin_pass(step.training)

    def before_backward(self, step: StepProgress) -> None:
        """Make the coming backward reduce while it runs, if it is the last of the step."""
        self.reducer.plan()  # the step may have frozen or unfrozen parameters, as those of GANs do between backwards
        if not self._reduces_now():
            return
        if self.reducer.active:
            # One backward more than last time: what is reduced already stays right, see the note in reducer.py.
            self.reducer.finish()
        elif step.is_last_backward:
            self.before_last_backward()

    def before_last_backward(self) -> None:
        """Make the coming backward, which is the last of the step, reduce while it runs."""
        if self._reduction.overlapping and self._reduces_now():
            self.reducer.overlap_next_backward()

    def end_step(self, step: StepProgress) -> None:
        """Make gradients final, where the step had a backward and ends an accumulation."""
        with recorded_work("reduce gradients"):
            if step.total_backwards:
                self._end_pass()

    def end_accumulation(self) -> None:
        """Make gradients final before their time: the last passes of an epoch may be fewer than an accumulation has."""
        if left := -self._passes % self._reduction.passes_per_reduction:
            self._passes += left
            self.reducer.finish()

    def abandon_step(self, error: BaseException) -> None:  # noqa: ARG002 - that of all parts
        """Forget a step that an exception ended."""
        self.reducer.abandon()

    def begin_outside_step(self, training: bool) -> None:
        """Prepare for a forward and backward outside any step."""
        if not torch.is_grad_enabled():
            return
        self._begin_pass(training, self._end_pass)
        self.before_last_backward()

    def _broadcast_all_buffers(self) -> None:
        """Copy the buffers of the first replica to the others; pieces only to the ranks that hold the same piece."""
        own = {id(buffer): buffer for buffers in filter(None, self._buffers_by_module) for buffer in buffers.values()}
        buffers = [buffer for buffer in own.values() if buffer is not None and buffer.device.type != "meta"]
        whole, piece = state.process_group(CommGroup.DP_GROUP), state.process_group(CommGroup.RDP_GROUP)
        broadcast_tensors([(buffer, (piece if is_tp_shard(buffer) else whole, 0)) for buffer in buffers], _REPLICATED)

    def _begin_pass(self, training: bool, on_backward_end: Callable[[], None] | None = None) -> None:
        self._grad_scaling.refresh()
        self.reducer.begin_pass(on_backward_end)
        if self._has_replicas and self._reduction.broadcast_buffers and training and torch.is_grad_enabled():
            self._broadcast_all_buffers()

    def _end_pass(self) -> None:
        if self._reduces_now():
            is_later_one = self._passes >= self._reduction.passes_per_reduction
            if self.zero1 is not None and state.optimizer is None and is_later_one:
                raise UsageError(
                    "shard_optimizer_state needs smp.DistributedOptimizer, which gives each rank the parameters that "
                    "others have updated",
                    hint="wrap the optimizer: `optimizer = smp.DistributedOptimizer(optimizer)`",
                )
            self.reducer.finish()
            if self._has_replicas and self._comparisons_left:
                self._comparisons_left -= 1
                check_same_weights(self._placements)
        self._passes += 1

    def _reduces_now(self) -> bool:
        return (self._passes + 1) % self._reduction.passes_per_reduction == 0


def broadcast_parameters(placements: Iterable[ParameterPlacement]) -> None:
    """Copy parameters from the first replica, whose ranks are the first of their groups, to all that hold the same."""
    held = [(placed.parameter, placed.replica_group) for placed in placements]
    broadcast_tensors([(parameter, (group, 0)) for parameter, group in held if group is not None], _REPLICATED)


class GradientScaling:
    """Multiplies what every backward adds to the gradient of some parameters.

    As gradients arise and not once at the end, so that averages of averages stay right (see the note in reducer.py).
    """

    def __init__(self, grad_scales: Iterable[tuple[nn.Parameter, float]]) -> None:
        self._grad_scales = [(parameter, grad_scale) for parameter, grad_scale in grad_scales if grad_scale != 1]
        self._handles: dict[int, RemovableHandle] = {}
        self.refresh()

    def refresh(self) -> None:
        """Add parameters that were frozen until now; a hook outlives freezing, unfreezing and casts."""
        for parameter, grad_scale in self._grad_scales:
            if parameter.requires_grad and id(parameter) not in self._handles:
                handle = parameter.register_hook(functools.partial(operator.mul, grad_scale))  # type: ignore[no-untyped-call]
                self._handles[id(parameter)] = handle

    def release(self) -> None:
        """Remove the hooks: they live as long as the parameters, which may outlive the process groups."""
        for handle in self._handles.values():
            handle.remove()
        self._handles, self._grad_scales = {}, []
