"""What a save costs training: smpkit's, blocking and in the background, beside torch.distributed.checkpoint's."""

from __future__ import annotations

import argparse
import operator
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import async_save, save

import smpkit.torch as smp

HERE = Path(__file__).parent
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
STEPS = 10
NO_SAVE = "no save"

Save = Callable[[Path], Callable[[], object]]
"""Saves, or starts to; returns what waits for the end."""


@smp.step
def _train(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    model.backward(loss)
    return loss


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
        wait: Callable[[], object] = response.result
        return wait

    return {
        "smpkit, blocking": lambda folder: ours(folder, blocking=True),
        "torch.distributed.checkpoint.save": theirs,
        "smpkit, blocking=False": lambda folder: ours(folder, blocking=False),
        "torch.distributed.checkpoint.async_save": theirs_in_background,
    }


def measure(width: int, num_layers: int, turns: int) -> dict[str, Any]:
    """Return for each contestant, in each turn: seconds in the call, and of ten steps with the end of the save.

    CPU seconds are of both ranks, all threads.
    """
    smp.init({"ddp": True, "sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0})
    model, optimizer, x = _made(width, num_layers)

    def steps() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            _train(model, x)
            optimizer.step()

    steps()
    saves = contestants(model, optimizer)
    names = [NO_SAVE, *saves]
    found: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in names} for kind in ("held", "spent", "cpu")}
    for turn in range(turns + 1):
        for name in names if turn % 2 else reversed(names):  # so that nobody is always after the same one
            folder = _common_folder()
            start, cpu = time.perf_counter(), time.process_time()
            end = saves[name](folder) if name in saves else lambda: None
            called = time.perf_counter() - start
            steps()
            end()
            slowest = _reduced(dist.ReduceOp.MAX, called, time.perf_counter() - start)
            total = _reduced(dist.ReduceOp.SUM, time.process_time() - cpu)
            if smp.rank() == 0:
                shutil.rmtree(folder)
            for kind, seconds in zip(found, (*slowest, *total), strict=True):
                if turn:  # the first one warms up
                    found[kind][name].append(seconds)
    size = _sizes(model, optimizer)
    smp.shutdown()
    return {**found, "MiB": size}


def measure_replicas(width: int, num_layers: int, turns: int) -> str:
    """Return a row about ranks that hold the same: how much that is, how much the busiest one writes, and how long."""
    smp.init({"ddp": True})
    model, optimizer, x = _made(width, num_layers)
    _train(model, x)
    optimizer.step()
    written, seconds = 0.0, list[float]()
    for turn in range(turns + 1):
        folder = _common_folder()
        start = time.perf_counter()
        smp.save_checkpoint(folder, "step")
        (slowest,) = _reduced(dist.ReduceOp.MAX, time.perf_counter() - start)
        own = sum(path.stat().st_size for path in (folder / "step_partial").glob(f"*_0_0_{smp.rank()}.*"))
        (written,) = _reduced(dist.ReduceOp.MAX, own / 2**20)
        if smp.rank() == 0:
            shutil.rmtree(folder)
        if turn:
            seconds.append(slowest)
    size = _sizes(model, optimizer)
    smp.shutdown()
    milliseconds = statistics.median(seconds) * 1e3
    return f"| {os.environ['WORLD_SIZE']} | {size:.0f} MiB | {written:.1f} MiB | {milliseconds:.0f} ms |"


def _made(width: int, num_layers: int) -> tuple[Any, Any, torch.Tensor]:
    """Return a model, its optimizer and a batch."""
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(width, 4, dropout=0.0, batch_first=True) for _ in range(num_layers)]
    model = smp.DistributedModel(nn.Sequential(*layers))
    return model, smp.DistributedOptimizer(torch.optim.AdamW(model.parameters())), torch.randn(4, 32, width)


def _common_folder() -> Path:
    names = [tempfile.mkdtemp() if smp.rank() == 0 else None]
    dist.broadcast_object_list(names)
    return Path(str(names[0]))


def _reduced(how: Any, *seconds: float) -> list[float]:
    values = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(values, how)
    return [float(each) for each in values]


def _sizes(model: Any, optimizer: Any) -> float:
    states = [model.local_state_dict(), *optimizer.local_state_dict()["state"].values()]
    tensors = [each for values in states for each in values.values() if isinstance(each, torch.Tensor)]
    return sum(getattr(each, "to_local", lambda each=each: each)().nbytes for each in tensors) / 2**20


def table(found: Mapping[str, Any]) -> str:
    """Return the medians; costs are differences to the ten steps without a save of the same turn."""

    def median(kind: str, name: str, *, less: str | None = None) -> float:
        values = found[kind][name]
        others = found[kind][less] if less else [0.0] * len(values)
        return statistics.median(value - other for value, other in zip(values, others, strict=True))

    lines = [
        f"| save of {found['MiB']:.0f} MiB on each rank | held | cost of ten steps | the same in CPU time |",
        "|---|---|---|---|",
    ]
    for name in list(found["held"])[1:]:
        times = [median("held", name), *(median(kind, name, less=NO_SAVE) for kind in ("spent", "cpu"))]
        lines.append(f"| {name} | {' | '.join(f'{seconds * 1e3:.0f} ms' for seconds in times)} |")
    ours = found["held"]["smpkit, blocking=False"]
    others = {"blocking": "smpkit, blocking", "`async_save`": "torch.distributed.checkpoint.async_save"}
    ratios = []
    for told, name in others.items():
        ratio = statistics.median(map(operator.truediv, ours, found["held"][name]))
        ratios.append(f"`blocking=False` beside {told}: held {ratio:.2f} ×")
    plain, cpu = median("spent", NO_SAVE), median("cpu", NO_SAVE)
    without = f"Ten steps without a save: {plain * 1e3:.0f} ms, {cpu * 1e3:.0f} ms of CPU time."
    return "\n".join([*lines, "", f"{'; '.join(ratios)} (medians of ratios in a turn). {without}"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model, once; the README stays as it is")
    parser.add_argument("--dry", action="store_true", help="the README stays as it is")
    parser.add_argument("--turns", type=int, default=5, help="of each contestant (default: %(default)s)")
    parser.add_argument("--replicas", type=int, help="print a row about so many ranks that hold the same instead")
    options = parser.parse_args(arguments)
    if "WORLD_SIZE" not in os.environ:
        ranks = f"--nproc-per-node={options.replicas or 2}"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", ranks, "--module"]
        os.execv(sys.executable, [*torchrun, "benchmarks.checkpoints.main", *(arguments or sys.argv[1:])])
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch")
    width, num_layers, turns = (64, 2, 1) if options.quick else (256, 4, options.turns)
    if options.replicas:
        row = measure_replicas(width, num_layers, turns)
        if os.environ["RANK"] == "0":
            print(row)
        return 0
    found = measure(width, num_layers, turns)
    if os.environ["RANK"] != "0":
        return 0
    about = (
        f"Medians of {turns} turns, {os.cpu_count()} cores ({platform.machine()}), load average"
        f" {os.getloadavg()[1]:.1f}; Python {platform.python_version()}, torch {torch.__version__}."
    )
    text = f"{table(found)} {about}"
    print(text)
    if not (options.quick or options.dry):
        readme = HERE / "README.md"
        before, _, rest = readme.read_text().partition(BEGIN)
        readme.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
