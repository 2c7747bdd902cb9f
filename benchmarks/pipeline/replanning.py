"""What planning again from measured times gains over a rule that needs none, in simulated steps.

The rule holds a microbatch more than 1F1B wherever `active_microbatches` allows it: it is what a plan for equal parts
and a latency of 1 % of an action gives. Both schedules run at the same true costs: parts that differ at random, and
links of several latencies. `python -m benchmarks.pipeline.replanning` prints a table in two minutes.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator

from smpkit.plan.decide import Policy
from smpkit.plan.schedule.actions import Costs
from smpkit.plan.schedule.graph import Segment, SegmentGraph
from smpkit.plan.schedule.simulate import simulate

LATENCIES = (0.0, 0.01, 0.05, 0.2)
"""Of a message, as shares of the mean time of a rank's forward and backward of one microbatch."""
DIFFERENCES = (0.0, 0.1, 0.3)
"""By how much the parts differ from their mean, at most."""
SEEDS = 3


def graphs() -> Iterator[tuple[SegmentGraph, int]]:
    """Yield pipelines, and how many virtual stages their ranks have."""
    for num_ranks in (2, 4, 8):
        yield SegmentGraph.chain(num_ranks, num_bytes=8), 1
    yield SegmentGraph.loop(4, 2, has_backward=True), 2


def true_costs(graph: SegmentGraph, difference: float, latency: float, seed: int) -> Costs:
    """Return costs that only a measurement knows: a forward and backward of a rank take 3 on average."""
    generator = random.Random(seed)
    forward, backward, weight = {}, {}, {}
    for rank, count in enumerate(graph.counts):
        for index in range(count):
            segment = Segment(rank, index)
            forward[segment] = (1 + generator.uniform(-difference, difference)) / count
            backward[segment] = 2 * forward[segment] * (1 + generator.uniform(-difference, difference) / 2)
            weight[segment] = 0.45 * backward[segment]
    return Costs(forward, backward, weight, latency_seconds=3 * latency)


def gains(pipeline: str, graph: SegmentGraph, num_chunks: int, latency: float) -> Iterator[float]:
    """Yield by which share a step of the rule takes longer than one that was planned again."""
    equal_parts = Costs(1 / num_chunks, 2 / num_chunks, 1 / num_chunks, latency_seconds=0.02 / num_chunks)
    for num_microbatches in (8, 16, 32):
        for active in (graph.num_ranks, graph.num_ranks + 2, num_microbatches):
            policy = Policy(pipeline, active)
            rule = policy.schedule(graph, num_microbatches, equal_parts)
            for difference in DIFFERENCES:
                for seed in range(SEEDS):
                    costs = true_costs(graph, difference, latency, seed)
                    again = policy.schedule(graph, num_microbatches, costs)
                    ruled, replanned = (simulate(each, costs).makespan_seconds for each in (rule, again))
                    yield ruled / min(ruled, replanned) - 1  # a schedule that is predicted to be slower is not taken


def main() -> None:
    print("| schedule | virtual stages | latency | mean gain | largest gain |\n|---|---|---|---|---|")
    for pipeline in ("interleaved", "zero_bubble"):
        for num_chunks in (1, 2):
            for latency in LATENCIES:
                found = [
                    gain
                    for graph, chunks in graphs()
                    if chunks == num_chunks
                    for gain in gains(pipeline, graph, num_chunks, latency)
                ]
                row = f"{latency:.0%} | {statistics.mean(found):.1%} | {max(found):.1%}"
                print(f"| `{pipeline}` | {num_chunks} | {row} |", flush=True)


if __name__ == "__main__":
    main()
