"""A model on a pipeline: partitioned at the first step, then run microbatch by microbatch over its ranks."""

from __future__ import annotations

import contextlib
import functools
import operator
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn

from smpkit.errors import DeadlineError, RemoteError, SmpkitError, UsageError
from smpkit.plan.decide import Policy, assign_units
from smpkit.plan.memory import ModelFacts
from smpkit.plan.mesh import CommGroup
from smpkit.plan.partition.assignment import Assignment, UnitCost
from smpkit.torch.core import devices
from smpkit.torch.core.announce import announce
from smpkit.torch.core.devices.backends import connects
from smpkit.torch.core.microbatches import MicrobatchCall, StepProgress
from smpkit.torch.core.runtime import state
from smpkit.torch.core.step_participants import StepParticipants
from smpkit.torch.core.tensor_spec import map_tensors, signature
from smpkit.torch.distributed.deadline import report_failure
from smpkit.torch.distributed.init import message_groups
from smpkit.torch.distributed.objects import object_from
from smpkit.torch.pipeline.divergence import watch_for_divergence
from smpkit.torch.pipeline.executor import Executor
from smpkit.torch.pipeline.inputs import Inputs
from smpkit.torch.pipeline.parameters import SharedTensor, mark_nonresident, shared_tensors
from smpkit.torch.pipeline.random_streams import RandomStreams
from smpkit.torch.pipeline.stage_context import StageContext
from smpkit.torch.pipeline.stage_tensor import Current, current_microbatch
from smpkit.torch.pipeline.transport import Transport
from smpkit.torch.pipeline.units import install, refuse_compiled, with_other_names
from smpkit.torch.placement.delayed import is_delayed
from smpkit.torch.placement.facts import model_facts
from smpkit.torch.placement.manual import manual_placement
from smpkit.torch.placement.placement import Placement, keep_local_parameters
from smpkit.torch.placement.trace import TrialStep, measure_units, restoring_model, run_fake
from smpkit.torch.placement.units import units_of
from smpkit.torch.recording.recorder import current_recorder
from smpkit.torch.tensor_parallel.agreement import common_seed

_ASSIGNMENT: Final = "the partition assignment"
_NUMBERS: Final = (int, float)
"""Arguments that change from step to step (a loss scale, a count) and seldom decide what is called."""
_NEEDS_GRADIENT: Final[Callable[[nn.Parameter], bool]] = operator.attrgetter("requires_grad")


@contextlib.contextmanager
def _as_under_no_grad() -> Iterator[None]:
    """Let code run as under torch.no_grad() where the script has entered torch.inference_mode()."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    # Tensors of that mode do not count changes in place.
    with torch.inference_mode(False), torch.no_grad():
        yield


class Pipeline:
    """One rank's part in running `root` over the ranks of PP_GROUP.

    Args:
        measures_times: whether the time that units take decides how the model is partitioned.
        on_placement: called once with `root` and the rank of each module, before modules leave this rank.
    """

    def __init__(
        self,
        root: nn.Module,
        participants: StepParticipants,
        measures_times: bool,
        on_placement: Callable[[nn.Module, Mapping[str, int]], None],
    ) -> None:
        self._root = root
        self._participants = participants
        self._on_placement = on_placement
        self._measures_times = measures_times
        group, ranks, device = state.process_group(CommGroup.PP_GROUP), state.group(CommGroup.PP_GROUP), state.device
        between_gpus = message_groups(tuple(ranks)) if connects(group, device) else None
        self._transport = Transport(group, ranks, device, between_gpus)
        self._executor: Executor | None = None
        self._parameters: list[nn.Parameter] = []
        self._shared: list[SharedTensor] = []
        self.assignment: Assignment | None = None
        self.facts: ModelFacts | None = None
        """Of the whole model, which planning takes; None before the first step."""
        self.resumed: Assignment | None = None
        """The assignment restored from a checkpoint; reused if it fits."""
        self._failure: str | None = None
        """The error that has ended a step."""
        self._inputs = Inputs(self._transport.hosts)

    @property
    def random(self) -> RandomStreams | None:
        """The streams of random numbers, once the model is partitioned."""
        return None if self._executor is None else self._executor.stage.random

    @_as_under_no_grad()
    def broadcast_inputs(self, call: str, arguments: Any) -> Any:
        """Return the arguments of a step as pp_rank 0 has passed them, as in SMP v1.

        Args:
            call: names the step and what else decides what runs, in words.
        """
        if self._failure is not None:
            raise UsageError(
                f"a step was called after one that an exception had ended, on this rank {self._failure}",
                hint="let such an exception end the script, and resume from a checkpoint: messages of that step are"
                " still under way",
            )
        try:
            return self._inputs.share(call, arguments)
        except Exception as error:
            self.abandon(error)  # what pp_rank 0 has sent of this step is under way
            raise

    @property
    def checkpointing_saves(self) -> int:
        """How many bytes of this rank's activations checkpointing saves, by the simulated schedule; 0 if unknown."""
        schedules = [] if self._executor is None else self._executor.schedules.values()
        live = max((schedule.peak_live_microbatches[state.pp_rank] for schedule in schedules), default=0)
        assignment = self.assignment
        if not live or assignment is None:
            return 0
        costs = () if self.facts is None else self.facts.costs
        own = [cost for cost in costs if assignment.partition_of.get(cost.name) == state.pp_rank]
        saved = sum(max(0, (cost.spared_bytes or cost.recomputed_bytes) - cost.boundary_bytes) for cost in own)
        # One recomputation at a time is held all the same.
        return max(0, live * saved - max((cost.recomputed_bytes for cost in own), default=0))

    # --- partitioning ----------------------------------------------------------------------------------------------

    def prepare(self, body: Callable[..., Any], call: MicrobatchCall) -> Placement:
        """Partition the model at the first step: agree on an assignment, place the modules, make the executor."""
        if self._measures_times and any(is_delayed(parameter) for parameter in self._root.parameters()):
            raise UsageError(
                "execution times cannot be measured: the model was made under delay_param_initialization and has no"
                " weights yet",
                hint="leave out trace_execution_times; costs are then computed from shapes",
            )
        refuse_compiled(self._root)
        hosts = self._transport.hosts
        if state.pp_rank == 0:
            decided = (*self._agree_on_assignment(TrialStep(body, call.args, call.kwargs)), common_seed())
            hosts.send_object(decided, what=_ASSIGNMENT)
        else:
            decided = hosts.receive_object(0, _ASSIGNMENT)
        assignment, self.facts, seed = decided
        self.assignment = assignment
        pp_rank_of_unit = with_other_names(self._root, assignment.partition_of)
        self._on_placement(self._root, pp_rank_of_unit)
        refuse_compiled(self._root, pp_rank_of_unit)
        placement = Placement(self._root, pp_rank_of_unit)
        self._shared = shared_tensors(self._root, placement)
        keep_local_parameters(self._root, placement, state.device, seed)
        mark_nonresident(self._root, placement)
        stage = StageContext(
            state.pp_rank,
            state.pp_size,
            state.device,
            self._transport,
            RandomStreams(seed + state.rdp_rank, state.device),
            {id(placed.parameter): placed.pp_ranks for placed in placement},
        )
        install(self._root, pp_rank_of_unit, stage)
        self._parameters = list(self._root.parameters())
        watch_for_divergence(stage, state.group(CommGroup.PP_GROUP))
        self._executor = Executor(stage, Policy.of(state.cfg))
        if (recorder := current_recorder()) is not None:
            recorder.attach(self._executor)
        if state.rank == 0:
            announce([*self._measurement_lines(), *assignment.log_lines()])
        return placement

    def _measurement_lines(self) -> list[str]:
        if not self._measures_times:
            return []
        if not state.cfg.auto_partition:
            return ["auto_partition is off: modules are placed by hand, not by measured execution times."]
        if state.cfg.skip_tracing:
            return ["skip_tracing is on: partitioned by parameter sizes, not by measured execution times."]
        return [f"Partitioned by execution times of one microbatch, measured on rank 0 ({state.device})."]

    def _agree_on_assignment(self, step: TrialStep) -> tuple[Assignment, ModelFacts]:
        """Decide on the first replica for all of them: others may have other shapes, and would measure other times."""
        if not (state.cfg.ddp and state.dp_size > 1):
            return self._decide(step)
        decided: Any = self._decide(step) if state.dp_rank == 0 else None
        agreed: tuple[Assignment, ModelFacts] = object_from(
            0, decided, state.process_group(CommGroup.DP_GROUP), _ASSIGNMENT
        )
        return agreed

    def _decide(self, step: TrialStep) -> tuple[Assignment, ModelFacts]:
        cfg = state.cfg
        pins = None if cfg.auto_partition else manual_placement(self._root)
        units = units_of(self._root, () if pins is None else pins.split)
        names, resumed = {unit.name for unit in units}, self.resumed if cfg.auto_partition else None
        # The script may have changed since: each rank would hold the layers that the assignment does not know.
        if resumed is not None and resumed.partition_of.keys() == names:
            # Nothing is planned, so a trace would only slow the first step down.
            return resumed, model_facts(self._root, measure_units(self._root, units, None), {})
        if pins is not None or cfg.skip_tracing:
            costs = measure_units(self._root, units, None)
        else:
            costs = measure_units(self._root, units, lambda: run_fake(self._root, step))
            if self._measures_times:
                costs = measure_times(self._root, costs, step, state.device)
        places = {} if pins is None else pins.for_units([cost.name for cost in costs])
        return assign_units(cfg, costs, places), model_facts(self._root, costs, places)

    # --- steps -----------------------------------------------------------------------------------------------------

    @_as_under_no_grad()
    def run(
        self,
        function: Hashable,
        body: Callable[[MicrobatchCall], Any],
        calls: Sequence[MicrobatchCall],
        step: StepProgress,  # noqa: ARG002 - the executor knows the progress of each microbatch
    ) -> list[Any]:
        """Run one step: `body` for each microbatch."""
        assert self._executor is not None
        trainable = bytes(map(_NEEDS_GRADIENT, self._parameters))
        self._executor.stage.set_trainable(trainable)
        described = signature((calls[0].args, calls[0].kwargs))
        kind = (
            function,
            trainable,
            tuple([type(part) if type(part) in _NUMBERS else part for part in described]),
            torch.is_grad_enabled(),
            self._root.training,
            torch.is_autocast_enabled(state.device.type),
        )
        random = self._executor.stage.random

        def streamed(index: int) -> Any:
            call = calls[index]  # outside the mode: splitting is not an operation of the step
            random.begin_microbatch(index)
            # The mode for each microbatch: it belongs to a thread, and some microbatches run in threads of their own.
            return random.call_between_units(body, call)

        versions = [shared.version for shared in self._shared]
        with random.training_step(training=self._root.training):
            outputs = self._executor.run(kind, streamed, len(calls), self._before_last_backward)
        for shared, version in zip(self._shared, versions, strict=True):
            if shared.version != version:
                self._executor.stage.failed_alone = True
                shared.refuse_change(state.pp_rank)
        return outputs

    def _before_last_backward(self) -> None:
        for prepare in self._participants.before_last_backward:
            prepare()

    def backward(self, roots: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None], scale: float) -> None:
        """Note that the current microbatch's backward starts at `roots`; the schedule decides when it runs."""
        if state.step is None:
            raise UsageError("model.backward was called outside a step", hint="call it inside the step function")
        if state.cfg.pipeline == "_only_forward":
            raise UsageError(
                "model.backward was called, but `pipeline: _only_forward` plans steps without backward",
                hint="train with `interleaved`, `zero_bubble` or `simple`, or leave out model.backward",
            )
        state.step.total_backwards += 1
        microbatch = Current.microbatch or current_microbatch()
        microbatch.backward(roots, grads, scale)

    def abandon(self, error: BaseException) -> None:
        """Note that an exception has ended a step; report it to the other ranks if this rank has failed alone."""
        if self._executor is None:
            return
        stage = self._executor.stage
        Current.microbatch, stage.inside_unit = None, False
        self._failure = f"{type(error).__name__}: {error.message if isinstance(error, SmpkitError) else error}"
        if stage.failed_alone and not isinstance(error, DeadlineError | RemoteError):
            # Now, not when the process ends: a script that catches the error would let the others wait in vain.
            report_failure(error, goes_on=True)


# ---- how long the forward of each unit takes, measured: another measure of what a unit computes ----------------------

_RUNS: Final = 4  # the first run warms up; of the others the fastest counts, which was disturbed least


def measure_times(root: nn.Module, costs: Sequence[UnitCost], step: TrialStep, device: torch.device) -> list[UnitCost]:
    """Return `costs` with seconds for operations, in the order in which the units ran; those that did not cost none.

    The step runs for one microbatch with real data on one rank, which holds the whole model meanwhile. It runs a few
    times, because the first run is slow for other reasons; backward is taken to cost the same multiple of forward
    everywhere. The model is moved to `device` and stays there; apart from that it is as it was.
    """
    root.to(device)
    step = replace(step, **map_tensors(lambda tensor: tensor.to(device), {"args": step.args, "kwargs": step.kwargs}))
    known = {cost.name: cost for cost in costs}
    _, *runs = [_seconds_by_unit(root, known, step, device) for _ in range(_RUNS)]
    seconds = {name: min(run.get(name, 0.0) for run in runs) for name in runs[0]}
    in_order = [*seconds, *(name for name in known if name not in seconds)]
    return [replace(known[name], flops=seconds.get(name, 0.0)) for name in in_order]


def _seconds_by_unit(
    root: nn.Module, names: Collection[str], step: TrialStep, device: torch.device
) -> dict[str, float]:
    """Run the step and return how long each unit took, over all of its calls."""
    taken: dict[str, float] = {}
    started: dict[str, float] = {}

    def now() -> float:
        devices.wait_for_stream(device)  # kernels run after the call has returned
        return time.perf_counter()

    def begin(name: str, *_: Any) -> None:
        started[name] = now()

    def end(name: str, *_: Any) -> None:
        taken[name] = taken.get(name, 0.0) + now() - started[name]

    with contextlib.ExitStack() as stack:
        for name in names:
            module = root.get_submodule(name)
            stack.enter_context(module.register_forward_pre_hook(functools.partial(begin, name)))
            stack.enter_context(module.register_forward_hook(functools.partial(end, name)))
        stack.enter_context(restoring_model(root, _buffer_of_its_own))
        step()
    return taken


def _buffer_of_its_own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if isinstance(tensor, nn.Parameter) else tensor.clone()
