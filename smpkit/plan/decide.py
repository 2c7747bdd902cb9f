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

from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.plan.memory import OPTIMIZERS, ModelFacts, RankMemory, memory_of_ranks, shares_of
from smpkit.plan.mesh import Mesh
from smpkit.plan.offload.forecast import Forecast, forecast
from smpkit.plan.partition.assignment import Assignment, UnitCost, assignment_of
from smpkit.plan.partition.search import assign, partition
from smpkit.plan.schedule.actions import Costs, Schedule
from smpkit.plan.schedule.graph import Kind, Segment, SegmentGraph
from smpkit.plan.schedule.linear_graph import linear_graph, peaks, runs_of
from smpkit.plan.schedule.recorded_graph import RecordedGraph
from smpkit.plan.schedule.search import WORTH, interleaved, simple
from smpkit.plan.schedule.simulate import Timeline, simulate
from smpkit.plan.speed import Speed
from smpkit.plan.svg import html

__all__ = ["Plan", "Policy", "assign_units", "decide", "with_jitter"]

_MIN_GAIN: Final = 0.01
"""Another schedule must be faster by this share with measured times. They differ by some percent from step to step and
from a prediction: with less, noise would choose among schedules that are as fast, and hold what no plan has foreseen.
"""
_MIN_LATENCY_SHARE: Final = 0.02
"""The least latency of a message, as a share of the longest action. A ping leaves out what else lies between two ranks'
actions: Python of both, other processes on their cores, actions of unequal length. A schedule without slack, as 1F1B,
waits for all of that in each microbatch."""


@dataclass(frozen=True)
class Policy:
    """How to order a step: `pipeline` and `active_microbatches` of the configuration."""

    pipeline: str
    active_microbatches: int

    @classmethod
    def of(cls, config: ModelParallelConfig) -> Policy:
        return cls(config.pipeline, config.active_microbatches)

    @property
    def splits_backward(self) -> bool:
        """Whether a backward may run in two halves."""
        return self.pipeline == "zero_bubble"

    def schedule(
        self, graph: SegmentGraph, num_microbatches: int, costs: Costs | None = None, worth: float = WORTH
    ) -> Schedule:
        """Choose the order; the same on every rank, since it follows from the graph and the costs alone."""
        if self.pipeline == "simple" or not graph.has_backward:
            return simple(graph, num_microbatches)
        return interleaved(
            graph, num_microbatches, self.active_microbatches, costs, split_backward=self.splits_backward, worth=worth
        )

    def can_replan(self, schedule: Schedule) -> bool:
        """Whether there is a choice: other depths fit under `active_microbatches`, and several ranks take part."""
        graph = schedule.graph
        limit = min(self.active_microbatches, schedule.num_microbatches)
        deeper = any(live < limit for live in schedule.peak_live_microbatches)
        has_choice = deeper or self.splits_backward
        return self.pipeline != "simple" and graph.has_backward and graph.num_ranks > 1 and has_choice

    def replanned(self, schedule: Schedule, costs: Costs) -> Schedule:
        """Return the schedule that is worth a change with these costs, or the same one if there is none.

        Args:
            costs: in seconds, measured or predicted, `with_jitter`.
        """
        other = self.schedule(schedule.graph, schedule.num_microbatches, costs, worth=_MIN_GAIN)
        before, after = (simulate(each, costs).makespan_seconds for each in (schedule, other))
        return other if after < before * (1 - _MIN_GAIN) else schedule


def with_jitter(costs: Costs, graph: SegmentGraph) -> Costs:
    """Return the costs with the least latency that messages have where actions never take equally long."""
    longest = max(costs.seconds(kind, each) for each in graph.segments for kind in (Kind.FORWARD, Kind.BACKWARD))
    return replace(costs, latency_seconds=max(costs.latency_seconds, longest * _MIN_LATENCY_SHARE))


def assign_units(config: ModelParallelConfig, units: Sequence[UnitCost], places: Mapping[str, int]) -> Assignment:
    """Return which pipeline rank owns which unit.

    Args:
        units: in execution order; without `auto_partition` in that of definition.
        places: where the user put units, by name; read without `auto_partition` only.

    Raises:
        ConfigError: there are fewer units than parts, or a place does not exist; names every problem.
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

    def _repr_html_(self) -> str:
        """Show schedule and memory in a notebook."""
        return html(self.timeline, self.memory)


def decide(
    config: ModelParallelConfig,
    num_ranks: int,
    model: ModelFacts | None = None,
    speed: Speed | None = None,
    optimizer: str = "adamw",
    *,
    replans: bool = True,
    schedule: Schedule | None = None,
    placed: Mapping[str, int] | None = None,
) -> Plan:
    """Return the plan of a job.

    Args:
        num_ranks: of the whole job.
        model: None: plan for a model in which every part takes the same time and hands on to the next one.
        speed: of a rank's device and its link with the host; needed with a model.
        optimizer: a name of `smpkit.plan.memory.OPTIMIZERS`, whose states count as memory.
        replans: whether to choose the schedule once more with the costs of the model's parts, as the runtime does with
            measured ones after its first steps. That may hold more microbatches, and it takes longer to decide.
        schedule: that a run of the same model has chosen, with as many segments on each rank; None: choose one.
        placed: the pipeline rank on which a run has each unit, by name; None, or where it lacks some: choose it.

    Raises:
        ConfigError: the model cannot be cut as the configuration asks.
    """
    degree = config.pipeline_parallel_degree
    mesh = Mesh.from_world(num_ranks, degree, config.tensor_parallel_degree, config.placement_strategy)
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
    if recorded is None:
        runs = runs_of(model.costs, assignment)
        graph = linear_graph(runs, degree, has_backward)
    else:
        runs, graph = recorded.runs(model.costs), recorded.graph(degree, has_backward)
    ran = schedule is not None and schedule.graph.counts == graph.counts
    schedule = schedule if schedule is not None and ran else _scheduled(policy, graph, config.microbatches)
    costs = _costs(schedule, runs, speed)
    timeline = simulate(schedule, costs)
    if replans and not ran and policy.can_replan(schedule):
        again = policy.replanned(schedule, with_jitter(costs, graph))
        if again is not schedule:
            schedule, timeline = again, simulate(again, _costs(again, runs, speed))
    forecasts: tuple[Forecast, ...] = ()
    if config.offload_activations and model.has_boundaries:
        forecasts = forecast(model, assignment, timeline, config.activation_loading_horizon, speed)
    live = peaks(schedule, runs, {} if recorded is None else recorded.copies(model.costs))
    memory = _memory(config, mesh, model, assignment, live, forecasts, optimizer)
    return Plan(mesh, timeline, model, assignment, memory, forecasts, recorded)


def _scheduled(policy: Policy, graph: SegmentGraph, num_microbatches: int) -> Schedule:
    """Return the schedule of a graph; without costs it does not depend on how large messages are."""
    bare = replace(graph, transfers=tuple(replace(each, num_bytes=0) for each in graph.transfers))
    return replace(_schedule_of(policy, bare, num_microbatches), graph=graph)


@lru_cache(maxsize=512)
def _schedule_of(policy: Policy, graph: SegmentGraph, num_microbatches: int) -> Schedule:
    """Remember schedules: whoever compares configurations asks for the same ones again and again."""
    return policy.schedule(graph, num_microbatches)


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
    backward = {each: 2 * forward[each] + again[each] for each in runs}
    weight = {each: 0.0 if again[each] else forward[each] for each in runs}  # what is computed again is not split
    for segment, run in runs.items():
        waited = speed.action_seconds + sum(speed.collective_seconds.get(unit.name, 0.0) for unit in run)
        forward[segment] += waited
        backward[segment] += waited
        if _is_split(schedule, segment, run):  # its halves are two actions
            more = sum(map(speed.seconds_of_split, run))
            backward[segment] += speed.action_seconds + more
            weight[segment] += speed.action_seconds + more / 2
    return Costs(forward, backward, weight, speed.message_latency_seconds, speed.message_seconds_per_byte)


def _memory(
    config: ModelParallelConfig,
    mesh: Mesh,
    model: ModelFacts,
    assignment: Assignment,
    live: Sequence[float],
    forecasts: Sequence[Forecast],
    optimizer: str,
) -> tuple[RankMemory, ...]:
    """Return the memory of each stage: of those of its ranks that hold most.

    Args:
        live: how many microbatches each stage holds at its peak.
    """

    def of_share(stage: int) -> list[RankMemory]:
        shares = shares_of(
            mesh,
            stage,
            shards_states=config.shard_optimizer_state,
            sharding_degree=config.sharded_data_parallel_degree,
        )
        return [
            memory_of_ranks(
                model,
                assignment,
                live_microbatches=live,
                states_per_parameter=OPTIMIZERS[optimizer],
                replicated=config.ddp and mesh.dp_size > 1,
                offloaded=[(each.device_bytes, each.host_bytes) for each in forecasts],
                share=share,
                persistent=config.sdp_param_persistence_threshold,
                half="float16" if config.fp16 else "bfloat16" if config.bf16 else None,
                only=stage,
            )[0]
            for share in shares
        ]

    return tuple(
        max(of_share(stage), key=lambda memory: memory.total_bytes) for stage in range(assignment.num_partitions)
    )
