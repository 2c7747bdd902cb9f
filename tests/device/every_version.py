"""What `test_versions` runs with each torch: training under every policy, and a process group of two ranks."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional

from smpkit.testing import simulated_device


def train() -> None:
    for policy in simulated_device.POLICIES:
        with simulated_device.no_races(policy, 1):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.LayerNorm(16), nn.Linear(16, 4)).to("sim")
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(2):
                labels = torch.tensor([0, 1, 2, 3, 0], device="sim")
                functional.cross_entropy(model(torch.randn(5, 8, device="sim")), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
            with torch.autocast("sim", torch.bfloat16):
                model(torch.randn(5, 8, device="sim")).sum().item()


def find() -> None:
    simulated_device.set_policy("lazy")
    side, x = torch.Stream("sim"), torch.zeros(100, device="sim")
    with side:
        x.add_(1)
    x.mul_(2)
    assert simulated_device.races()


def communicate(rank: int, file: str) -> None:
    simulated_device.load()
    dist.init_process_group("cpu:gloo,sim:sim", init_method=f"file://{file}", rank=rank, world_size=2)
    with simulated_device.no_races("random", 1):
        x = torch.ones(100, device="sim")
        dist.all_reduce(x)
        assert x.sum().item() == 200
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    simulated_device.load()
    train()
    find()
    mp.spawn(communicate, (sys.argv[1],), nprocs=2)  # type: ignore[attr-defined]
    sys.stdout.write(f"{torch.__version__}\n")
