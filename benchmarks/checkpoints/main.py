"""What a save costs training: smpkit's, blocking and in the background, beside torch.distributed.checkpoint's."""

from __future__ import annotations

import operator
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import async_save, save

import smpkit.torch as smp
from benchmarks.common import milliseconds, parser, report, table, take_turns
from benchmarks.ranks import on_ranks, train_on_squares

STEPS = 10
NO_SAVE = "no save"
REPLICAS = ("ranks", "each holds", "the busiest writes", "a blocking save")

Save = Callable[[Path], Callable[[], object]]
"""Saves, or starts to; returns what waits for the end."""


def contestants(model: Any, optimizer: Any) -> dict[str, Save]:
    """Return the ways to save, by name; each saves this rank's parts of weights and optimizer states."""

    # Its thread's collectives must not meet those of training.
    group = dist.new_group(backend="gloo")

    def ours(folder: Path, *, blocking: bool) -> Callable[[], object]:
        pending = smp.save_checkpoint(folder, "step", blocking=blocking)
        return (lambda: None) if pending is None else pending.wait

    def parts() -> dict[str, Any]:
        mine = {"model": model.local_state_dict(), "optimizer": optimizer.local_state_dict()}
        return {f"rank {smp.rank()}": mine}  # a name for each rank, or the planner would save equal names once

    def theirs(folder: Path) -> Callable[[], object]:
        save(parts(), checkpoint_id=str(folder / "step"))
        return lambda: None

    def theirs_in_background(folder: Path) -> Callable[[], object]:
        response: Any = async_save(parts(), checkpoint_id=str(folder / "step"), process_group=group)
        return response.result

    return {
        "smpkit, blocking": lambda folder: ours(folder, blocking=True),
        "torch.distributed.checkpoint.save": theirs,
        "smpkit, blocking=False": lambda folder: ours(folder, blocking=False),
        "torch.distributed.checkpoint.async_save": theirs_in_background,
    }


def measure(folder: Path, width: int, num_layers: int, turns: int) -> dict[str, Any]:
    """Return for each contestant and turn: seconds in the call, and of ten steps with the end of the save.

    The third figure is CPU seconds of both ranks, all threads. All save into one folder, as a training does.
    """
    smp.init({"ddp": True, "sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0})
    model, optimizer, x = _made(width, num_layers)

    def turn(save: Save) -> tuple[float, ...]:
        start, cpu = time.perf_counter(), time.process_time()
        end = save(folder)
        held = time.perf_counter() - start
        for _ in range(STEPS):
            optimizer.zero_grad()
            train_on_squares(model, x)
            optimizer.step()
        end()
        slowest = torch.tensor([held, time.perf_counter() - start], dtype=torch.float64)
        both = torch.tensor(time.process_time() - cpu, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        dist.all_reduce(both)
        _empty(folder)
        return (*slowest.tolist(), both.item())

    saves: dict[str, Save] = {NO_SAVE: lambda _: lambda: None}
    turn(saves[NO_SAVE])  # makes the optimizer's states
    saves |= contestants(model, optimizer)
    times = take_turns({name: partial(turn, save) for name, save in saves.items()}, turns)
    return {"times": times, "MiB": _sizes(model, optimizer)}


def measure_replicas(folder: Path, width: int, num_layers: int, turns: int) -> list[str]:
    """Return a row about ranks that hold the same: how much that is, how much the busiest one writes, and how long."""
    smp.init({"ddp": True})
    model, optimizer, x = _made(width, num_layers)
    train_on_squares(model, x)
    optimizer.step()

    def turn() -> tuple[float, ...]:
        start = time.perf_counter()
        smp.save_checkpoint(folder, "step")
        seconds = time.perf_counter() - start
        own = sum(path.stat().st_size for path in (folder / "step_partial").glob(f"*_0_0_{smp.rank()}.*"))
        most = torch.tensor([own / 2**20, seconds], dtype=torch.float64)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        _empty(folder)
        return tuple(most.tolist())

    written, seconds = zip(*take_turns({"": turn}, turns)[""], strict=True)
    sizes = f"{_sizes(model, optimizer):.0f} MiB", f"{max(written):.1f} MiB"
    return [str(smp.size()), *sizes, milliseconds(seconds)]


def _made(width: int, num_layers: int) -> tuple[Any, Any, torch.Tensor]:
    """Return a model, its optimizer and a batch."""
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(width, 4, dropout=0.0, batch_first=True) for _ in range(num_layers)]
    model = smp.DistributedModel(nn.Sequential(*layers))
    return model, smp.DistributedOptimizer(torch.optim.AdamW(model.parameters())), torch.randn(4, 32, width)


def _empty(folder: Path) -> None:
    """Remove what a turn has saved, before the next one begins."""
    if smp.rank() == 0:
        for saved in folder.iterdir():
            shutil.rmtree(saved) if saved.is_dir() else saved.unlink()
    dist.barrier()


def _sizes(model: Any, optimizer: Any) -> float:
    states = [model.local_state_dict(), *optimizer.local_state_dict()["state"].values()]
    tensors = [each for values in states for each in values.values() if isinstance(each, torch.Tensor)]
    return sum(getattr(each, "to_local", lambda each=each: each)().nbytes for each in tensors) / 2**20


def text_of(found: Mapping[str, Any]) -> str:
    """Return the medians; costs are differences to the ten steps without a save of the same turn."""
    by_name = {name: [*zip(*turns, strict=True)] for name, turns in found["times"].items()}  # held, spent, CPU
    _, plain, plain_cpu = by_name.pop(NO_SAVE)

    def more(ours: Sequence[float], base: Sequence[float]) -> str:
        return milliseconds(map(operator.sub, ours, base))

    rows = [
        [name, milliseconds(held), more(spent, plain), more(cpu, plain_cpu)]
        for name, (held, spent, cpu) in by_name.items()
    ]
    heads = [f"save of {found['MiB']:.0f} MiB on each rank", "held", "cost of ten steps", "the same in CPU time"]
    others = {"blocking": "smpkit, blocking", "`async_save`": "torch.distributed.checkpoint.async_save"}
    ours = by_name["smpkit, blocking=False"][0]
    medians = {who: statistics.median(map(operator.truediv, ours, by_name[name][0])) for who, name in others.items()}
    ratios = [f"`blocking=False` beside {who}: held {median:.2f} ×" for who, median in medians.items()]
    without = f"{milliseconds(plain)}, {milliseconds(plain_cpu)} of CPU time"
    summary = f"{'; '.join(ratios)} (medians of ratios in a turn). Ten steps without a save: {without}."
    return f"{table(heads, rows)}\n\n{summary}"


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = parser(__doc__, repetitions=5)
    parsed.add_argument("--replicas", type=int, metavar="RANKS", help="print a row about ranks that hold the same")
    options = parsed.parse_args(arguments)
    width, num_layers, turns = (64, 2, 1) if options.quick else (256, 4, options.repetitions)
    with tempfile.TemporaryDirectory() as name:
        if options.replicas:
            row = on_ranks(measure_replicas, options.replicas, Path(name), width, num_layers, turns)[0]
            print(table(REPLICAS, [row]))
            return 0
        found = on_ranks(measure, 2, Path(name), width, num_layers, turns)[0]
    report(__file__, "table", f"{text_of(found)} Medians of {turns} turns.", options, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
