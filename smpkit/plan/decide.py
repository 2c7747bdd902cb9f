"""Decide how a job runs: which rank owns which unit, in which order it works, what it holds and what it offloads.

The runtime, `smpkit plan` and whatever searches for a configuration decide here and nowhere else. They differ in what
they know. The runtime has traced the model and recorded a microbatch: it calls `assign_units`, and a `Policy` orders
the segments that it has seen. `decide` has no ranks: it takes the facts of a model, with what a microbatch would send
if that could be recorded without ranks, else it assumes that every unit hands its output to the next one. It adds what
can only be predicted: memory and the course of the offloading.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from smpkit.config.modelparallel import ModelParallelConfig, Pipeline
from smpkit.plan.memory import ModelFacts, RankMemory, memory_of_rank
from smpkit.plan.mesh import Coordinates, Mesh
from smpkit.plan.offload.simulate import Forecast, forecast
from smpkit.plan.partition.assignment import Assignment, UnitCost, assignment_of
from smpkit.plan.partition.search import assign, partition
from smpkit.plan.schedule.actions import Costs, Schedule
from smpkit.plan.schedule.graph import Segment, SegmentGraph
from smpkit.plan.schedule.list_scheduler import list_schedule
from smpkit.plan.schedule.recorded_graph import RecordedGraph, peaks
from smpkit.plan.schedule.search import interleaved, simple
from smpkit.plan.schedule.simulate import Timeline, simulate
from smpkit.plan.speed import Speed

_EQUAL_PARTS: Final = Costs(1.0, 2.0, latency_seconds=0.04)
"""What a schedule is made for: parts that take equally long, and messages that are late by 2 % of the longest action.

Between the actions of two ranks lies more than a message: Python of both, other processes on their cores, actions of
unequal length. A schedule without slack, as 1F1B, waits for all of that in each microbatch."""


@dataclass(frozen=True)
class Policy:
    """How to order a step: `pipeline` and `active_microbatches` of the configuration."""

    pipeline: Pipeline
    active_microbatches: int

    @classmethod
    def of(cls, config: ModelParallelConfig) -> Policy:
        return cls(config.pipeline, config.active_microbatches)

    @property
    def splits_backward(self) -> bool:
        """Whether a backward may run in two halves."""
        return self.pipeline == "zero_bubble"

    def schedule(self, graph: SegmentGraph, num_microbatches: int) -> Schedule:
        """Choose the order; the same on every rank and in every plan, since it follows from the graph alone."""
        if self.pipeline == "simple" or not graph.has_backward:
            return simple(graph, num_microbatches)
        limit = min(self.active_microbatches, num_microbatches)
        if graph.is_chain and not self.splits_backward and limit >= graph.num_ranks:
            # One microbatch more than 1F1B has where there is room for it: a search finds hardly anything faster.
            caps = tuple(min(depth + 1, limit) for depth in graph.depths)
            actions, _ = list_schedule(graph, num_microbatches, caps, _EQUAL_PARTS)
            return Schedule("interleaved", graph, num_microbatches, actions, caps)
        return interleaved(graph, num_microbatches, limit, _EQUAL_PARTS, split_backward=self.splits_backward)


def assign_units(config: ModelParallelConfig, units: Sequence[UnitCost], places: Mapping[str, int]) -> Assignment:
    """Return which pipeline rank owns which unit.

    Args:
        units: in execution order; without `auto_partition` in that of definition.
        places: where the user put units, by name; read without `auto_partition` only.
    """
    degree, num_chunks = config.pipeline_parallel_degree, config.virtual_pipeline_degree
    if config.auto_partition:
        return partition(units, degree, config.memory_weight, num_chunks=num_chunks)
    return assign(units, degree, places, config.default_partition, num_chunks)


@dataclass(frozen=True)
class Plan:
    """What a job will do, as far as it is known before it runs."""

    mesh: Mesh
    timeline: Timeline
    """The schedule, simulated."""
    model: ModelFacts | None = None
    """With it the fields below are known."""
    assignment: Assignment | None = None
    memory: tuple[RankMemory, ...] = ()
    """By stage, of the rank that holds most of it."""
    forecasts: tuple[Forecast, ...] = ()
    """What activation offloading does on each stage, where it is on and something is checkpointed."""
    recorded: RecordedGraph | None = None
    """The segments and values that the schedule is made for; None: every unit is assumed to hand on to the next."""


def decide(
    config: ModelParallelConfig,
    num_ranks: int,
    model: ModelFacts | None = None,
    speed: Speed | None = None,
    optimizer: str = "adamw",
    *,
    placed: Mapping[str, int] | None = None,
) -> Plan:
    """Return the plan of a job.

    Args:
        num_ranks: of the whole job.
        model: None: plan for a model in which every part takes the same time and hands on to the next one.
        speed: of a rank's device and its link with the host; needed with a model.
        optimizer: a name of `smpkit.plan.optimizers.OPTIMIZERS`, whose states count as memory.
        placed: the pipeline rank on which a run has each unit, by name; None, or where it lacks some: choose it.
    """
    degree = config.pipeline_parallel_degree
    mesh = Mesh.of(config, num_ranks)
    policy, has_backward = Policy.of(config), config.pipeline != "_only_forward"
    if model is None:
        num_chunks = config.virtual_pipeline_degree if degree > 1 else 1
        schedule = policy.schedule(SegmentGraph.loop(degree, num_chunks, has_backward), config.microbatches)
        return Plan(mesh, simulate(schedule, Costs(1 / num_chunks, 2 / num_chunks)))
    assert speed is not None, "the costs of a model's units need the speed of a device"
    if placed is not None and all(cost.name in placed for cost in model.costs):
        places = {index: placed[cost.name] for index, cost in enumerate(model.costs)}
        assignment = assignment_of(model.costs, places, degree)
    else:
        assignment = assign_units(config, model.costs, model.places)
    recorded = None if model.recorded is None or degree == 1 else model.recorded.under(assignment)
    flow = recorded or RecordedGraph.assumed(model.costs, assignment)
    runs, graph = flow.runs(model.costs), flow.graph(degree, has_backward)
    schedule = _scheduled(policy, graph, config.microbatches)
    timeline = simulate(schedule, _costs(schedule, runs, speed))
    forecasts: tuple[Forecast, ...] = ()
    if config.offload_activations and model.has_boundaries:
        forecasts = forecast(timeline, runs, config.activation_loading_horizon, speed)
    memory = []
    for stage, live_microbatches in enumerate(peaks(schedule, runs, flow.copies(model.costs))):
        offloaded = (forecasts[stage].device_bytes, forecasts[stage].host_bytes) if forecasts else None
        # One replica stands for all, unless each keeps other states.
        rdps = range(mesh.rdp_size if config.shard_optimizer_state else 1)
        replicas = [[mesh.rank(Coordinates(stage, tp, rdp)) for rdp in rdps] for tp in range(mesh.tp_size)]
        of_ranks = [
            memory_of_rank(model, assignment, config, mesh, ranks, live_microbatches, optimizer, offloaded)
            for ranks in replicas
        ]
        memory.append(max(of_ranks, key=lambda memory: memory.total_bytes))
    return Plan(mesh, timeline, model, assignment, tuple(memory), forecasts, recorded)


def _scheduled(policy: Policy, graph: SegmentGraph, num_microbatches: int) -> Schedule:
    """Return the schedule of a graph; without costs it does not depend on how large messages are."""
    bare = replace(graph, transfers=tuple(replace(transfer, num_bytes=0) for transfer in graph.transfers))
    return replace(_schedule_of(policy, bare, num_microbatches), graph=graph)


_schedule_of: Final = lru_cache(maxsize=512)(Policy.schedule)
"""Remembers schedules: whoever compares configurations asks for the same ones again and again. To predict a whole grid
takes twice as long without."""


def _is_split(schedule: Schedule, segment: Segment, run: Sequence[UnitCost]) -> bool:
    """Return whether the backward of a segment runs in two halves: not if some of it is computed again."""
    splits = schedule.splits_backward and schedule.graph.splits(segment)
    return splits and not any(unit.recomputed_flops for unit in run)


def _costs(schedule: Schedule, runs: Mapping[Segment, Sequence[UnitCost]], speed: Speed) -> Costs:
    """Return what the parts take, a backward twice a forward and what is computed again; untraced ranks count alike."""
    seconds = speed.forward_seconds
    forward = {segment: sum(map(seconds, run)) for segment, run in runs.items()}
    if not any(forward.values()):
        forward = {segment: 1 / schedule.graph.counts[segment.rank] for segment in runs}
    again = {segment: sum(unit.recomputed_share * seconds(unit) for unit in run) for segment, run in runs.items()}
    backward = {segment: 2 * forward[segment] + again[segment] for segment in runs}
    # What is computed again is not split.
    weight = {segment: 0.0 if again[segment] else forward[segment] for segment in runs}
    for segment, run in runs.items():
        waited = speed.action_seconds + sum(speed.collective_seconds.get(unit.name, 0.0) for unit in run)
        forward[segment] += waited
        backward[segment] += waited
        if _is_split(schedule, segment, run):  # its halves are two actions
            more = sum(map(speed.seconds_of_split, run))
            backward[segment] += speed.action_seconds + more
            weight[segment] += speed.action_seconds + more / 2
    return Costs(forward, backward, weight, speed.message_latency_seconds, speed.message_seconds_per_byte)
