"""Train with smpkit's data parallelism and with torch's in turns on the same model; write the table of README.md."""

from __future__ import annotations

import argparse
import copy
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
from benchmarks.common import milliseconds, parser, ratio, run, table
from benchmarks.ranks import OVER_GLOO, WARM_UPS, on_ranks, time_steps, train_on_squares
from smpkit.torch.core.runtime import state

LENGTH: Final = 32
LR: Final = 1e-3
SIZES: Final = {"small": (64, 4, 4), "medium": (96, 4, 12), "large": (256, 6, 8)}
"""Width, layers and samples of each rank."""

Wrapped = tuple[nn.Module, torch.optim.Optimizer]


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


def transformer(width: int, num_layers: int) -> nn.Sequential:
    """Return transformer layers between two linear ones."""
    layer = partial(nn.TransformerEncoderLayer, width, 4, 4 * width, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Linear(width, width), *[layer() for _ in range(num_layers)], nn.Linear(width, width))


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
        theirs, their_optimizer = wrap(copy.deepcopy(model).to(state.device))
        ours = smp.DistributedModel(model)
        our_optimizer = smp.DistributedOptimizer(plain(ours)[1])
        steps = {peer: partial(torch_step, theirs, their_optimizer, x), "smpkit": partial(step, ours, our_optimizer, x)}
        for _ in range(WARM_UPS):  # also for the bits: both train the same model
            torch.testing.assert_close(*[run_step() for run_step in steps.values()])
        times = time_steps(steps, repetitions, warm_ups=1)
        cells.append({"feature": feature, "size": size, "peer": peer, "times": times})
    return cells


def torch_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def step(model: smp.DistributedModel, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = train_on_squares(model, x).reduce_mean()
    optimizer.step()
    return loss


def steps(options: argparse.Namespace) -> tuple[str, object]:
    """Return a row per feature and size."""
    sizes = ["small"] if options.quick else [*SIZES]
    cells, rows = [], []
    for feature, (ranks, _, peer, _) in FEATURES.items():
        for cell in on_ranks(measure, ranks, feature, sizes, options.repetitions)[0]:
            theirs, ours = cell["times"].values()
            both = [milliseconds(times, digits=1) for times in (theirs, ours)]
            rows.append([feature, cell["size"], peer, *both, ratio(ours, theirs, digits=3)])
            cells.append(cell)
    heads = ["feature", "model", "peer", "peer's step", "smpkit's step", "ratio of medians (fastest)"]
    return table(heads, rows), cells


if __name__ == "__main__":
    run(__file__, parser(__doc__, repetitions=200), {"table": steps}, about=OVER_GLOO)
