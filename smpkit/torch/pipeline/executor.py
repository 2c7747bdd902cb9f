"""Run the microbatches of a step over the ranks of a pipeline, in the order that the schedule says.

The first microbatch of a new kind of step runs straight through all ranks and is recorded; from its moves every rank
derives the same segment graph and schedule, and runs its own list of actions of it. After the second step the schedule
is made again from measured times, and tried (see `replan`). A step in which Python asked for a value that a branch may
hang on keeps going straight through, microbatch after microbatch: there the next microbatch may take another path, and
following the program's own order cannot deadlock whatever path that is. So does one whose microbatches would mix what
modules keep between calls (see `carried`).
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from smpkit.plan.schedule.actions import Action, Costs, Schedule
from smpkit.plan.schedule.checker import check
from smpkit.plan.schedule.graph import Kind, SegmentGraph
from smpkit.plan.schedule.search import interleaved, simple
from smpkit.torch.deadline import note_place
from smpkit.torch.offload import active
from smpkit.torch.pipeline.carried import carried_anywhere, refuse_kept_graph, warn_of_carried
from smpkit.torch.pipeline.ending import Ending, reserve
from smpkit.torch.pipeline.located import Running
from smpkit.torch.pipeline.microbatch import Microbatch
from smpkit.torch.pipeline.parking import Parked
from smpkit.torch.pipeline.plan import Plan, graph_of
from smpkit.torch.pipeline.record import Move
from smpkit.torch.pipeline.replan import Meter, Trial, replan
from smpkit.torch.pipeline.stage import Stage
from smpkit.torch.pipeline.timetable import returning
from smpkit.torch.pipeline.watch import watching

__all__ = ["ActionRecorder", "Executor", "Policy"]

_LOOKAHEAD: Final = 2  # actions whose receives are posted before their turn
_AHEAD_BYTES: Final = 1 << 20  # of receives that are posted before the first one is waited for
_STRAYS: Final = 3  # steps in which microbatches left the record, until there is none any more
_REPLAN_AFTER: Final = 2  # steps; the first one is slow for other reasons, the last of them is measured

_T = TypeVar("_T")

ActionRecorder = Callable[[str, int, int, int, int], object]
"""Called with `(kind, segment, microbatch, start_ns, end_ns)`; times are `time.perf_counter_ns()`, waits included."""


@dataclass(frozen=True)
class Policy:
    """How to order a step: `pipeline` and `active_microbatches` of the configuration."""

    pipeline: str
    active_microbatches: int

    @property
    def splits_backward(self) -> bool:
        """Whether a backward may run in two halves."""
        return self.pipeline == "zero_bubble"

    def schedule(self, graph: SegmentGraph, count: int, costs: Costs | None = None) -> Schedule:
        """Choose the order; the same on every rank, since it follows from the graph and the costs alone."""
        if self.pipeline == "simple" or not graph.has_backward:
            return simple(graph, count)
        return interleaved(graph, count, self.active_microbatches, costs, split_backward=self.splits_backward)

    def can_replan(self, schedule: Schedule) -> bool:
        """Whether there is a choice: other depths fit under `active_microbatches`, and several ranks take part."""
        graph = schedule.graph
        limit = min(self.active_microbatches, schedule.num_microbatches)
        deeper = any(live < limit for live in schedule.peak_live_microbatches)
        has_choice = deeper or self.splits_backward
        return self.pipeline != "simple" and graph.has_backward and graph.num_ranks > 1 and has_choice


class Executor:
    """Runs steps on one rank of a pipeline; all its ranks run the same steps in the same order."""

    def __init__(self, stage: Stage, policy: Policy) -> None:
        self.stage = stage
        self.schedules: dict[Hashable, Schedule] = {}
        self.last_schedule: Schedule | None = None
        """What the latest step followed; None if its microbatches ran straight through."""
        self.recorder: ActionRecorder | None = None
        """Told of every action that has run, in the order in which they ran; None costs nothing."""
        self._policy = policy
        self._plans: dict[Hashable, Plan | None] = {}
        self._trials: dict[Hashable, Trial[Plan]] = {}
        self._steps: Counter[Hashable] = Counter()
        self._strays: Counter[Hashable] = Counter()
        self._carried: Counter[Hashable] = Counter()
        self._parked: dict[int, Parked] = {}
        self._footprints: dict[Hashable, list[int]] = {}
        """The host memory that activations of one microbatch take, in blocks."""

    def run(
        self, kind: Hashable, body: Callable[[int], Any], count: int, before_last_backward: Callable[[], None]
    ) -> list[Any]:
        """Run `body(index)` for each microbatch, backward where it was asked for, and return what the bodies returned.

        Returned values are on every rank, with the data of their home.

        Args:
            kind: what must be equal for a recorded schedule to serve again: function, shapes, modes.
            before_last_backward: called when the backward that comes next is this rank's last of the step.
        """
        started = time.perf_counter()
        meter = Meter() if self._steps[kind] == _REPLAN_AFTER - 1 else None
        step = _Step(self.stage, body, count, before_last_backward, self.recorder, meter)
        self._parked = step.parked
        self.stage.begin_step(step.microbatches)
        if kind not in self._plans:
            microbatch = step.microbatches[0]
            microbatch.carried = self.stage.watched_modules()
            with watching(microbatch.note_hooks) if self._policy.splits_backward else contextlib.nullcontext():
                step.forward_straight(0)
            reserve(self.stage, step.outputs[0], count)
            self._footprints[kind] = active.footprint()
            self._plans[kind] = self._planned(kind, microbatch, count)
            self._reserve(kind, self._plans[kind], count)
            self.stage.transport.connect(microbatch.moves)
        trial = self._trials.get(kind)
        plan = self._plans[kind] if trial is None else trial.next
        self.last_schedule = None if plan is None else plan.schedule
        self._reserve(kind, plan, count)  # a trial may hold more microbatches
        if plan is None:
            step.run_straight()
        else:
            self.schedules[kind] = plan.schedule
            step.run_plan(plan)
        assert step.ending is not None, "forwards are left"
        outputs = step.ending.finish()
        self.stage.transport.end_step()
        self._steps[kind] += 1
        if kind in self._trials:
            self.stage.settle()
        if any(microbatch.strayed for microbatch in step.microbatches):
            self._follow_no_more(kind)
        elif self._carried[kind] == 1 and plan is None:
            del self._plans[kind]  # looked at again: what is made once, a table of positions, say, stays as it is
        elif plan is not None:
            self._choose(kind, plan, meter, time.perf_counter() - started)
        return outputs

    def _reserve(self, kind: Hashable, plan: Plan | None, count: int) -> None:
        """Have the host memory for what a plan holds at a time."""
        live = count if plan is None else plan.schedule.peak_live_microbatches[self.stage.rank]
        active.reserve(self._footprints[kind], live)

    def _follow_no_more(self, kind: Hashable) -> None:
        """Record a step again whose microbatches have left the record: perhaps it has changed for good."""
        # Receives that were posted for the record's moves wait for nothing.
        self.stage.transport.abandon(len(self.stage.microbatches))
        self._trials.pop(kind, None)
        self._strays[kind] += 1
        if self._strays[kind] < _STRAYS:
            del self._plans[kind]
        else:
            self._plans[kind] = None

    def _choose(self, kind: Hashable, plan: Plan, meter: Meter | None, seconds: float) -> None:
        """Plan the next step of a kind: again, if this one was measured, or as a trial says."""
        trial = self._trials.get(kind)
        if trial is not None:
            trial.note(seconds)
            if trial.is_over:
                self._plans[kind] = trial.winner(self.stage)
                del self._trials[kind]
        elif meter is not None and self._policy.can_replan(plan.schedule):
            schedule = replan(self.stage, plan.schedule, self._policy.schedule, meter)
            if schedule is not plan.schedule:
                self._trials[kind] = Trial(plan, plan.follow(schedule, self.stage.rank), seconds)

    def abandon(self, *, alike: bool) -> None:
        """Forget a step that an exception ended, on this rank or on all of them `alike`."""
        for parked in self._parked.values():
            parked.abandon()
        self._parked = {}
        self._trials.clear()  # the times of a step that was tried are gone; what ran before goes on
        Running.microbatch = None
        self.stage.inside = False
        self.stage.transport.abandon(len(self.stage.microbatches), alike=alike)

    def _planned(self, kind: Hashable, microbatch: Microbatch, count: int) -> Plan | None:
        """Make the schedule of a kind of step from its first microbatch.

        None: the path may change, or modules carry what microbatches would mix.
        """
        if microbatch.dynamic:
            return None
        if mixed := carried_anywhere(microbatch, self.stage):
            self._carried[kind] += 1
            if self._carried[kind] > 1:
                warn_of_carried(mixed)
            return None
        schedule = self._policy.schedule(graph_of(microbatch), count)
        check(schedule)
        return Plan.of(microbatch, schedule)


class _Step:
    """One step while it runs."""

    def __init__(
        self,
        stage: Stage,
        body: Callable[[int], Any],
        count: int,
        before_last_backward: Callable[[], None],
        recorder: ActionRecorder | None,
        meter: Meter | None,
    ) -> None:
        self.stage = stage
        self.body = body
        self.microbatches = [Microbatch(stage, index) for index in range(count)]
        self.outputs: dict[int, Any] = {}
        self.parked: dict[int, Parked] = {}
        self.ending: Ending | None = None
        self._recorder = recorder
        self._meter = meter
        stage.transport.awaits_data = recorder is not None or meter is not None
        self._before_last_backward = before_last_backward
        self._num_backwards = 0
        """How many backwards and weight halves have begun."""
        self._num_expected = -1
        """How many there will be; known when all forwards have run."""
        self._num_posted = 0
        """For how many of this rank's actions all receives have been posted ahead."""
        self._num_split = 0
        """How many segments of a microbatch have both."""
        self._is_ending_due = False
        """Whether all forwards have run, and the ending has not begun."""

    def forward_straight(self, index: int) -> None:
        """Run a microbatch's forward from end to end."""
        output = self._act(Kind.FORWARD, 0, self.microbatches[index], self._run_body, index)
        self._returned(index, output)

    def run_straight(self) -> None:
        """Run all forwards, then all backwards, in the program's own order."""
        transport = self.stage.transport
        transport.follow(None)
        for index in range(len(self.microbatches)):
            if index not in self.outputs:
                self.forward_straight(index)
        self._begin_ending()
        if transport.has_lanes:
            moves = {each.index: each.moves for each in self.microbatches if each.has_backward}
            transport.follow(returning(moves, self.stage.rank))
        for microbatch in self.microbatches:
            self._finish(microbatch)

    def run_plan(self, plan: Plan) -> None:
        """Run this rank's actions."""
        self.stage.transport.places = plan.places
        if self.stage.transport.has_lanes:
            self.stage.transport.follow(plan.timetable, over=self.outputs)
        active.follow(plan.actions)
        for microbatch in self.microbatches:
            if microbatch.index not in self.outputs:
                microbatch.record = plan.record
        self._num_split = len(plan.split)
        coming = list(zip(plan.actions, plan.receives, strict=True))
        for first in coming[:_LOOKAHEAD]:
            self._post(*first)
        microbatches, split, revisited = self.microbatches, plan.split, plan.revisited
        postponed = False
        for place, (action, moves) in enumerate(coming, _LOOKAHEAD):
            if self._num_posted <= place < len(coming) and coming[place][1]:
                self._post(*coming[place])
            if moves and not self._num_posted:
                self._post_ahead(coming)
            # What is on the way to others goes first if it can run at once: a backward that follows the last forward.
            if self._is_ending_due and (moves or postponed):
                self._begin_ending()
            postponed = self._is_ending_due
            microbatch, kind, segment = microbatches[action.microbatch], action.kind, action.segment
            if microbatch.strayed:  # the schedule knows nothing of its way: it must wait until nobody waits for others
                continue
            if kind is Kind.FORWARD:
                self._forward(microbatch, segment, revisited)
            elif kind is Kind.WEIGHT:
                self._weights(microbatch, segment, segment in split)
            elif segment < microbatch.num_own_segments:
                self._backward(microbatch, segment, split=segment in split)
        self._run_rest(revisited)
        self.stage.transport.places = {}

    def _run_rest(self, revisited: bool) -> None:
        """Run what the schedule has left, in the program's own order, which is the same on all ranks."""
        for microbatch in self.microbatches:
            while microbatch.index not in self.outputs:
                self._forward(microbatch, microbatch.num_own_segments, revisited)
        if self.ending is None:
            self._begin_ending()
        for microbatch in self.microbatches:
            if not microbatch.released:
                self._finish(microbatch)

    def _post_ahead(self, coming: Sequence[tuple[Action, tuple[Move, ...]]]) -> None:
        """Start small receives of what comes later too: there is time now, and on some ranks never again.

        Between actions, or buffers would be made in whatever mode the step's code has set.
        """
        num_bytes, self._num_posted = 0, 1
        for place, (action, moves) in enumerate(coming):
            num_bytes += sum(move.spec.num_bytes for move in moves)
            if num_bytes > _AHEAD_BYTES:
                break
            self._num_posted = place + 1
            if moves:
                self._post(action, moves)

    def _post(self, action: Action, moves: Sequence[Move]) -> None:
        """Start to receive what an action that comes soon will wait for."""
        microbatch, backward = self.microbatches[action.microbatch], action.kind is not Kind.FORWARD
        if microbatch.strayed or (not backward and microbatch.index in self.outputs):
            return
        for move in moves:
            self.stage.transport.post(microbatch.index, move, backward=backward)

    def _forward(self, microbatch: Microbatch, segment: int, revisited: bool) -> None:
        index = microbatch.index
        if index in self.outputs:
            return
        if not revisited:
            self.forward_straight(index)
            return
        parked = self.parked.get(index)
        if parked is None:
            parked = Parked(lambda: self._run_body(index), self.stage.random, self.stage.device)
            self.parked[index] = parked
            microbatch.before_wait = parked.park
        self._act(Kind.FORWARD, segment, microbatch, parked.resume)
        if parked.done:
            self._returned(index, parked.output)

    def _returned(self, index: int, output: Any) -> None:
        """Keep what a microbatch returned."""
        self.outputs[index] = output
        self.microbatches[index].end_forward()
        if len(self.outputs) == len(self.microbatches):
            self._is_ending_due = True
            num_halves = self._num_split * sum(not each.strayed for each in self.microbatches)
            self._num_expected = num_halves + sum(each.num_own_segments for each in self.microbatches)

    def _begin_ending(self) -> None:
        """Let everyone know what the microbatches have returned, when all of them have."""
        self._is_ending_due = False
        self.ending = Ending(self.stage, self.microbatches, [self.outputs[i] for i in range(len(self.outputs))])

    def _run_body(self, index: int) -> Any:
        self.stage.random.begin_microbatch(index)
        return self.body(index)

    def _finish(self, microbatch: Microbatch) -> None:
        """Run what is left of a microbatch's backward, last segment first, and let go of it."""
        if microbatch.has_backward:
            for segment in reversed(range(microbatch.num_own_segments)):
                if segment not in microbatch.backward_work.done:
                    self._backward(microbatch, segment)
        microbatch.release()

    def _backward(self, microbatch: Microbatch, segment: int, *, split: bool = False) -> None:
        self._begin_backward()
        self._act(Kind.BACKWARD, segment, microbatch, microbatch.backward_work.run, segment, split)
        if microbatch.is_done:
            microbatch.release()

    def _weights(self, microbatch: Microbatch, segment: int, split: bool) -> None:
        """Run the other half of a backward, or, where it has run in one, say that there is none."""
        if split:
            self._begin_backward()
        self._act(Kind.WEIGHT, segment, microbatch, microbatch.backward_work.run_weights, segment)
        if microbatch.is_done:
            microbatch.release()

    def _begin_backward(self) -> None:
        self._num_backwards += 1
        if self._num_backwards == self._num_expected:
            self._before_last_backward()

    def _act(self, kind: Kind, segment: int, microbatch: Microbatch, do: Callable[..., _T], *arguments: object) -> _T:
        """Do something for a microbatch, and tell those who listen what it took."""
        transport = self.stage.transport
        start_ns, waited_ns = time.perf_counter_ns(), transport.waited_ns
        active.begin_action(kind, segment, microbatch.index)
        if kind is Kind.FORWARD:
            Running.microbatch = microbatch
        try:
            result = do(*arguments)
        except Exception as error:
            inside = {} if kind is Kind.FORWARD else microbatch.backward_work.place_of(segment)
            note_place(error, **{kind.name.lower(): f"of microbatch {microbatch.index}"}, **inside)
            if kind is Kind.FORWARD and not self.stage.failed_alone and (hooked := self.stage.hooked_elsewhere()):
                # A list or dict that they fill is empty here; it does not look like anything to do with ranks.
                note_place(error, **{"after forward hooks that ran on other ranks only, on": f"`{hooked[0]}`"})
            self.stage.failed_alone = self.stage.failed_alone or kind is not Kind.FORWARD
            refuse_kept_graph(error, microbatch)
            raise
        finally:
            Running.microbatch = None
        transport.outbox.poll()
        if self._recorder is not None or self._meter is not None:
            self.stage.settle()
            end_ns = time.perf_counter_ns()
            if self._meter is not None:
                self._meter.note(kind, segment, end_ns - start_ns - (transport.waited_ns - waited_ns))
            if self._recorder is not None:
                self._recorder(kind.value, segment, microbatch.index, start_ns, end_ns)
        return result
