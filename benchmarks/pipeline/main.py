"""Run smpkit's pipeline and torch.distributed.pipelining in turns on the same models; write the tables of README.md.

Parts: `gpt` computes; in `sleep` and `schedules` stages sleep, so that only the engines and gloo compete for cores;
`overhead` is the engines' own CPU time, `bytecodes` counts what Python runs for it; `masked` is a loss of what a mask
selects. The last three run where they are named, and are printed only.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from time import thread_time_ns
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import smpkit.torch as smp
from benchmarks.common import Part, parser, run, table, take_turns
from benchmarks.pipeline.contestants import (
    TORCH_SCHEDULES,
    Loss,
    Step,
    one_process,
    smpkit_model,
    smpkit_step,
    torch_step,
    train,
    with_update,
)
from benchmarks.pipeline.models import (
    BACKWARD_SECONDS,
    FORWARD_SECONDS,
    ON_A_GPU,
    TINY,
    GPTSize,
    Scale,
    SleepLayer,
    cut,
    gpt,
    gpt_batch,
    gpt_loss,
    sleep_loss,
)
from benchmarks.ranks import OVER_GLOO, WARM_UPS, Times, on_ranks, time_steps
from smpkit.torch.core.runtime import state

SMALL, LARGE = 16 * 1024, 8 * 1024 * 1024
"""Bytes of a message between stages."""

Options = argparse.Namespace


def main() -> None:
    options = parser(__doc__, repetitions=5)
    options.add_argument("--sizes", type=int, nargs="+", default=[2, 4, 8], help="ranks of `sleep`")
    options.add_argument("--counts", type=int, nargs="+", default=[8, 16, 32], help="microbatches of `sleep`")
    measures = {"overhead": overhead, "bytecodes": bytecodes, "masked": masked}
    printed: dict[str, Part] = {name: partial(figures_of, measure) for name, measure in measures.items()}
    tables: dict[str, Part] = {"gpt": gpt_table, "sleep": sleep_table, "schedules": schedules_table}
    run(__file__, options, tables | printed, default=tables, about=OVER_GLOO)


def figures_of(measure: Callable[[int], dict[str, float]], options: Options) -> tuple[str, object]:
    """Return a row per figure, and a column per rank."""
    figures = on_ranks(measure, 2, options.repetitions)
    rows = [[what, *[f"{rank[what]:.4g}" for rank in figures]] for what in figures[0]]
    return table(["", "rank 0", "rank 1"], rows), figures


def init(num_microbatches: int, **more: Any) -> None:
    """Start smpkit over all ranks, placed by hand."""
    smp.shutdown()
    degrees = {"pipeline_parallel_degree": int(os.environ["WORLD_SIZE"]), "microbatches": num_microbatches}
    smp.init({**degrees, "auto_partition": False, "default_partition": 0, "ddp": True, **more})


# --- a GPT that computes ----------------------------------------------------------------------------------------------


def gpt_table(options: Options) -> tuple[str, object]:
    """Return a row per contestant: seconds of a step, and the loss of the first and last step."""
    size = TINY if options.quick else ON_A_GPU if torch.cuda.is_available() else GPTSize()
    times, losses = on_ranks(time_gpt, 2, options.repetitions, size)[0]
    rows = []
    for name, seconds in times.items():
        figures = [f"{min(seconds):.3f} s", f"{statistics.median(seconds):.3f} s"]
        rows.append([name, *figures, f"{losses[name][0]:.7f}", f"{losses[name][-1]:.7f}"])
    text = table(["", "fastest step", "median step", "first loss", "last loss"], rows)
    return text, {"times": times, "losses": losses}


def time_gpt(repetitions: int, size: GPTSize) -> tuple[Times, Times]:
    """Time the GPT on this rank's device; return losses, too.

    On a GPU that ranks share, values go over gloo, which sends no tensors of a GPU from rank to rank, as torch's
    schedules need it: they are left out.
    """
    count = size.num_microbatches
    init(count)
    inputs, targets = (tensor.to(state.device) for tensor in gpt_batch(size))
    contestants: dict[str, Step] = {}

    sgd = partial(torch.optim.SGD, lr=0.05)
    if state.device.type == "cpu" or dist.get_backend() != "gloo":
        for name, (_, per_rank) in TORCH_SCHEDULES.items():
            chunks = cut(size.num_layers, per_rank * smp.size())
            own, step = torch_step(name, gpt(size), chunks, gpt_loss, (inputs, targets), count)
            contestants[f"torch {name}"] = with_update(sgd(own.parameters()), step)
    model = smpkit_model(gpt(size), cut(size.num_layers, smp.size()))
    optimizer = smp.DistributedOptimizer(sgd(model.parameters()))
    contestants["smpkit"] = with_update(optimizer, smpkit_step(model, gpt_loss, inputs, targets))
    whole = gpt(size).to(state.device)
    alone = with_update(sgd(whole.parameters()), one_process(whole, gpt_loss, inputs, targets, count))
    contestants["one process"] = lambda: alone() if state.rank == 0 else None
    losses: Times = {name: [] for name in contestants}

    def kept(name: str, step: Step) -> None:
        loss = step()
        losses[name].append(float("-inf") if loss is None else loss)

    times = time_steps({name: partial(kept, name, step) for name, step in contestants.items()}, repetitions)
    everyone = torch.tensor([*losses.values()], dtype=torch.float64)
    dist.all_reduce(everyone, dist.ReduceOp.MAX)  # the rank that has the loss is not the same for all
    return times, dict(zip(losses, everyone.tolist(), strict=True))


# --- stages that sleep ------------------------------------------------------------------------------------------------


def sleeping(
    count: int,
    make_layer: Callable[[], nn.Module],
    per_rank: int = 1,
    theirs: Sequence[str] = ("1F1B",),
    ours: str = "smpkit",
    **more: Any,
) -> dict[str, Step]:
    """Start smpkit, and return steps of smpkit's schedule and of torch's.

    Args:
        count: of microbatches.
        make_layer: takes and returns values of any shape.
        per_rank: how many layers a rank has.
        theirs: torch's schedules.
        ours: what smpkit's is called.
        more: of smpkit's configuration.
    """
    init(count, **more)
    num, zeros = per_rank * smp.size(), torch.zeros(count, 1)

    def parts(per_stage: int) -> tuple[nn.Sequential, list[range]]:
        layers = nn.Sequential(*[make_layer() for _ in range(num)])
        return layers, [range(first, first + per_stage) for first in range(0, num, per_stage)]

    steps: dict[str, Step] = {}
    for name in theirs:
        layers, chunks = parts(per_rank // TORCH_SCHEDULES[name][1])
        steps[f"torch {name}"] = torch_step(name, layers, chunks, sleep_loss, (zeros, zeros), count)[1]
    model = smpkit_model(*parts(per_rank // more.get("virtual_pipeline_degree", 1)))
    return steps | {ours: smpkit_step(model, sleep_loss, zeros, zeros)}


def share(work_seconds: float, seconds: Sequence[float]) -> str:
    """Return the part of a step that is work: of the fastest and the median one."""
    return f"{work_seconds / min(seconds):.1%} ({work_seconds / statistics.median(seconds):.1%})"


def time_sleeping(contests: Sequence[dict[str, Any]], repetitions: int) -> list[Times]:
    """Let the contestants of each contest take turns; its arguments are those of `sleeping`."""
    return [time_steps(sleeping(**contest), repetitions) for contest in contests]


def sleep_table(options: Options) -> tuple[str, object]:
    """Return percent of the ideal step, by ranks, microbatches and bytes of a message."""
    sizes, counts = ([2], [8]) if options.quick else (options.sizes, options.counts)
    messages = list(product({"16 KiB": SMALL, "8 MiB": LARGE}.items(), counts))
    contests = [{"count": count, "make_layer": partial(SleepLayer, size // 4)} for (_, size), count in messages]
    rows, cells = [], []
    for size in sizes:
        contests_of_size = on_ranks(time_sleeping, size, contests, options.repetitions)[0]
        for ((message, _), count), times in zip(messages, contests_of_size, strict=True):
            theirs, ours = times.values()
            ideal = (count + size - 1) * (FORWARD_SECONDS + BACKWARD_SECONDS)
            compared = f"{min(ours) / min(theirs):.3f} ({statistics.median(ours) / statistics.median(theirs):.3f})"
            rows.append([size, count, message, share(ideal, theirs), share(ideal, ours), compared])
            cells.append({"size": size, "count": count, "message": message, "times": times})
    return table(["P", "M", "message", "torch 1F1B", "smpkit", "smpkit / torch"], rows), cells


SCHEDULES: Final[tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...]] = (
    ("interleaved", {}, ("1F1B",)),
    ("2 virtual stages", {"virtual_pipeline_degree": 2}, ("interleaved 1F1B",)),
    ("zero bubble", {"pipeline": "zero_bubble"}, ("interleaved zero bubble", "ZBV zero bubble")),
)
"""Name and configuration of smpkit's schedules, and those of torch that run in turns with each."""


def schedules_table(options: Options) -> tuple[str, object]:
    """Return percent of a step in which a rank computes two half layers, by contestant, ranks and microbatches."""
    cells = list(product([2], [4]) if options.quick else product([2, 4], [8, 16]))
    half = partial(SleepLayer, SMALL // 4, 0.5)
    shares: defaultdict[str, list[str]] = defaultdict(list)
    results = []
    for size, count in cells:
        contests = [
            {"count": count, "make_layer": half, "per_rank": 2, "theirs": theirs, "ours": f"smpkit {name}", **more}
            for name, more, theirs in SCHEDULES
        ]
        results.append(on_ranks(time_sleeping, size, contests, options.repetitions)[0])
        for name, seconds in (contestant for times in results[-1] for contestant in times.items()):
            shares[name].append(share(count * (FORWARD_SECONDS + BACKWARD_SECONDS), seconds))
    heads = ["", *[f"P = {size}, M = {count}" for size, count in cells]]
    return table(heads, [[name, *row] for name, row in shares.items()]), results


# --- the engine's own cost --------------------------------------------------------------------------------------------


def overhead(repetitions: int) -> dict[str, float]:
    """Return CPU microseconds of this thread per microbatch, which other load hardly changes."""
    os.environ["SMPKIT_SUMMARY"] = "0"  # torch measures nothing
    count = 32

    def spent(step: Step) -> float:
        dist.barrier()
        started = thread_time_ns()
        step()
        return (thread_time_ns() - started) / 1000 / count

    steps = {name: partial(spent, step) for name, step in sleeping(count, Scale).items()}
    times = take_turns(steps, repetitions, WARM_UPS)
    median = {f"{name}, median, µs": statistics.median(runs) for name, runs in times.items()}
    return median | {f"{name}, fastest, µs": min(runs) for name, runs in times.items()}


def bytecodes(_repetitions: int) -> dict[str, float]:
    """Return how many bytecodes of Python one more microbatch takes: the same on every machine, however busy."""
    os.environ["SMPKIT_SUMMARY"] = "0"
    few, many = ({name: bytecodes_of(step) for name, step in sleeping(count, Scale).items()} for count in (16, 32))
    return {name: (many[name] - few[name]) / 16 for name in few}


def bytecodes_of(step: Callable[[], object]) -> int:
    """Return how many bytecodes this thread runs in a step."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        count += event == "opcode"
        return trace

    for _ in range(WARM_UPS):
        step()
    sys.settrace(trace)
    step()
    sys.settrace(None)
    return count


# --- a loss of what a mask selects ------------------------------------------------------------------------------------

IGNORED: Final = -100
"""What `gpt_loss` ignores as well."""


def masked_loss(logits: Tensor, labels: Tensor) -> Tensor:
    mask = labels != IGNORED
    return functional.cross_entropy(logits[mask], labels[mask])


def masked(repetitions: int) -> dict[str, float]:
    """Return steps per second. Labels are ignored by chance: each call has another number of targets, and is new."""
    size = GPTSize(vocabulary=1024, context=64, num_layers=6)
    init(size.num_microbatches)
    model = smpkit_model(gpt(size), cut(size.num_layers, smp.size()))
    generator = torch.Generator().manual_seed(0)

    def step(loss_of: Loss) -> None:
        shape = size.num_microbatches * size.microbatch_size, size.context
        tokens = torch.randint(size.vocabulary, shape, generator=generator)
        labels = tokens.masked_fill(torch.rand(shape, generator=generator) < 0.5, IGNORED)
        model.zero_grad()
        train(model, loss_of, tokens, labels)

    losses = {"masked": masked_loss, "unmasked": gpt_loss}
    times = time_steps({name: partial(step, loss_of) for name, loss_of in losses.items()}, repetitions)
    median = {f"{name}, median": 1 / statistics.median(seconds) for name, seconds in times.items()}
    return median | {f"{name}, fastest": 1 / min(seconds) for name, seconds in times.items()}


if __name__ == "__main__":
    main()
