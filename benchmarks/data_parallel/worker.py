"""One rank of the benchmark: train with smpkit and with torch in turns; rank 0 writes the times (see main.py)."""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import smpkit.torch as smp
from smpkit.torch.core.devices import wait_for_stream
from smpkit.torch.core.runtime import state

WARM_UPS = 5
LENGTH = 32
LR = 1e-3

SIZES: Mapping[str, tuple[int, int, int]] = {"small": (64, 4, 4), "medium": (96, 4, 12), "large": (256, 6, 8)}
"""Width, layers and samples of each rank."""

FEATURES: Mapping[str, Mapping[str, Any]] = {
    "one process": {},
    "data parallelism": {"ddp": True},
    "sharded optimizer state": {"ddp": True, "shard_optimizer_state": True},
    "sharded data parallelism": {"ddp": True, "sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0},
}
"""The parameters that turn each on; its peer is in `PEERS`."""

Step = Callable[[], torch.Tensor]
Shards = Callable[[nn.Module, nn.ModuleList], tuple[nn.Module, torch.optim.Optimizer]]


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
        result: torch.Tensor = self.outputs(x)
        return result


def _plain(model: nn.Module, _: nn.ModuleList) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, torch.optim.AdamW(model.parameters(), LR)


def _ddp(model: nn.Module, _: nn.ModuleList) -> tuple[nn.Module, torch.optim.Optimizer]:
    return _plain(DistributedDataParallel(model), _)


def _zero(model: nn.Module, _: nn.ModuleList) -> tuple[nn.Module, torch.optim.Optimizer]:
    wrapped = DistributedDataParallel(model)
    return wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=LR)


def _fully_shard(model: nn.Module, layers: nn.ModuleList) -> tuple[nn.Module, torch.optim.Optimizer]:
    mesh = init_device_mesh(state.device.type, (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _plain(model, layers)


PEERS: Mapping[str, tuple[str, Shards]] = {
    "one process": ("plain PyTorch", _plain),
    "data parallelism": ("DistributedDataParallel", _ddp),
    "sharded optimizer state": ("the same with ZeroRedundancyOptimizer", _zero),
    "sharded data parallelism": ("fully_shard", _fully_shard),
}


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


def torch_step(module: Model, wrap: Shards, x: torch.Tensor) -> Step:
    model, optimizer = wrap(module, module.layers)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def cell(feature: str, size: str, repetitions: int) -> dict[str, Any]:
    """Measure one feature and its peer in turns, on the same weights and batches."""
    smp.shutdown()
    smp.init(dict(FEATURES[feature]))
    width, num_layers, samples = SIZES[size]
    torch.manual_seed(0)
    plain = Model(width, num_layers)
    torch.manual_seed(1 + smp.rank())
    x = torch.randn(samples, LENGTH, width).to(state.device)
    peer, wrap = PEERS[feature]
    steps = {peer: torch_step(copy.deepcopy(plain).to(state.device), wrap, x), "smpkit": smpkit_step(plain, x)}
    for _ in range(WARM_UPS):  # also for the bits: both train the same model
        losses = [step() for step in steps.values()]
        torch.testing.assert_close(*losses)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    for repetition in range(repetitions):
        # In the order A B B A: a step finds the caches as another step of its own has left them as often as its peer's.
        for name in list(steps)[:: 1 if repetition % 2 else -1]:
            took, computed = timed(steps[name])
            seconds[name].append(took)
            cpu[name].append(computed)
    return {"feature": feature, "size": size, "peer": peer, "seconds": seconds, "cpu": cpu}


def timed(step: Step) -> tuple[float, float]:
    """Return the seconds from a barrier until the last rank is done, and the mean processor time of all its threads."""
    if smp.size() > 1:
        dist.barrier()
    start, computed = time.perf_counter(), time.process_time()
    step()
    wait_for_stream(state.device)
    seconds = torch.tensor([time.perf_counter() - start, time.process_time() - computed])
    if smp.size() > 1:
        dist.all_reduce(seconds[:1], dist.ReduceOp.MAX)
        dist.all_reduce(seconds[1:], dist.ReduceOp.SUM)
    return seconds[0].item(), seconds[1].item() / smp.size()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repetitions", type=int, required=True)
    parser.add_argument("--sizes", nargs="+", required=True)
    parser.add_argument("--features", nargs="+", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    cells = [cell(feature, size, options.repetitions) for feature in options.features for size in options.sizes]
    if smp.rank() == 0:
        about = {"load": os.getloadavg()[1], "torch": torch.__version__}
        options.out.write_text(json.dumps({"cells": cells, **about}))
    smp.shutdown()


if __name__ == "__main__":
    main()
