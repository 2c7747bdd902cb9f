"""Run the microbatches of a step over the ranks of a pipeline, in the order that the schedule says.

The first microbatch of a new kind of step runs straight through all ranks and is recorded; from its moves every rank
derives the same segment graph and schedule, and runs its own list of actions of it. A step in which Python asked for a
value that a branch may hang on keeps going straight through, microbatch after microbatch: there the next microbatch may
take another path, and following the program's own order cannot deadlock whatever path that is.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from smpkit.errors import UsageError
from smpkit.plan.schedule import Action, Kind, Schedule, Segment, SegmentGraph, Transfer, check, interleaved, simple
from smpkit.torch.pipeline.located import Located, set_current
from smpkit.torch.pipeline.microbatch import Microbatch, Move
from smpkit.torch.pipeline.parking import Parked
from smpkit.torch.pipeline.specs import map_tensors, spec_of
from smpkit.torch.pipeline.stage import Stage

__all__ = ["ActionRecorder", "Executor", "Policy"]

_LOOKAHEAD = 2  # actions whose receives are posted before their turn

ActionRecorder = Callable[[str, int, int, int, int], object]
"""Called with `(kind, segment, microbatch, start_ns, end_ns)`; times are `time.perf_counter_ns()`, waits included."""


@dataclass(frozen=True)
class Policy:
    """How to order a step: `pipeline` and `active_microbatches` of the configuration."""

    pipeline: str
    active_microbatches: int

    def schedule(self, graph: SegmentGraph, count: int) -> Schedule:
        """Choose the order; the same on every rank, since it follows from the graph alone."""
        if self.pipeline == "simple":
            return simple(graph, count)
        if not graph.has_backward:
            return simple(graph, count)
        return interleaved(graph, count, self.active_microbatches)


@dataclass(frozen=True)
class _Plan:
    """What one kind of step does on this rank."""

    schedule: Schedule
    actions: tuple[Action, ...]
    revisited: bool
    forward_receives: dict[int, tuple[Move, ...]]
    backward_receives: dict[int, tuple[Move, ...]]


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
        self._plans: dict[Hashable, _Plan | None] = {}
        self._parked: dict[int, Parked] = {}

    def run(
        self, kind: Hashable, body: Callable[[int], Any], count: int, before_last_backward: Callable[[], None]
    ) -> list[Any]:
        """Run `body(index)` for each microbatch, backward where it was asked for, and return what the bodies returned.

        Returned values are on every rank, with the data of their home.

        Args:
            kind: what must be equal for a recorded schedule to serve again: function, shapes, modes.
            before_last_backward: called when the backward that comes next is this rank's last of the step.
        """
        step = _Step(self.stage, body, count, before_last_backward, self.recorder)
        self._parked = step.parked
        if kind not in self._plans:
            step.forward_straight(0)
            self._plans[kind] = plan = self._plan(step.microbatches[0], count)
            if plan is not None:
                self.schedules[kind] = plan.schedule
        plan = self._plans[kind]
        self.last_schedule = None if plan is None else plan.schedule
        if plan is None:
            step.run_straight()
        else:
            step.run_plan(plan)
        outputs = self._share([step.outputs[index] for index in range(count)])
        self.stage.transport.flush()
        self._compare(step.microbatches)
        return outputs

    def abandon(self) -> None:
        """Forget a step that an exception ended."""
        for parked in self._parked.values():
            parked.abandon()
        self._parked = {}
        set_current(None)
        self.stage.inside = False
        self.stage.transport.abandon()

    def _plan(self, microbatch: Microbatch, count: int) -> _Plan | None:
        """Make the schedule of a kind of step from its first microbatch; None if the path may change."""
        if microbatch.dynamic:
            return None
        rank = self.stage.rank
        schedule = self._policy.schedule(_graph(microbatch, self.stage.size), count)
        check(schedule)
        segments = range(microbatch.num_segments[rank])
        return _Plan(
            schedule,
            schedule.actions[rank],
            len(segments) > 1,
            {s: tuple(m for m in microbatch.moves if (m.target, m.target_segment) == (rank, s)) for s in segments},
            {
                s: tuple(
                    m for m in microbatch.moves if (m.source, m.source_segment) == (rank, s) and m.spec.requires_grad
                )
                for s in segments
            }
            if microbatch.has_backward
            else {},
        )

    # --- what everyone gets at the end -------------------------------------------------------------------------------

    def _share(self, outputs: list[Any]) -> list[Any]:
        """Give every rank the data of located outputs: one broadcast per home and dtype."""
        found: dict[tuple[int, torch.dtype], dict[int, Located]] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, Located):
                found.setdefault((tensor.home, tensor.dtype), {})[id(tensor)] = tensor
            return tensor

        map_tensors(note, outputs)
        data: dict[int, torch.Tensor] = {}
        for (home, dtype), values in found.items():
            data.update(self._broadcast(home, dtype, list(values.values())))
        return [map_tensors(lambda tensor: data.get(id(tensor), tensor), output) for output in outputs]

    def _broadcast(self, home: int, dtype: torch.dtype, values: Sequence[Located]) -> dict[int, torch.Tensor]:
        shapes = [spec_of(value).shape for value in values]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        if home == self.stage.rank:
            packed = torch.cat([value.value.detach().reshape(-1) for value in values if value.value is not None])
        else:
            packed = torch.empty(sum(sizes), dtype=dtype, device=self.stage.device)
        packed = self.stage.transport.broadcast(packed, home)
        pieces = torch.split(packed, sizes)
        return {id(value): piece.view(shape) for value, piece, shape in zip(values, pieces, shapes, strict=True)}

    def _compare(self, microbatches: Sequence[Microbatch]) -> None:
        """Raise where ranks took different ways through a step: what they computed does not belong together."""
        paths = [zlib.crc32("\n".join(microbatch.path).encode()) for microbatch in microbatches]
        mine = torch.tensor(paths, dtype=torch.int64)
        first = self.stage.transport.broadcast(mine, 0).cpu()
        if torch.equal(mine, first):
            return
        index = int((mine != first).nonzero()[0])
        raise UsageError(
            f"pipeline rank {self.stage.rank} took another way through microbatch {index} than pipeline rank 0",
            hint="a step runs on every pipeline rank and must not branch on the rank or on data of its own",
        )


class _Step:
    """One step while it runs."""

    def __init__(
        self,
        stage: Stage,
        body: Callable[[int], Any],
        count: int,
        before_last_backward: Callable[[], None],
        recorder: ActionRecorder | None,
    ) -> None:
        self.stage = stage
        self.body = body
        self._recorder = recorder
        self.microbatches = [Microbatch(stage, index) for index in range(count)]
        self.outputs: dict[int, Any] = {}
        self.parked: dict[int, Parked] = {}
        self._before_last_backward = before_last_backward
        self._backwards = 0

    def forward_straight(self, index: int) -> None:
        """Run a microbatch's forward from end to end."""
        start_ns = time.perf_counter_ns()
        set_current(self.microbatches[index])
        try:
            self.outputs[index] = self._run_body(index)
        finally:
            set_current(None)
        self._record(Kind.FORWARD, 0, index, start_ns)

    def run_straight(self) -> None:
        """Run all forwards, then all backwards, in the program's own order."""
        for index in range(len(self.microbatches)):
            if index not in self.outputs:
                self.forward_straight(index)
        for microbatch in self.microbatches:
            self._finish(microbatch)

    def run_plan(self, plan: _Plan) -> None:
        """Run this rank's actions."""
        for number, action in enumerate(plan.actions):
            for coming in plan.actions[number : number + 1 + _LOOKAHEAD]:
                self._post(plan, coming)
            microbatch = self.microbatches[action.microbatch]
            if action.kind is Kind.FORWARD:
                self._forward(microbatch, action.segment, plan.revisited)
            elif action.segment < microbatch.num_segments[self.stage.rank]:
                self._backward(microbatch, action.segment)
        # A microbatch that took a longer way than the first has something left to do.
        for microbatch in self.microbatches:
            while microbatch.index not in self.outputs:
                self._forward(microbatch, microbatch.num_segments[self.stage.rank], plan.revisited)
        for microbatch in self.microbatches:
            self._finish(microbatch)

    def _post(self, plan: _Plan, action: Action) -> None:
        microbatch = self.microbatches[action.microbatch]
        backward = action.kind is not Kind.FORWARD
        if not backward and microbatch.index in self.outputs:
            return
        moves = plan.backward_receives if backward else plan.forward_receives
        for move in moves.get(action.segment, ()):
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
        start_ns = time.perf_counter_ns()
        set_current(microbatch)
        try:
            parked.resume()
        finally:
            set_current(None)
        self._record(Kind.FORWARD, segment, index, start_ns)
        if parked.done:
            self.outputs[index] = parked.output

    def _run_body(self, index: int) -> Any:
        self.stage.random.begin_microbatch(index)
        return self.body(index)

    def _finish(self, microbatch: Microbatch) -> None:
        """Run what is left of a microbatch's backward, last segment first, and let go of it."""
        if microbatch.has_backward:
            for segment in reversed(range(microbatch.num_segments[self.stage.rank])):
                if segment not in microbatch.backward_done:
                    self._backward(microbatch, segment)
        microbatch.release()

    def _backward(self, microbatch: Microbatch, segment: int) -> None:
        self._backwards += 1
        expected = sum(each.num_segments[self.stage.rank] for each in self.microbatches)
        if self._backwards == expected:
            self._before_last_backward()
        start_ns = time.perf_counter_ns()
        microbatch.backward_segment(segment)
        self._record(Kind.BACKWARD, segment, microbatch.index, start_ns)
        if len(microbatch.backward_done) == microbatch.num_segments[self.stage.rank]:
            microbatch.release()

    def _record(self, kind: Kind, segment: int, microbatch: int, start_ns: int) -> None:
        if self._recorder is not None:
            self._recorder(kind.value, segment, microbatch, start_ns, time.perf_counter_ns())


def _graph(microbatch: Microbatch, size: int) -> SegmentGraph:
    """Return the segments of a recorded microbatch and what travels between them."""
    segments = [Segment(rank, index) for rank in range(size) for index in range(microbatch.num_segments[rank])]
    transfers = [
        Transfer(
            Segment(move.source, move.source_segment),
            Segment(move.target, move.target_segment),
            move.spec.num_bytes,
            move.spec.requires_grad and microbatch.has_backward,
        )
        for move in microbatch.moves
    ]
    kept = [Transfer(Segment(s.rank, s.index - 1), s) for s in segments if s.index > 0]
    return SegmentGraph(size, tuple(segments), tuple(transfers + kept), microbatch.has_backward)
