"""Run the microbatches of a step over the ranks of a pipeline, in the order of the schedule.

The first microbatch of a new kind of step runs straight through all ranks and is recorded. From its transfers each rank
derives the same segment graph and the same schedule, and runs its own list of actions from it (`StepPlan`).

Once a microbatch goes another way than the recorded one, steps of its kind have no schedule any more: their
microbatches run one after the other, in program order, which cannot deadlock whatever path each of them takes.

A rank that a microbatch visits more than once must be able to suspend it in the middle of the user's code and work on
another one meanwhile (`coroutine.py`)::

    rank 0   [embedding of 0]  suspended               [head of 0]
                             [embedding of 1]  suspended         [head of 1]
"""

from __future__ import annotations

import contextlib
import functools
import random
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from smpkit.errors import UsageError
from smpkit.plan.decide import Policy
from smpkit.plan.schedule.actions import Action, Schedule, check
from smpkit.plan.schedule.graph import Kind, Segment, SegmentGraph, Transfer
from smpkit.torch.core import devices, offloader, status
from smpkit.torch.core.tensor_spec import version_of
from smpkit.torch.core.warn import script_line, warn_user
from smpkit.torch.distributed.deadline import add_error_context
from smpkit.torch.pipeline.coroutine import MicrobatchCoroutine
from smpkit.torch.pipeline.messages import Message, P2PTransfer, TransferRecord, message_of
from smpkit.torch.pipeline.microbatch import Microbatch
from smpkit.torch.pipeline.outputs import OutputSpecs
from smpkit.torch.pipeline.results import Results, drop_graph, reserve
from smpkit.torch.pipeline.split_backward import watching
from smpkit.torch.pipeline.stage_context import StageContext
from smpkit.torch.pipeline.stage_tensor import Current, StageTensor
from smpkit.torch.pipeline.transport import MessageRecorder

MAX_KINDS: Final = 256
"""Kinds of step (functions, shapes, modes) whose plans are kept."""
MAX_OUTPUT_SPECS: Final = 1 << 14
"""Kinds of call that are kept for a kind of step."""

_UNSCHEDULED: Final = (
    "a microbatch took another way than the first one of its kind: {how}. Steps of this kind follow no schedule from"
    " now on: their microbatches run one after the other, all forwards before all backwards, so activations of all"
    " microbatches stay in memory (active_microbatches has no effect) and ranks wait for each other. To train faster,"
    ' hand the same layers the same shapes in each step (padding, or `reduction="none"` times the mask), or put what'
    " depends on values into one torch.nn.Module"
)
_BACKWARD_TWICE: Final = "backward through the graph a second time"
"""Torch's error where the backward of one segment reaches the graph of another one that has run."""

_ONLY_ITS_OWN: Final = (
    "If a layer should have left what is missing in an attribute, a list or a cache: that layer may run on another"
    " pipeline rank, and then leaves nothing here. Return it from that layer's forward, and pass it to the one that"
    " reads it."
)

_HOOKED_BY_TORCH: Final = (
    "If torch's register_multi_grad_hook raised it (FlopCounterMode and ModuleTracker call it for each module): a value"
    " between pipeline ranks takes no hook. Count at pipeline_parallel_degree 1."
)

_WRITTEN_IN_FORWARD: Final = (
    "If it is a weight or buffer that a module writes to in its forward (under torch.no_grad(), say): over a pipeline"
    " later microbatches run forward before this one runs backward. Write to it between steps."
)

ActionRecorder = Callable[[str, int, int, int, int], object]
"""Called with `(kind, segment, microbatch, start_ns, end_ns)`; times are `time.perf_counter_ns()`, waits included."""


@dataclass
class _StepKind:
    """What is known of a kind of step."""

    output_specs: OutputSpecs
    plan: StepPlan | None = None
    """None until a microbatch has been recorded, and once one has taken another way."""
    has_diverged: bool = False
    """Whether its microbatches run one after the other, for good."""
    footprint: int = 0
    """Bytes of host memory that one microbatch's activations take."""


class Executor:
    """Runs steps on one rank of a pipeline; all its ranks run the same steps in the same order."""

    def __init__(self, stage: StageContext, policy: Policy) -> None:
        self.stage = stage
        self.last_schedule: Schedule | None = None
        """What the latest step followed; None if its microbatches ran straight through."""
        self.recorder: ActionRecorder | None = None
        """Called after every action, in the order in which they ran; None costs nothing."""
        self._policy = policy
        self._kinds: dict[Hashable, _StepKind] = {}
        """By key, the least recently used first."""
        self._has_warned = False

    def record(self, on_action: ActionRecorder | None, on_message: MessageRecorder | None) -> None:
        """Call these for each action and each message from now on; None costs nothing."""
        self.recorder, self.stage.transport.recorder = on_action, on_message

    @property
    def schedules(self) -> dict[Hashable, Schedule]:
        """The schedule of each kind of step that is known and has one."""
        return {key: kind.plan.schedule for key, kind in self._kinds.items() if kind.plan is not None}

    def run(
        self, key: Hashable, body: Callable[[int], Any], count: int, before_last_backward: Callable[[], None]
    ) -> list[Any]:
        """Run `body(index)` and its backward for each microbatch; return the outputs, with their data on every rank.

        Args:
            key: what must be equal for a recorded schedule to fit: function, shapes, modes.
            before_last_backward: called just before this rank's last backward of the step.
        """
        kind = self._kind_of(key)
        self.stage.output_specs = kind.output_specs
        step = _Step(self.stage, body, count, before_last_backward, self.recorder)
        self.stage.begin_step(step.microbatches)
        if kind.plan is None and not kind.has_diverged:
            self._record(kind, step, count)
        plan = kind.plan
        self.last_schedule = None if plan is None else plan.schedule
        self._reserve_host_memory(kind, count)
        if plan is None:
            step.run_rest()
        else:
            step.run_plan(plan)
        assert step.results is not None, "forwards are left"
        outputs = step.results.share()
        self.stage.transport.end_step()  # sent tensors may be changed from here on
        if any(microbatch.diverged for microbatch in step.microbatches):
            self._give_up_schedule(kind, step.microbatches)
        return outputs

    def _kind_of(self, key: Hashable) -> _StepKind:
        """Return what is known of a kind of step; old kinds are forgotten, since shapes of data may vary without end.

        All ranks run the same steps, so they forget the same kinds; else a rank that has forgotten one would wait for
        an output spec that no other broadcasts.
        """
        kind = self._kinds.pop(key, None) or _StepKind(OutputSpecs())
        self._kinds[key] = kind
        if len(self._kinds) > MAX_KINDS:
            del self._kinds[next(iter(self._kinds))]
        if len(kind.output_specs) > MAX_OUTPUT_SPECS:
            # Shapes vary within this kind of step. Results are broadcast in program order: record the step again.
            kind.output_specs, kind.plan = OutputSpecs(), None
        return kind

    def _record(self, kind: _StepKind, step: _Step, count: int) -> None:
        """Record the first microbatch of a kind of step, which runs straight through all ranks, and plan the step."""
        microbatch, kept = step.microbatches[0], _kept_tensors(self.stage)
        with watching(microbatch.note_hooks) if self._policy.splits_backward else contextlib.nullcontext():
            step.run_action(Kind.FORWARD, 0, microbatch)
        # Pin host memory now: that can wait for the whole GPU, which later may wait for other ranks.
        reserve(self.stage, step.outputs[0], count)
        kind.footprint = offloader.current().footprint()
        _refuse_kept_tensors(kept, microbatch)
        _refuse_buffers_of_values(self.stage)
        schedule = self._policy.schedule(graph_of(microbatch), count)
        check(schedule)
        kind.plan = StepPlan.of(microbatch, schedule)
        self._reserve_host_memory(kind, count)
        self.stage.transport.connect(microbatch.transfers)

    def _reserve_host_memory(self, kind: _StepKind, count: int) -> None:
        """Reserve host memory for the microbatches that a plan holds at a time; without a plan, for all of them."""
        live = count if kind.plan is None else kind.plan.schedule.peak_live_microbatches[self.stage.rank]
        offloader.current().reserve(kind.footprint * live)

    def _give_up_schedule(self, kind: _StepKind, microbatches: Sequence[Microbatch]) -> None:
        """Let steps of a kind run in program order for good: a microbatch has left the record."""
        # Nothing will ever arrive in the receives that were posted for the record's transfers.
        self.stage.transport.hosts.forget_posted(len(microbatches))
        kind.plan, kind.has_diverged = None, True
        if not self._has_warned:
            self._has_warned = True
            how, line = next(microbatch.divergence for microbatch in microbatches if microbatch.divergence is not None)
            warn_user(_UNSCHEDULED.format(how=how), line or script_line())


class _Step:
    """One step while it runs."""

    def __init__(
        self,
        stage: StageContext,
        body: Callable[[int], Any],
        count: int,
        before_last_backward: Callable[[], None],
        recorder: ActionRecorder | None,
    ) -> None:
        self.stage = stage
        self.body = body
        self.microbatches = [Microbatch(stage, index) for index in range(count)]
        self.outputs: dict[int, Any] = {}
        self.results: Results | None = None
        """What the step returns, once all forwards have run."""
        self._coroutines: dict[int, MicrobatchCoroutine] = {}
        self._seeds: list[int] = []
        self._recorder = recorder
        self._is_watched = status.current_page() is not None
        self._offloader = offloader.current()
        self._suspends = False
        """Whether forwards are suspended where a new segment begins."""
        self._before_last_backward = before_last_backward

    def run_plan(self, plan: StepPlan) -> None:
        """Run this rank's actions, and start the receives that each of them posts."""
        self._offloader.follow(plan.schedule.actions[self.stage.rank])
        for microbatch in self.microbatches:
            if microbatch.index not in self.outputs:  # the one that was recorded has run its forward
                microbatch.record = plan.record
        generators = None
        if max(plan.schedule.graph.counts) > 1:  # where a rank is visited again, microbatches wait for one another
            self._seeds = [random.getrandbits(32) for _ in self.microbatches]
            self._suspends, generators = True, (random.getstate(), np.random.get_state())
        microbatches, links = self.microbatches, self.stage.transport.links
        # Post receives between actions: inside one, their buffers would be made under the modes of the step's code.
        for posts, kind, segment, index, is_split, is_last in plan.after_record if self.outputs else plan.actions:
            for message in posts:
                if not microbatches[message.microbatch].diverged:
                    links[message.sender].post(message)
            microbatch = microbatches[index]
            # The schedule does not know the transfers of one that has diverged. `run_rest` runs it after all scheduled
            # actions, in an order that is the same on all ranks, or they would deadlock.
            if is_last and not any(other.diverged for other in microbatches):
                self._before_last_backward()
            if not microbatch.diverged:
                self.run_action(kind, segment, microbatch, is_split)
        self.run_rest()
        if generators is not None:  # microbatches have left them in another state on each rank
            random.setstate(generators[0])
            np.random.set_state(generators[1])

    def run_rest(self) -> None:
        """Run what is left of all forwards, then of all backwards, in program order, which is the same on all ranks."""
        for microbatch in self.microbatches:
            while microbatch.index not in self.outputs:
                self.run_action(Kind.FORWARD, microbatch.num_own_segments, microbatch)
        left = [
            (segment, microbatch)
            for microbatch in self.microbatches
            if microbatch.has_backward and not microbatch.released
            for segment in reversed(range(microbatch.num_own_segments))
            if segment not in microbatch.backward_work.done
        ]
        for number, (segment, microbatch) in enumerate(left, 1):
            if number == len(left):
                self._before_last_backward()
            self.run_action(Kind.BACKWARD, segment, microbatch)
        for microbatch in self.microbatches:
            if not microbatch.released:
                microbatch.release()

    def run_action(self, kind: Kind, segment: int, microbatch: Microbatch, is_split: bool = False) -> None:
        """Run an action.

        Args:
            is_split: whether the backward of the segment runs in two halves; without, its weight half is empty.
        """
        if self._is_watched:
            status.begin_action(kind, microbatch.index)
        if self._offloader.begin_action is not None:
            self._offloader.begin_action(kind, segment, microbatch.index)
        start_ns = 0 if self._recorder is None else time.perf_counter_ns()
        try:
            if kind is Kind.FORWARD:
                Current.microbatch = microbatch
                if self._suspends:
                    self._resume(microbatch)
                else:
                    self._keep_output(microbatch, self.body(microbatch.index))
            elif kind is Kind.BACKWARD:
                microbatch.backward_work.run(segment, is_split)
            else:
                microbatch.backward_work.run_weights(segment)
        except Exception as error:
            self._explain(error, kind, segment, microbatch)
            raise
        finally:
            Current.microbatch = None
        if self._recorder is not None:
            # To time the GPU's work and not its launch. Not the device: a stream that sends may wait for another rank.
            devices.wait_for_stream(self.stage.device)
            self._recorder(kind.value, segment, microbatch.index, start_ns, time.perf_counter_ns())
        if kind is not Kind.FORWARD and microbatch.has_run_backward:
            microbatch.release()
            if kind is Kind.WEIGHT:
                drop_graph(self.outputs.get(microbatch.index))

    def _resume(self, microbatch: Microbatch) -> None:
        """Run the next segment of a microbatch's forward, which has a thread of its own."""
        index = microbatch.index
        coroutine = self._coroutines.get(index)
        if coroutine is None:
            body, stage = functools.partial(self.body, index), self.stage
            coroutine = MicrobatchCoroutine(body, stage.random, stage.device, self._seeds[index])
            self._coroutines[index] = coroutine
            microbatch.before_wait = coroutine.suspend  # an action ends where the microbatch begins a new segment
        coroutine.resume()
        if coroutine.done:
            # It holds the step, which holds it: what it has made would stay until Python looks for cycles.
            microbatch.before_wait = None
            self._keep_output(microbatch, self._coroutines.pop(index).output)

    def _keep_output(self, microbatch: Microbatch, output: Any) -> None:
        """Keep the output of a microbatch whose forward has ended."""
        self.outputs[microbatch.index] = output
        microbatch.end_forward(output)
        if len(self.outputs) == len(self.microbatches):
            outputs = [self.outputs[index] for index in range(len(self.outputs))]
            self.results = Results(self.stage, self.microbatches, outputs)

    def _explain(self, error: Exception, kind: Kind, segment: int, microbatch: Microbatch) -> None:
        """Add to an error what ran, and say whether it is this rank's alone."""
        if "next_functions" in str(error):
            error.add_note(_HOOKED_BY_TORCH)
        elif kind is Kind.FORWARD and (isinstance(error, AttributeError | IndexError) or "NoneType" in str(error)):
            error.add_note(_ONLY_ITS_OWN)
        if kind is not Kind.FORWARD and "modified by an inplace operation" in str(error):
            error.add_note(_WRITTEN_IN_FORWARD)
        inside = {} if kind is Kind.FORWARD else microbatch.backward_work.error_context(segment)
        add_error_context(error, **{kind.name.lower(): f"of microbatch {microbatch.index}"}, **inside)
        hooked = [name for name, module in self.stage.remote_modules.items() if module._forward_hooks]
        if hooked and kind is Kind.FORWARD and not self.stage.failed_alone:
            # A list or dict that they fill is empty here, and the error would not mention ranks.
            add_error_context(error, **{"after forward hooks that ran on other ranks only, on": f"`{hooked[0]}`"})
        if kind is not Kind.FORWARD:  # no rank but this one runs this backward
            self.stage.failed_alone = True
        _refuse_kept_graph(error, microbatch)


def _kept_tensors(stage: StageContext) -> dict[tuple[str, str], tuple[torch.Tensor, int]]:
    """Return the tensors that modules of this rank have as attributes, neither weights nor buffers, with versions.

    What torch's hooks make of weights before each call (`weight` of `weight_g` and `weight_v`) is left out.
    """
    return {
        (name, key): (value, version_of(value))
        for name, module in stage.modules.items()
        for key, value in vars(module).items()
        if isinstance(value, torch.Tensor) and not any(weight.startswith(f"{key}_") for weight in module._parameters)
    }


def _refuse_kept_tensors(before: dict[tuple[str, str], tuple[torch.Tensor, int]], microbatch: Microbatch) -> None:
    """Raise if a module keeps a tensor, and the microbatch visits this rank more than once: others run in between."""
    stage = microbatch.stage
    if microbatch.num_own_segments == 1:
        return
    for (name, key), (value, version) in _kept_tensors(stage).items():
        known, known_version = before.get((name, key), (None, 0))
        if value is not known or version != known_version:
            stage.failed_alone = True
            raise UsageError(
                f"`{name or 'model'}.{key}`, a tensor that is neither a weight nor a buffer, changed in a microbatch"
                f" that visits pipeline rank {stage.rank} {microbatch.num_own_segments} times: other microbatches run"
                " in between, and would see it",
                hint="hand it on as an argument and a result of the forward, or put the calls between which it stays"
                " into one module on one rank (smp.set_partition); let a table that never changes be a buffer",
            )


def _refuse_buffers_of_values(stage: StageContext) -> None:
    """Raise if code between layers has assigned a buffer a value that one rank holds."""
    for name, module in stage.modules.items():
        for key, buffer in module._buffers.items():
            if type(buffer) is StageTensor:
                raise UsageError(
                    f"the buffer `{key}` of {f'`{name}`' if name else 'the model'} was assigned a value that pipeline"
                    f" rank {buffer.owner} holds, in a module that lies on several",
                    hint="assign it in a torch.nn.Module that has the buffer and the layers that make its values, and"
                    " lies on one rank (smp.set_partition)",
                )


def _refuse_kept_graph(error: Exception, microbatch: Microbatch) -> None:
    """Raise UsageError in place of torch's error where a module has kept a tensor with its graph between segments."""
    if isinstance(error, RuntimeError) and _BACKWARD_TWICE in str(error) and microbatch.num_own_segments > 1:
        raise UsageError(
            "backward came twice through the same graph, and the microbatch visits this pipeline rank more than once:"
            " a module keeps a tensor that needs gradients from one visit to the next (a hidden state, a cache)",
            hint="return it from the module's forward and hand it back as an argument, as nn.LSTM does, or put the"
            " calls into one module on one rank (smp.set_partition)",
        ) from error


# ---- the plan of a step: in which order a rank runs its actions, and what each of them receives ----------------------

_LOOKAHEAD: Final = 2
"""For how many of the actions after the current one receives are posted."""
_AHEAD_BYTES: Final = 1 << 20
"""Bytes of receives that are posted before the first wait."""


class PlannedAction(NamedTuple):
    """An action of this rank."""

    posts: tuple[Message, ...]
    """The receives to start before it, its own or those of later actions: gloo sends data only to a posted receive."""
    kind: Kind
    segment: int
    microbatch: int
    is_split: bool
    """Whether the backward of its segment runs in two halves."""
    is_last: bool
    """Whether it is the last that adds to gradients."""


@dataclass(frozen=True)
class StepPlan:
    """What one kind of step does on this rank."""

    schedule: Schedule
    record: TransferRecord
    split: frozenset[int]
    """Segments of this rank whose backward runs in two halves."""
    actions: tuple[PlannedAction, ...]
    """Those of this rank, in order."""
    after_record: tuple[PlannedAction, ...]
    """Those of the step whose first microbatch was recorded, and so has run forward."""

    @classmethod
    def of(cls, microbatch: Microbatch, schedule: Schedule) -> StepPlan:
        """Return the plan of a step like its first microbatch, which has run forward, in the order of a schedule."""
        rank, record = microbatch.stage.rank, microbatch.make_record()
        actions = schedule.actions[rank]
        split = frozenset(action.segment for action in actions if action.kind is Kind.WEIGHT) - microbatch.unsplittable
        arrivals: defaultdict[tuple[Kind, int], list[P2PTransfer]] = defaultdict(list)
        for transfer in record.transfers:
            if transfer.target == rank:
                arrivals[Kind.FORWARD, transfer.target_segment].append(transfer)
            if transfer.source == rank and transfer.spec.requires_grad:
                arrivals[Kind.BACKWARD, transfer.source_segment].append(transfer)
        left = [
            action for action in actions if action.microbatch != microbatch.index or action.kind is not Kind.FORWARD
        ]
        planned = [tuple(_planned(part, arrivals, split)) for part in (actions, left)]
        return cls(schedule, record, split, *planned)


def _planned(
    actions: Sequence[Action], arrivals: Mapping[tuple[Kind, int], Sequence[P2PTransfer]], split: frozenset[int]
) -> Iterator[PlannedAction]:
    receives = [
        [
            message_of(action.microbatch, transfer, action.kind is Kind.BACKWARD)
            for transfer in arrivals.get((action.kind, action.segment), ())
        ]
        for action in actions
    ]
    ahead = num_ahead([sum(message.transfer.spec.num_bytes for message in group) for group in receives])
    last = max([number for number, action in enumerate(actions) if _adds_to_gradients(action, split)], default=None)
    posted = 0
    for number, action in enumerate(actions):
        # A rank that is about to wait has the time for more.
        until = max(posted, number + 1 + _LOOKAHEAD, ahead if receives[number] else 0)
        posts = tuple(message for group in receives[posted:until] for message in group)
        posted = until
        is_split = action.segment in split
        yield PlannedAction(posts, action.kind, action.segment, action.microbatch, is_split, number == last)


def _adds_to_gradients(action: Action, split: frozenset[int]) -> bool:
    # The weight half of a backward that runs in one is empty.
    return action.kind is Kind.BACKWARD or (action.kind is Kind.WEIGHT and action.segment in split)


def num_ahead(received_bytes: Sequence[int]) -> int:
    """Return for how many of a rank's first actions, by the bytes that each receives, to post before the first wait."""
    return max(1, sum(num_bytes <= _AHEAD_BYTES for num_bytes in accumulate(received_bytes)))


def graph_of(microbatch: Microbatch) -> SegmentGraph:
    """Return the segments of a recorded microbatch and what travels between them."""
    messages = [
        Transfer(
            Segment(transfer.source, transfer.source_segment),
            Segment(transfer.target, transfer.target_segment),
            transfer.spec.num_bytes,
            transfer.spec.requires_grad and microbatch.has_backward,
        )
        for transfer in microbatch.transfers
    ]
    return SegmentGraph.of(microbatch.num_segments, messages, microbatch.has_backward)
