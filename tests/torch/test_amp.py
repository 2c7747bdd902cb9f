"""`smp.amp.GradScaler`: torch's, with all ranks of a model of one mind."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from smpkit.errors import UsageError
from smpkit.torch.offload_model import OffloadModel, OffloadOptimizer
from tests.ranks import run_ranks
from tests.torch.steps import on_ranks, over_ranks, wrap
from tests.train import Plain, in_turn

pytestmark = pytest.mark.filterwarnings("ignore:.*auto_partition")
INIT = 2.0**6


class Layer(nn.Module):
    """A linear layer that can be told to spoil its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.spoil = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if self.spoil:
            x.register_hook(lambda gradient: gradient * math.inf)
        return torch.tanh(x)


def build() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(Layer(), Layer())


def spoil(model: Any, spoils: bool) -> None:
    model[1].spoil = spoils


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def spoils(step: int) -> bool:
    return step in (1, 2)


def scaled_step(model: Any, inputs: torch.Tensor, scaler: Any, dtype: Any) -> torch.Tensor:
    with torch.autocast(inputs.device.type, dtype, enabled=dtype is not None):
        loss = model(inputs).float().square().mean()
    model.backward(scaler.scale(loss))
    return loss


train_step = smp.step(scaled_step)


def train(
    step: Any, model: Any, layers: nn.Sequential, optimizer: Any, scaler: Any, dtype: Any, device: Any = "cpu"
) -> list[float]:
    """Train for some steps, and return the scale after each."""
    scales = []
    for number in range(6):
        optimizer.zero_grad()
        spoil(layers, spoils(number))  # its rank's own gradient is not finite, and what it sends back neither
        step(model, batch(number).to(device), scaler, dtype)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def train_over_ranks(degree: int, microbatches: int, dtype: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    layers = build()
    model = over_ranks(layers, {layers[1]: degree - 1}, microbatches=microbatches)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    scales = train(train_step, model, layers, optimizer, smp.amp.GradScaler(INIT, growth_interval=2), dtype)
    return {name: value.detach() for name, value in model.local_named_parameters()}, scales


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "autocast"])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("degree", [1, 2])
def test_training_equals_torchs_scaler(degree: int, microbatches: int, dtype: torch.dtype | None) -> None:
    layers = build()
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=INIT, growth_interval=2)
    step = in_turn(scaled_step, microbatches)
    scales = train(step, Plain(layers, microbatches), layers, optimizer, scaler, dtype)
    assert scales == [INIT, INIT / 2, INIT / 4, INIT / 4, INIT / 2, INIT / 2]
    for held, ours in run_ranks(train_over_ranks, degree, degree, microbatches, dtype):
        assert ours == scales
        for name, value in held.items():
            torch.testing.assert_close(value, layers.get_parameter(name).detach(), rtol=1e-6, atol=1e-6)


def overflow_on_the_last_rank(fused: bool) -> tuple[float, float, bool]:
    """Only the loss's own layer overflows: without agreement the first rank would take its step."""
    module = build()
    model = over_ranks(module, {module[1]: 1})
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), fused=fused))
    scaler = smp.amp.GradScaler(INIT)
    train_step(model, batch(0), scaler, None)
    own = next(model.local_parameters())
    before = own.detach().clone()
    if smp.pp_rank() == 1:
        own.grad.fill_(math.nan)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    kept = bool(own.equal(before))
    if smp.pp_rank() == 1:
        own.grad = None
    return scaler.get_scale(), float(len(optimizer.state)), kept


def test_an_overflow_of_one_pipeline_rank_skips_the_step_of_all() -> None:
    assert run_ranks(overflow_on_the_last_rank, 2, True) == [(INIT / 2, 0.0, True)] * 2


@on_ranks(2)
def test_torchs_own_is_refused_where_ranks_have_different_gradients() -> None:
    module = build()
    model = over_ranks(module, {module[1]: 1})
    with pytest.raises(UsageError, match="scaled by torch's `GradScaler`, which looks for overflows in this rank's"):
        train_step(model, batch(0), torch.amp.GradScaler("cpu"), None)
    off = torch.amp.GradScaler("cpu", enabled=False)
    assert off.scale(torch.ones(())) == 1
    smp.shutdown()
    assert torch.amp.GradScaler.scale.__module__ == "torch.amp.grad_scaler"
    # Without a step, too: the owner of a gradient would skip the update in which the others wait for it.
    wrapped = wrap(build(), ddp=True, shard_optimizer_state=True)
    with pytest.raises(UsageError, match="scaled by torch's `GradScaler`"):
        torch.amp.GradScaler("cpu").scale(wrapped(batch(0)).sum())


# --- one process -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_it_is_refused_where_the_optimizer_scales_by_itself(name: str) -> None:
    smp.init({name: True})
    with pytest.raises(UsageError, match=f"a GradScaler was made, but with `{name}`"):
        smp.amp.GradScaler()
    assert not smp.amp.GradScaler(enabled=False).is_enabled()


def test_it_takes_the_arguments_of_both_of_torchs() -> None:
    assert smp.amp.GradScaler(8.0, 3.0).get_scale() == smp.amp.GradScaler("cpu", 8.0, 3.0).get_scale() == 8.0
    assert smp.amp.GradScaler(device="cpu", growth_factor=3.0).get_growth_factor() == 3.0
    scaler = smp.amp.GradScaler(init_scale=8.0)
    kept = smp.amp.GradScaler(init_scale=2.0).state_dict()
    scaler.load_state_dict(kept)
    assert scaler.get_scale() == 2.0


def test_it_scales_for_an_offload_optimizer() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    model = OffloadModel(layers, torch.device("cpu"), torch.device("cpu"), num_slices=2)
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=1.0)
    scaler = smp.amp.GradScaler(init_scale=2.0)
    seen = []
    for factor in (1.0, math.inf, math.inf, 1.0):
        before = [each.detach().clone() for each in model.parameters()]
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).mean() * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        model.synchronize()
        changed = any(not old.equal(new) for old, new in zip(before, model.parameters(), strict=True))
        seen.append((scaler.get_scale(), changed))
    assert seen == [(2.0, True), (1.0, False), (0.5, False), (0.5, True)]
