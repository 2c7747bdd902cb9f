"""Mixed precision on the GPU: autocast with a scaler that ranks share, half-precision weights with masters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smpkit.torch as smp
from tests.device.device import gpu
from tests.device.ranks import run_on_gpu
from tests.torch.test_amp import INIT, build, overflow_on_the_last_rank, scaled_step, train, train_over_ranks
from tests.train import Plain, in_turn

_SCALES = [INIT, INIT / 2, INIT / 4, INIT / 4, INIT / 2, INIT / 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("degree", [1, 2])
def test_training_equals_torchs_scaler(degree: int, dtype: torch.dtype) -> None:
    """An overflow of one rank skips the step of both, and the scale is torch's."""
    layers = build().to(gpu())
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(gpu().type, init_scale=INIT, growth_interval=2)
    step = in_turn(scaled_step, 2)
    assert train(step, Plain(layers, 2), layers, optimizer, scaler, dtype, gpu()) == _SCALES
    for held, scales in run_on_gpu(train_over_ranks, degree, 2, dtype, size=degree):
        assert scales == _SCALES
        for name, value in held.items():
            torch.testing.assert_close(value, layers.get_parameter(name).detach().cpu(), rtol=1e-3, atol=1e-3)


def test_an_overflow_of_one_pipeline_rank_skips_the_step_of_all() -> None:
    assert run_on_gpu(overflow_on_the_last_rank, True) == [(INIT / 2, 0.0, True)] * 2


@smp.step
def fit(model: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = (model(x.to(next(model.parameters()).dtype)).float() - y).square().mean()
    model.backward(loss)
    return loss


def train_half(half: str) -> tuple[list[float], list[bool]]:
    """Return losses, and which steps overflowed; the first steps do, under fp16."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, half: True})
    torch.manual_seed(3)
    model = smp.DistributedModel(
        nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    )
    scaling: dict[str, Any] = {"dynamic_loss_scale": True, "init_scale": 2.0**30} if half == "fp16" else {}
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), **scaling)
    losses, overflows = [], []
    x = torch.randn(32, 64)
    for _ in range(60):
        optimizer.zero_grad()
        losses.append(fit(model, x, x[:, :1].sin()).reduce_mean().item())
        optimizer.step()
        overflows.append(bool(optimizer.overflow))
    smp.shutdown()
    return losses, overflows


@pytest.mark.parametrize("half", ["fp16", "bf16"])
def test_masters_learn(half: str) -> None:
    (losses, overflows), second = run_on_gpu(train_half, half)
    assert (losses, overflows) == second
    assert overflows[0] == (half == "fp16")
    assert not overflows[-1]
    assert losses[-1] < 0.1 * losses[0]
