"""Train with smpkit's data parallelism and with torch's in turns on the same model; write the table of README.md."""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import smpkit.torch as smp
from benchmarks.common import milliseconds, parser, ratio, report, table, take_turns
from benchmarks.ranks import on_ranks, train_on_squares
from smpkit.torch.core.devices import wait_for_stream
from smpkit.torch.core.runtime import state

WARM_UPS: Final = 5
LENGTH: Final = 32
LR: Final = 1e-3
SIZES: Final = {"small": (64, 4, 4), "medium": (96, 4, 12), "large": (256, 6, 8)}
"""Width, layers and samples of each rank."""

Step = Callable[[], torch.Tensor]
Wrapped = tuple[nn.Module, torch.optim.Optimizer]


def transformer(width: int, num_layers: int) -> nn.Sequential:
    """Return transformer layers between two linear ones."""
    layer = partial(nn.TransformerEncoderLayer, width, 4, 4 * width, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Linear(width, width), *[layer() for _ in range(num_layers)], nn.Linear(width, width))


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
    for layer in model[1:-1]:
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


def step_of(run: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer) -> Step:
    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = run()
        optimizer.step()
        return loss

    return step


def run_torch(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    loss.backward()
    return loss.detach()


def run_smpkit(model: smp.DistributedModel, x: torch.Tensor) -> torch.Tensor:
    return train_on_squares(model, x).reduce_mean()


# --- the measurement --------------------------------------------------------------------------------------------------


def measure(feature: str, sizes: Sequence[str], repetitions: int) -> list[dict[str, Any]]:
    """Measure one feature and its peer in turns, on the same weights and batches."""
    _, parameters, peer, wrap = FEATURES[feature]
    cells = []
    for size in sizes:
        smp.shutdown()
        smp.init(dict(parameters))
        width, num_layers, samples = SIZES[size]
        torch.manual_seed(0)
        model = transformer(width, num_layers)
        torch.manual_seed(1 + smp.rank())
        x = torch.randn(samples, LENGTH, width).to(state.device)
        theirs, optimizer = wrap(copy.deepcopy(model).to(state.device))
        ours = smp.DistributedModel(model)
        steps = {
            peer: step_of(partial(run_torch, theirs, x), optimizer),
            "smpkit": step_of(partial(run_smpkit, ours, x), smp.DistributedOptimizer(plain(ours)[1])),
        }
        for _ in range(WARM_UPS):  # also for the bits: both train the same model
            torch.testing.assert_close(*[step() for step in steps.values()])
        times = take_turns({name: partial(timed, step) for name, step in steps.items()}, repetitions)
        cells.append({"feature": feature, "size": size, "peer": peer, "times": times})
    return cells


def timed(step: Step) -> tuple[float, float]:
    """Return the seconds from a barrier until the last rank is done, and the mean processor time of all its threads."""
    dist.barrier()
    start, computed = time.perf_counter(), time.process_time()
    step()
    wait_for_stream(state.device)
    wall = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    processor = torch.tensor(time.process_time() - computed, dtype=torch.float64)
    dist.all_reduce(wall, dist.ReduceOp.MAX)
    dist.all_reduce(processor)
    return wall.item(), processor.item() / smp.size()


def row(cell: Mapping[str, Any]) -> list[object]:
    """Return times and their ratio, and the ratio of processor times."""
    (theirs, their_cpu), (ours, our_cpu) = (zip(*cell["times"][name], strict=True) for name in (cell["peer"], "smpkit"))
    both = [milliseconds(times, digits=1) for times in (theirs, ours)]
    processor = f"{statistics.median(our_cpu) / statistics.median(their_cpu):.3f}"
    return [cell["feature"], cell["size"], cell["peer"], *both, ratio(ours, theirs, digits=3), processor]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__, repetitions=200).parse_args(arguments)
    sizes, repetitions = (["small"], 3) if options.quick else ([*SIZES], options.repetitions)
    cells = [
        cell for name, (ranks, *_) in FEATURES.items() for cell in on_ranks(measure, ranks, name, sizes, repetitions)[0]
    ]
    heads = ["feature", "model", "peer", "peer's step", "smpkit's step", "ratio of medians (fastest)"]
    text = table([*heads, "of processor time"], map(row, cells))
    about = f"{repetitions} steps each, gloo over the loopback interface, "
    report(__file__, "table", text, options, cells, about)
    return 0


if __name__ == "__main__":
    sys.exit(main())
