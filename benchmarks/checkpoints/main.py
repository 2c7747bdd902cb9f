"""What a save costs training: smpkit's, blocking and in the background, beside torch.distributed.checkpoint's."""

from __future__ import annotations

import argparse
import operator
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import async_save, save

import smpkit.torch as smp
from benchmarks.common import mebibytes, milliseconds, parser, run, table, take_turns
from benchmarks.ranks import on_ranks, train_on_squares

STEPS = 10
NO_SAVE = "no save"

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


def measure(folder: Path, width: int, num_layers: int, turns: int) -> tuple[dict[str, list[tuple[float, ...]]], int]:
    """Return for each contestant and turn: seconds in the call, and of ten steps with the end of the save; and bytes.

    The third figure is CPU seconds of both ranks, all threads. All save into one folder, as a training does.
    """
    smp.init({"ddp": True, "sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0})
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(width, 4, dropout=0.0, batch_first=True) for _ in range(num_layers)]
    model = smp.DistributedModel(nn.Sequential(*layers))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    x = torch.randn(4, 32, width)

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
    return take_turns({name: partial(turn, save) for name, save in saves.items()}, turns), _bytes(model, optimizer)


def _empty(folder: Path) -> None:
    """Remove what a turn has saved, before the next one begins."""
    if smp.rank() == 0:
        for saved in folder.iterdir():
            shutil.rmtree(saved) if saved.is_dir() else saved.unlink()
    dist.barrier()


def _bytes(model: Any, optimizer: Any) -> int:
    states = [model.local_state_dict(), *optimizer.local_state_dict()["state"].values()]
    tensors = [value for values in states for value in values.values() if isinstance(value, torch.Tensor)]
    return sum(getattr(tensor, "to_local", lambda tensor=tensor: tensor)().nbytes for tensor in tensors)


def saves(options: argparse.Namespace) -> tuple[str, object]:
    """Return medians; costs are differences to the ten steps without a save of the same turn."""
    width, num_layers = (64, 2) if options.quick else (256, 4)
    with tempfile.TemporaryDirectory() as folder:
        times, num_bytes = on_ranks(measure, 2, Path(folder), width, num_layers, options.repetitions)[0]
    by_name = {name: [*zip(*turns, strict=True)] for name, turns in times.items()}  # held, spent, CPU
    _, plain, plain_cpu = by_name.pop(NO_SAVE)

    def more(ours: Sequence[float], base: Sequence[float]) -> str:
        return milliseconds(map(operator.sub, ours, base))

    rows = [
        [name, milliseconds(held), more(spent, plain), more(cpu, plain_cpu)]
        for name, (held, spent, cpu) in by_name.items()
    ]
    heads = [f"save of {mebibytes(num_bytes)} on each rank", "held", "cost of ten steps", "the same in CPU time"]
    others = {"blocking": "smpkit, blocking", "`async_save`": "torch.distributed.checkpoint.async_save"}
    ours = by_name["smpkit, blocking=False"][0]
    medians = {who: statistics.median(map(operator.truediv, ours, by_name[name][0])) for who, name in others.items()}
    ratios = [f"`blocking=False` beside {who}: held {median:.2f} ×" for who, median in medians.items()]
    without = f"{milliseconds(plain)}, {milliseconds(plain_cpu)} of CPU time"
    summary = f"{'; '.join(ratios)} (medians of ratios in a turn). Ten steps without a save: {without}."
    return f"{table(heads, rows)}\n\n{summary}", times


if __name__ == "__main__":
    run(__file__, parser(__doc__, repetitions=5), {"table": saves}, about="Medians of {repetitions} turns, ")
