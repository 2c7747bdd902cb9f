"""Keep replicas of a model equal: same values at the start, averaged gradients after each step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from smpkit.torch.comm import CommGroup
from smpkit.torch.reducer import GradientReducer
from smpkit.torch.replicas import broadcast_tensors, check_same_model
from smpkit.torch.state import state

if TYPE_CHECKING:
    from smpkit.torch.join import JoinContext
    from smpkit.torch.step import StepRun

__all__ = ["DataParallel"]


class DataParallel:
    """One replica of `module` (this rank's) among those of its data-parallel group.

    A *pass* is one step with a backward, or outside steps one backward; every `passes_per_reduction`-th pass reduces.

    Args:
        overlapping: reduce during the last backward of a pass, not after it.
        passes_per_reduction: passes whose gradients add up before they are reduced.
        bucket_cap_bytes, gradient_as_bucket_view: see GradientReducer.
        broadcast_buffers: copy the first replica's buffers to the others at the start of every training pass.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        overlapping: bool,
        passes_per_reduction: int,
        bucket_cap_bytes: int,
        broadcast_buffers: bool,
        gradient_as_bucket_view: bool,
    ) -> None:
        self.group: dist.ProcessGroup = state.process_group(CommGroup.DP_GROUP)
        self.overlapping = overlapping
        self.joining: JoinContext | None = None
        self._module = module
        self._passes = 0
        self._passes_per_reduction = passes_per_reduction
        self._broadcast_buffers = broadcast_buffers
        check_same_model(module, self.group)
        self.broadcast_state()
        self.reducer = GradientReducer(
            list(module.named_parameters()),
            self.group,
            bucket_cap_bytes=bucket_cap_bytes,
            as_view=gradient_as_bucket_view,
        )

    def begin_step(self, training: bool) -> None:
        """Get ready for the microbatches of a step."""
        self.reducer.on_backward_end = None
        self.reducer.disarm()
        self._begin_pass(training)

    def before_backward(self, run: StepRun) -> None:
        """Let the last backward of a step reduce while it runs."""
        if not self._reduces_now():
            return
        if self.reducer.active:
            # One backward more than last time: what is reduced already stays right, see the note in reducer.py.
            self.reducer.finish()
        elif self.overlapping and run.is_last_backward:
            self.reducer.arm()

    def end_step(self, run: StepRun) -> None:
        """Make gradients final, where the step had a backward and ends an accumulation."""
        if run.total_backwards:
            self._end_pass()

    def abandon(self) -> None:
        """Forget a step that an exception ended."""
        self.reducer.abandon()

    def begin_plain_pass(self, training: bool) -> None:
        """Get ready for a forward and backward outside any step."""
        if not torch.is_grad_enabled():
            return
        self._begin_pass(training)
        self.reducer.on_backward_end = self._end_pass
        if self.overlapping and self._reduces_now():
            self.reducer.arm()

    def shadow_pass(self) -> None:
        """Take part, without inputs, in what the other replicas do in one training pass (see `join`)."""
        if self._broadcast_buffers:
            self.broadcast_state(buffers_only=True)
        if self._reduces_now():
            self.reducer.shadow()
        self._passes += 1

    def broadcast_state(self, buffers_only: bool = False, source: int = 0) -> None:
        """Copy the buffers (and parameters) of the replica with dp_rank `source` to the others."""
        tensors: list[torch.Tensor] = [] if buffers_only else list(self._module.parameters())
        broadcast_tensors([*tensors, *self._module.buffers()], self.group, source)

    def _begin_pass(self, training: bool) -> None:
        self.reducer.refresh()
        if not (training and torch.is_grad_enabled()):
            return
        if self.joining is not None:
            self.joining.notify()
        if self._broadcast_buffers:
            self.broadcast_state(buffers_only=True)

    def _end_pass(self) -> None:
        if self._reduces_now():
            self.reducer.finish()
        self._passes += 1

    def _reduces_now(self) -> bool:
        return (self._passes + 1) % self._passes_per_reduction == 0
