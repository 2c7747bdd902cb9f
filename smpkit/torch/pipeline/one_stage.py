"""A model on one rank: microbatches run one after the other, and each backward where the script calls it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from smpkit.errors import UsageError
from smpkit.plan.schedule.graph import Kind
from smpkit.torch.core.microbatches import MicrobatchCall, StepProgress, root_gradient
from smpkit.torch.core.runtime import state
from smpkit.torch.core.status import begin_action
from smpkit.torch.core.step_participants import StepParticipants
from smpkit.torch.core.tensor_spec import map_tensors
from smpkit.torch.pipeline.backward import run_backward
from smpkit.torch.pipeline.parameters import leaves_of
from smpkit.torch.pipeline.random_streams import RandomStreams, call_without_operation_streams
from smpkit.torch.pipeline.units import install_streams
from smpkit.torch.placement.shards import is_tp_shard
from smpkit.torch.placement.units import units_of
from smpkit.torch.recording.recorder import recorded_backward, recorded_microbatch
from smpkit.torch.tensor_parallel.agreement import common_seed

_NoTorchFunction: Final = torch._C.DisableTorchFunction


class OneStage:
    """Runs the steps of a model (or of a step function without one) on this rank.

    It is no pipeline of one rank: a pipeline holds each backward back until its forward has ended, but here a script
    may look at gradients right after `model.backward`.
    """

    def __init__(self, root: nn.Module | None, participants: StepParticipants) -> None:
        self._root = root
        self._participants = participants
        self._in_backward = False
        self.random: RandomStreams | None = None
        """The streams of random numbers, from the first step on: dropout draws the same masks at every degree."""
        if root is not None:
            self._refuse_backward_on_tensors(root)

    def prepare(self, body: Callable[..., Any], call: MicrobatchCall) -> None:  # noqa: ARG002 - those of a pipeline
        """Give modules the random streams that they have over a pipeline."""
        # torch.compile of the whole model traces through the calls of its modules, which must stay plain then.
        if self._root is not None and not hasattr(self._root, "_orig_mod"):
            self.random = RandomStreams(common_seed() + state.rdp_rank, state.device)
            install_streams(self._root, [unit.name for unit in units_of(self._root)], self.random)

    def run(
        self,
        function: Hashable,  # noqa: ARG002 - of a pipeline, whose schedules depend on it
        body: Callable[[MicrobatchCall], Any],
        calls: Sequence[MicrobatchCall],
        step: StepProgress,
    ) -> list[Any]:
        """Run the microbatches one after the other."""
        random = self.random
        if random is None or self._root is None or not self._root.training:
            return self._run_all(body, calls, step)
        with random.training_step(training=True):
            return random.call_between_units(self._run_all, body, calls, step)

    def _run_all(
        self, body: Callable[[MicrobatchCall], Any], calls: Sequence[MicrobatchCall], step: StepProgress
    ) -> list[Any]:
        outputs = []
        for index in range(step.num_microbatches):
            step.microbatch = index
            if self.random is not None:
                self.random.begin_microbatch(index)
            for begin in self._participants.begin_microbatch:
                begin(index)
            begin_action(Kind.FORWARD.value, index)
            with recorded_microbatch(index):
                output = body(calls[index])
            # Release the graph of a microbatch that has ended, or its activations stay until the step ends.
            outputs.append(map_tensors(torch.Tensor.detach, output) if step.detach_outputs else output)
            step.end_microbatch()
        return outputs

    def backward(self, roots: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None], scale: float) -> None:
        """Run backward now; inside a step or outside any."""
        with _NoTorchFunction():  # or the mode for random streams would see these as operations between units
            if state.tp_size > 1:
                _refuse_pieces(roots)
            scaled = list(map(root_gradient, roots, grads, [scale] * len(roots)))
        step, participants = state.step, self._participants
        if step is not None:
            for prepare in participants.before_backward:
                prepare(step)
            step.backwards += 1
            begin_action(Kind.BACKWARD.value, step.microbatch)
        self._in_backward = True
        try:
            # Without streams: backward has no operations of the step, as over a pipeline.
            with recorded_backward():
                call_without_operation_streams(run_backward, roots, scaled)
        except BaseException as error:
            if step is None:  # else the step is abandoned as a whole
                for abandon in participants.abandon_step:
                    abandon(error)
            raise
        finally:
            self._in_backward = False

    def abandon(self, error: BaseException) -> None:
        """Do nothing: nothing is left of a step here."""

    def _refuse_backward_on_tensors(self, root: nn.Module) -> None:
        """Refuse `loss.backward()` where its gradients would miss a scale: of the microbatch, or of the loss."""
        # On the first trained parameter only: nearly every backward reaches it, and a hook on each would cost time.
        first = next((param for param in root.parameters() if param.requires_grad), None)
        if first is None:
            return
        # A weak reference: the garbage collector does not see what torch's hook holds, and would keep the model.
        reference = weakref.ref(self)

        def check(_: torch.Tensor) -> None:
            engine = reference()
            if engine is None or state.model is None or state.model.engine is not engine or engine._in_backward:
                return
            if state.step is not None or state.loss_scale != 1.0:
                where = "inside @smp.step" if state.step is not None else "with fp16, where the loss has a scale"
                raise UsageError(f"backward was called on a tensor {where}", hint="call `model.backward(loss)` instead")

        first.register_post_accumulate_grad_hook(check)  # type: ignore[no-untyped-call]


def _refuse_pieces(roots: Sequence[torch.Tensor]) -> None:
    """Refuse a loss with a penalty on divided weights: it would be that of this rank's pieces, with a wrong scale.

    What a divided module computes leaves it by a collective, which is a Function of Python; a penalty does not.
    """
    for piece in (leaf for root in roots for leaf in leaves_of(root, _is_of_torch) if is_tp_shard(leaf)):
        assert state.model is not None  # whose backward this is
        raise UsageError(
            f"the loss contains `{state.model.placement.of(piece).name}` itself, as a penalty on weights does, but"
            " tensor parallelism divides it: this rank would add a penalty on its piece",
            hint="for L2 use the optimizer's weight_decay; add the gradient of a penalty on single numbers (L1, EWC) to"
            " `parameter.grad` before `optimizer.step()`; leave a matrix with another penalty whole",
        )


def _is_of_torch(node: object) -> bool:
    return not isinstance(node, BackwardCFunction)
