"""Train with smpkit's data parallelism and with torch's in turns on the same model; write the table of README.md."""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import smpkit.torch as smp
from benchmarks.common import machine, on_ranks, parser, prepare_rank, ratio, report, table, take_turns
from smpkit.torch.core.devices import wait_for_stream
from smpkit.torch.core.runtime import state

WARM_UPS: Final = 5
LENGTH: Final = 32
LR: Final = 1e-3
SIZES: Final = {"small": (64, 4, 4), "medium": (96, 4, 12), "large": (256, 6, 8)}
"""Width, layers and samples of each rank."""

Step = Callable[[], torch.Tensor]
Wrapped = tuple[nn.Module, torch.optim.Optimizer]


class Model(nn.Module):
    """Transformer layers between two linear ones."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(width, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(num_layers)
        )
        self.outputs = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inputs(x)
        for layer in self.layers:
            x = layer(x)
        return self.outputs(x)


# --- smpkit's features, and torch's for the same ----------------------------------------------------------------------


def plain(model: nn.Module) -> Wrapped:
    return model, torch.optim.AdamW(model.parameters(), LR)


def replicated(model: nn.Module) -> Wrapped:
    return plain(DistributedDataParallel(model))


def with_sharded_states(model: nn.Module) -> Wrapped:
    wrapped = DistributedDataParallel(model)
    return wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=LR)


def sharded(model: Any) -> Wrapped:
    mesh = init_device_mesh(state.device.type, (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return plain(fully_shard(model, mesh=mesh))


FEATURES: Final[Mapping[str, tuple[int, dict[str, Any], str, Callable[[nn.Module], Wrapped]]]] = {
    "one process": (1, {}, "plain PyTorch", plain),
    "data parallelism": (2, {"ddp": True}, "DistributedDataParallel", replicated),
    "sharded optimizer state": (
        2,
        {"ddp": True, "shard_optimizer_state": True},
        "the same with ZeroRedundancyOptimizer",
        with_sharded_states,
    ),
    "sharded data parallelism": (
        2,
        {"ddp": True, "sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0},
        "fully_shard",
        sharded,
    ),
}
"""Ranks, parameters, and its peer."""


@smp.step
def _train(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    model.backward(loss)
    return loss


def smpkit_step(module: nn.Module, x: torch.Tensor) -> Step:
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), LR))

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = _train(model, x).reduce_mean()
        optimizer.step()
        return loss

    return step


def torch_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Step:
    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


# --- the measurement --------------------------------------------------------------------------------------------------


def measure(feature: str, sizes: Sequence[str], repetitions: int) -> list[dict[str, Any]]:
    """Measure one feature and its peer in turns, on the same weights and batches."""
    prepare_rank()
    _, parameters, peer, wrap = FEATURES[feature]
    cells = []
    for size in sizes:
        smp.shutdown()
        smp.init(dict(parameters))
        width, num_layers, samples = SIZES[size]
        torch.manual_seed(0)
        model = Model(width, num_layers)
        torch.manual_seed(1 + smp.rank())
        x = torch.randn(samples, LENGTH, width).to(state.device)
        theirs = torch_step(*wrap(copy.deepcopy(model).to(state.device)), x)
        steps = {peer: theirs, "smpkit": smpkit_step(model, x)}
        for _ in range(WARM_UPS):  # also for the bits: both train the same model
            torch.testing.assert_close(*[step() for step in steps.values()])
        times = take_turns({name: partial(timed, step) for name, step in steps.items()}, repetitions)
        cells.append({"feature": feature, "size": size, "peer": peer, "times": times})
    return cells


def timed(step: Step) -> tuple[float, float]:
    """Return the seconds from a barrier until the last rank is done, and the mean processor time of all its threads."""
    if smp.size() > 1:
        dist.barrier()
    start, computed = time.perf_counter(), time.process_time()
    step()
    wait_for_stream(state.device)
    seconds = torch.tensor([time.perf_counter() - start, time.process_time() - computed], dtype=torch.float64)
    if smp.size() > 1:
        dist.all_reduce(seconds[:1], dist.ReduceOp.MAX)
        dist.all_reduce(seconds[1:], dist.ReduceOp.SUM)
    return seconds[0].item(), seconds[1].item() / smp.size()


def row(cell: Mapping[str, Any]) -> list[object]:
    """Return times and their ratio, and the ratio of processor times."""
    (theirs, their_cpu), (ours, our_cpu) = (zip(*cell["times"][name], strict=True) for name in (cell["peer"], "smpkit"))
    both = [f"{statistics.median(times) * 1e3:.1f} ms" for times in (theirs, ours)]
    processor = f"{statistics.median(our_cpu) / statistics.median(their_cpu):.3f}"
    return [cell["feature"], cell["size"], cell["peer"], *both, ratio(ours, theirs, digits=3), processor]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__, repetitions=200)
    options.add_argument("--sizes", nargs="+", default=[*SIZES], choices=[*SIZES], help="of models (default: all)")
    chosen = options.parse_args(arguments)
    sizes, repetitions = (["small"], 3) if chosen.quick else (chosen.sizes, chosen.repetitions)
    cells = [
        cell for name, (ranks, *_) in FEATURES.items() for cell in on_ranks(measure, ranks, name, sizes, repetitions)[0]
    ]
    heads = ["feature", "model", "peer", "peer's step", "smpkit's step", "ratio of medians (fastest)"]
    text = table([*heads, "of processor time"], map(row, cells))
    about = f"{repetitions} steps each, gloo over the loopback interface, {machine()}"
    report(Path(__file__).with_name("README.md"), "table", f"{text}\n\n{about}", chosen, cells)
    return 0


if __name__ == "__main__":
    sys.exit(main())
