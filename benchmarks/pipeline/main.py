"""Run smpkit's pipeline and torch.distributed.pipelining in turns on the same models; write the tables of README.md.

Parts: `gpt` computes; in `sleep` and `schedules` stages sleep, so that only the engines and gloo compete for cores;
`overhead` is the engines' own CPU time, `bytecodes` counts what Python runs for it; `masked` is a loss of what a mask
selects. The last three are printed only.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import thread_time_ns
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import smpkit.torch as smp
from benchmarks.common import machine, parser, report, table, take_turns
from benchmarks.pipeline.contestants import (
    TORCH_SCHEDULES,
    Step,
    one_process,
    smpkit_model,
    smpkit_step,
    torch_step,
    train,
)
from benchmarks.pipeline.models import (
    BACKWARD_SECONDS,
    FORWARD_SECONDS,
    ON_A_GPU,
    TINY,
    GPTSize,
    HalvedSleepLayer,
    Scale,
    SleepLayer,
    cut,
    gpt,
    gpt_batch,
    gpt_loss,
    sleep_loss,
)
from benchmarks.ranks import on_ranks, seconds_until_all_are_done
from smpkit.torch.core.runtime import state

SMALL, LARGE = 16 * 1024, 8 * 1024 * 1024
"""Bytes of a message between stages."""
WARM_UPS: Final = 5
"""Steps that are not counted: within them smpkit measures, and torch exchanges shapes."""

Cell = dict[str, Any]
Times = dict[str, list[float]]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__, repetitions=5)
    parts = ["gpt", "sleep", "schedules", "overhead", "bytecodes", "masked"]
    options.add_argument("--only", choices=parts, help="run one of the parts; by default the first three")
    options.add_argument("--sizes", type=int, nargs="+", default=[2, 4, 8], help="ranks of `sleep`")
    options.add_argument("--counts", type=int, nargs="+", default=[8, 16, 32], help="microbatches of `sleep`")
    chosen = options.parse_args(arguments)
    quick, repetitions = chosen.quick, 2 if chosen.quick else chosen.repetitions
    about = f"{repetitions} counted steps of each contestant, gloo over the loopback interface, "
    wanted = [chosen.only] if chosen.only else parts[:3]
    if "gpt" in wanted:
        cell = on_ranks(gpt_cell, 2, repetitions, quick)[0]
        report(__file__, "gpt", gpt_table(cell), chosen, cell, about)
    if "sleep" in wanted:
        sizes, counts = ([2], [8]) if quick else (chosen.sizes, chosen.counts)
        pairs = [(count, num_bytes) for num_bytes in (SMALL, LARGE) for count in counts]
        cells = [cell for size in sizes for cell in on_ranks(sleep_cells, size, pairs, repetitions)[0]]
        report(__file__, "sleep", sleep_table(cells), chosen, cells, about)
    if "schedules" in wanted:
        sizes, counts = ([2], [4]) if quick else ([2, 4], [8, 16])
        cells = [cell for size in sizes for cell in on_ranks(schedules_cells, size, counts, repetitions)[0]]
        report(__file__, "schedules", schedules_table(cells), chosen, cells, about)
    for name, measure in {"overhead": overhead, "bytecodes": bytecodes, "masked": masked}.items():
        if name in wanted:
            figures = on_ranks(measure, 2, repetitions)
            rows = [[what, *[f"{each[what]:.4g}" for each in figures]] for what in figures[0]]
            print(table([name, "rank 0", "rank 1"], rows), about + machine(), sep="\n\n")
    return 0


def init(num_microbatches: int, **more: Any) -> None:
    """Start smpkit over all ranks, placed by hand."""
    smp.shutdown()
    degrees = {"pipeline_parallel_degree": int(os.environ["WORLD_SIZE"]), "microbatches": num_microbatches}
    smp.init({**degrees, "auto_partition": False, "default_partition": 0, "ddp": True, **more})


def timed(contestants: Mapping[str, Callable[[], object]], repetitions: int) -> Times:
    """Time the contestants in turns, from a barrier until all ranks are done."""
    steps = {name: partial(seconds_until_all_are_done, step) for name, step in contestants.items()}
    return take_turns(steps, repetitions, WARM_UPS)


# --- a GPT that computes ----------------------------------------------------------------------------------------------


def gpt_cell(repetitions: int, quick: bool) -> Cell:
    """Time the GPT on this rank's device: on a GPU that ranks share, values go over gloo."""
    size = TINY if quick else ON_A_GPU if torch.cuda.is_available() else GPTSize()
    init(size.num_microbatches)
    num, lr = size.num_microbatches, 0.05
    inputs, targets = (each.to(state.device) for each in gpt_batch(size))
    contestants: dict[str, Step] = {}
    absent = {}
    for name, (_, per_rank) in TORCH_SCHEDULES.items():
        if state.device.type == "cuda" and dist.get_backend() == "gloo":
            absent[f"torch {name}"] = "gloo sends no tensors of a GPU from rank to rank"
            continue
        chunks = cut(size.num_layers, per_rank * smp.size())
        step = torch_step(name, gpt(size), chunks, gpt_loss, inputs, targets, num_microbatches=num, lr=lr)
        contestants[f"torch {name}"] = step
    contestants["smpkit"] = smpkit_step(gpt(size), cut(size.num_layers, smp.size()), gpt_loss, inputs, targets, lr)
    alone = one_process(gpt(size).to(state.device), gpt_loss, inputs, targets, num=num, lr=lr)
    contestants["one process"] = lambda: alone() if state.rank == 0 else None
    losses: Times = {name: [] for name in contestants}

    def kept(name: str, step: Step) -> float | None:
        loss = step()
        losses[name].append(float("-inf") if loss is None else loss)
        return loss

    times = timed({name: partial(kept, name, step) for name, step in contestants.items()}, repetitions)
    everyone = torch.tensor([*losses.values()], dtype=torch.float64)
    dist.all_reduce(everyone, dist.ReduceOp.MAX)  # the rank that has the loss is not the same for all
    return {"times": times, "losses": dict(zip(losses, everyone.tolist(), strict=True)), "absent": absent}


def gpt_table(cell: Cell) -> str:
    """Return a row per contestant: seconds of a step, and the loss of the first and last step."""
    rows = [[name, f"not run: {why}", "", "", ""] for name, why in cell["absent"].items()]
    for name, seconds in cell["times"].items():
        losses = cell["losses"][name]
        figures = [f"{min(seconds):.3f} s", f"{statistics.median(seconds):.3f} s"]
        rows.append([name, *figures, f"{losses[0]:.7f}", f"{losses[-1]:.7f}"])
    return table(["", "fastest step", "median step", "first loss", "last loss"], rows)


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
        steps[f"torch {name}"] = torch_step(name, layers, chunks, sleep_loss, zeros, zeros, num_microbatches=count)
    layers, chunks = parts(per_rank // more.get("virtual_pipeline_degree", 1))
    return steps | {ours: smpkit_step(layers, chunks, sleep_loss, zeros, zeros)}


def sleep_cells(cells: Sequence[tuple[int, int]], repetitions: int) -> list[Cell]:
    """Time 1F1B of torch and smpkit's default, with so many microbatches and bytes of a message."""
    results = []
    for count, num_bytes in cells:
        times = timed(sleeping(count, partial(SleepLayer, num_bytes // 4)), repetitions)
        results.append({"size": smp.size(), "count": count, "bytes": num_bytes, "times": times, "live": _live()})
    return results


def _live() -> list[int]:
    """Return the most microbatches that each rank holds under the schedule that smpkit chose."""
    assert state.model is not None
    assert state.model.pipeline is not None
    executor = state.model.pipeline._executor
    assert executor is not None
    return list(next(iter(executor.schedules.values())).peak_live_microbatches)


def sleep_table(cells: Sequence[Cell]) -> str:
    """Return a row per cell: percent of the ideal, from the fastest and from the median step."""
    rows = []
    for cell in cells:
        ideal = (cell["count"] + cell["size"] - 1) * (FORWARD_SECONDS + BACKWARD_SECONDS)
        theirs, ours = cell["times"].values()
        size = f"{cell['bytes'] >> 10} KiB" if cell["bytes"] < 1 << 20 else f"{cell['bytes'] >> 20} MiB"
        compared = f"{min(ours) / min(theirs):.3f} ({statistics.median(ours) / statistics.median(theirs):.3f})"
        row = [cell["size"], cell["count"], size, share(ideal, theirs), share(ideal, ours), compared]
        rows.append([*row, " ".join(map(str, cell["live"]))])
    return table(["P", "M", "message", "torch 1F1B", "smpkit", "smpkit / torch", "live microbatches per rank"], rows)


def share(work_seconds: float, seconds: Sequence[float]) -> str:
    """Return the part of a step that is work: of the fastest and the median one."""
    return f"{work_seconds / min(seconds):.1%} ({work_seconds / statistics.median(seconds):.1%})"


SCHEDULES: Final[tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...]] = (
    ("interleaved", {}, ("1F1B",)),
    ("2 virtual stages", {"virtual_pipeline_degree": 2}, ("interleaved 1F1B",)),
    ("zero bubble", {"pipeline": "zero_bubble"}, ("interleaved zero bubble", "ZBV zero bubble")),
)
"""Name and configuration of smpkit's schedules, and those of torch that run in turns with each."""


def schedules_cells(counts: Sequence[int], repetitions: int) -> list[Cell]:
    """Time every kind of schedule on two half layers per rank, whose backward can be split."""
    results = []
    for count in counts:
        times: Times = {}
        for name, more, theirs in SCHEDULES:
            half = partial(HalvedSleepLayer, SMALL // 4)
            times |= timed(sleeping(count, half, 2, theirs, f"smpkit {name}", **more), repetitions)
        results.append({"size": smp.size(), "count": count, "times": times})
    return results


def schedules_table(cells: Sequence[Cell]) -> str:
    """Return a row per contestant: percent of a step in which a rank computes, from the fastest and the median step."""
    work = [cell["count"] * (FORWARD_SECONDS + BACKWARD_SECONDS) for cell in cells]
    rows = [
        [name, *[share(seconds, cell["times"][name]) for seconds, cell in zip(work, cells, strict=True)]]
        for name in cells[0]["times"]
    ]
    return table(["", *[f"P = {cell['size']}, M = {cell['count']}" for cell in cells]], rows)


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
    median = {f"{name}, median, µs": statistics.median(each) for name, each in times.items()}
    return median | {f"{name}, fastest, µs": min(each) for name, each in times.items()}


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

    def step(run: Any, loss_of: Callable[[Tensor, Tensor], Tensor]) -> None:
        shape = size.num_microbatches * size.microbatch_size, size.context
        tokens = torch.randint(size.vocabulary, shape, generator=generator)
        labels = tokens.masked_fill(torch.rand(shape, generator=generator) < 0.5, IGNORED)
        model.zero_grad()
        run(model, loss_of, tokens, labels)

    losses = {"masked": masked_loss, "unmasked": gpt_loss}
    times = timed({name: partial(step, smp.step(train), loss_of) for name, loss_of in losses.items()}, repetitions)
    median = {f"{name}, median": 1 / statistics.median(each) for name, each in times.items()}
    return median | {f"{name}, fastest": 1 / min(each) for name, each in times.items()}


if __name__ == "__main__":
    sys.exit(main())
