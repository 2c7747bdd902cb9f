"""Sharded optimizer states and sharded data parallelism go with tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import smpkit.torch as smp
from tests.ranks import run_ranks

STEPS, CLIP = 4, 1.0
CASES: list[dict[str, Any]] = [
    {"shard_optimizer_state": True},
    {"shard_optimizer_state": True, "prescaled_batch": True},
    {"sharded_data_parallel_degree": 2, "prescaled_batch": True, "sdp_gradient_clipping": 0.0},
]


class Net(nn.Module):
    """Blocks, and an ordinary head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return torch.as_tensor(self.head(x))


def batch(step: int) -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


@smp.step
def train_step(model: Any, x: Tensor) -> None:
    model.backward(model(x).square().mean())


def train(config: dict[str, Any]) -> dict[str, Tensor]:
    smp.init({"ddp": True, "tensor_parallel_degree": 2, **config})
    net = Net().double()
    for block in net.blocks:
        smp.set_tensor_parallelism(block)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.05))
    prescaled = config.get("prescaled_batch", False)
    first, count = (smp.rdp_rank(), smp.rdp_size()) if prescaled else (smp.dp_rank(), smp.dp_size())
    for step in range(STEPS):
        if step == STEPS - 1:  # what was saved, in parts or whole, is what there was
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.load_state_dict(optimizer.local_state_dict())
            model.load_state_dict(model.state_dict())
        optimizer.zero_grad()
        train_step(model, batch(step)[first::count])
        smp.clip_grad_norm_(model, CLIP)
        optimizer.step()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    smp.shutdown()
    return weights


def train_cases() -> list[dict[str, Tensor]]:
    return [train(config) for config in CASES]


def test_weights_equal_plain_pytorch() -> None:
    plain = Net().double()
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        plain(batch(step)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        optimizer.step()
    for results in run_ranks(train_cases, 4):
        for config, found in zip(CASES, results, strict=True):
            for name, value in plain.state_dict().items():
                torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-13, msg=f"{config}: {name}")
