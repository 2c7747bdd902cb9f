"""A model on a pipeline: partitioned at the first step, then run microbatch by microbatch over its ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smpkit.plan.assignment import Assignment
from smpkit.plan.partition import assign, partition
from smpkit.torch.announce import announce
from smpkit.torch.comm import CommGroup
from smpkit.torch.partitioning.apply import holders_of, keep_own_parts
from smpkit.torch.partitioning.manual import pinned_modules
from smpkit.torch.partitioning.trace import measure_units, run_fake, units_of
from smpkit.torch.pipeline.executor import Executor, Policy
from smpkit.torch.pipeline.inputs import inputs_of_first
from smpkit.torch.pipeline.located import current
from smpkit.torch.pipeline.random import RandomStreams
from smpkit.torch.pipeline.specs import map_tensors, signature
from smpkit.torch.pipeline.stage import Stage
from smpkit.torch.pipeline.transport import Transport
from smpkit.torch.pipeline.units import install
from smpkit.torch.recorder import current as current_recorder
from smpkit.torch.state import state

if TYPE_CHECKING:
    from smpkit.torch.splitting import Call

__all__ = ["Pipeline"]


class Pipeline:
    """One rank's part in running `root` over the ranks of PP_GROUP."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._transport = Transport(
            state.process_group(CommGroup.PP_GROUP), state.group(CommGroup.PP_GROUP), state.device
        )
        self._executor: Executor | None = None
        self.assignment: Assignment | None = None
        self.holders: dict[int, frozenset[int]] = {}

    @property
    def random(self) -> RandomStreams:
        assert self._executor is not None
        return self._executor.stage.random

    def same_inputs(self, arguments: Any) -> Any:
        """Return the arguments of a step with the tensors of pp_rank 0, as SMP v1 took them.

        Raises:
            UsageError: shapes or dtypes differ between ranks.
        """
        tensors: list[torch.Tensor] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor, nn.Parameter):
                tensors.append(tensor)
            return tensor

        map_tensors(note, arguments)
        others = inputs_of_first(self._transport, state.pp_rank, state.pp_size, state.device, tensors)
        shared = {id(tensor): other for tensor, other in zip(tensors, others, strict=True)}
        return map_tensors(lambda tensor: shared.get(id(tensor), tensor), arguments)

    # --- partitioning ----------------------------------------------------------------------------------------------

    def prepare(self, body: Callable[..., Any], call: Call) -> None:
        """Partition the model at the first step: decide, tell everyone, keep what is this rank's."""
        if state.pp_rank == 0:
            self.assignment = self._decide(body, call)
            self._transport.broadcast_object((self.assignment.to_json(), torch.initial_seed()))
            seed = torch.initial_seed()
        else:
            text, seed = self._transport.receive_object(0, "the partition assignment")
            self.assignment = Assignment.from_json(text)
        placement = self.assignment.partition_of
        self.holders = holders_of(self._root, placement, state.pp_size)
        keep_own_parts(self._root, placement, self.holders, state.pp_rank, state.device)
        stage = Stage(
            state.pp_rank,
            state.pp_size,
            state.device,
            self._transport,
            RandomStreams(seed + state.dp_rank, state.device),
            self.holders,
        )
        install(self._root, placement, stage)
        policy = Policy(state.cfg.pipeline, state.cfg.active_microbatches)
        self._executor = Executor(stage, policy)
        if (recorder := current_recorder()) is not None:
            recorder.attach(self._executor)
        if state.rank == 0:
            announce(self.assignment.log_lines())

    def _decide(self, body: Callable[..., Any], call: Call) -> Assignment:
        cfg = state.cfg
        if not cfg.auto_partition:
            pins = pinned_modules(self._root)
            costs = measure_units(self._root, units_of(self._root, pins.split), None)
            return assign(costs, state.pp_size, pins.on([cost.name for cost in costs]), cfg.default_partition)
        tree = units_of(self._root)
        if cfg.skip_tracing:
            return partition(measure_units(self._root, tree, None), state.pp_size, cfg.memory_weight)
        costs = measure_units(self._root, tree, lambda: run_fake(self._root, body, call.args, call.kwargs))
        return partition(costs, state.pp_size, cfg.memory_weight)

    # --- steps -----------------------------------------------------------------------------------------------------

    def run(
        self,
        function: Hashable,
        body: Callable[[int], Any],
        calls: Sequence[Call],
        before_last_backward: Callable[[], None],
    ) -> list[Any]:
        """Run one step: `body(index)` for each microbatch."""
        assert self._executor is not None
        kind = (
            function,
            signature((calls[0].args, calls[0].kwargs)),
            torch.is_grad_enabled(),
            self._root.training,
            torch.is_autocast_enabled(state.device.type),
        )
        random = self.random

        def streamed(index: int) -> Any:
            with random.between_units():  # again, because a parked microbatch runs in a thread of its own
                output = body(index)
            microbatch = current()
            microbatch.dynamic = microbatch.dynamic or random.asked  # chance may lead the next one elsewhere
            return output

        with random.training_step(training=self._root.training):
            return self._executor.run(kind, streamed, len(calls), before_last_backward)

    def backward(
        self, roots: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None] | None, scale: float
    ) -> None:
        """Note that the current microbatch's backward starts at `roots`."""
        current().backward(roots, [None] * len(roots) if grads is None else grads, scale)

    def abandon(self) -> None:
        """Forget a step that an exception ended."""
        if self._executor is not None:
            self._executor.abandon()
