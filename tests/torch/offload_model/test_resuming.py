"""What an optimizer takes over: states, masters, and weights that somebody else has written."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from smpkit import OffloadModel, OffloadOptimizer

pytestmark = pytest.mark.usefixtures("place")
CPU = torch.device("cpu")


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))


def train(network: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype = torch.float32) -> None:
    torch.manual_seed(1)
    for _ in range(3):
        network(torch.randn(5, 4).to(dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def close(plain: nn.Module, model: nn.Module) -> None:
    """A hundredth of one step: Adam's first steps make much of what rounding leaves of small gradients."""
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=0, atol=1e-4)


def test_without_saved_state_it_starts_anew() -> None:
    plain = make_model()
    model = OffloadModel(copy.deepcopy(plain), CPU)
    expected = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    actual = OffloadOptimizer(model, torch.optim.AdamW, lr=1e-2)
    train(plain, expected)
    train(model, actual)
    for optimizer in (expected, actual):
        optimizer.load_state_dict({"state": {}, "param_groups": optimizer.state_dict()["param_groups"]})
    train(plain, expected)
    train(model, actual)
    close(plain, model)


def test_a_resumed_bf16_model_has_its_masters() -> None:
    """Their weights have lost most of what small steps have added up."""

    def make() -> tuple[OffloadModel, OffloadOptimizer]:
        model = OffloadModel(make_model().bfloat16(), CPU)
        return model, OffloadOptimizer(model, torch.optim.AdamW, lr=1e-4)

    def masters(optimizer: OffloadOptimizer) -> list[torch.Tensor]:
        return [state["master"].clone() for state in optimizer.state_dict()["state"].values()]

    model, optimizer = make()
    train(model, optimizer, torch.bfloat16)
    saved: list[dict[str, Any]] = [copy.deepcopy(each.state_dict()) for each in (model, optimizer)]
    train(model, optimizer, torch.bfloat16)
    resumed_model, resumed = make()
    resumed_model.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    train(resumed_model, resumed, torch.bfloat16)
    assert len(masters(resumed)) == 6
    for p, q in zip(masters(optimizer), masters(resumed), strict=True):
        assert torch.equal(p, q)


def test_weights_given_between_a_backward_and_its_step_are_updated() -> None:
    plain = make_model()
    model = OffloadModel(copy.deepcopy(plain), CPU, num_slices=2)
    optimizers = torch.optim.AdamW(plain.parameters(), lr=1e-2), OffloadOptimizer(model, torch.optim.AdamW, lr=1e-2)
    for network, optimizer in zip((plain, model), optimizers, strict=True):
        network(torch.ones(2, 4)).square().mean().backward()
        for parameter in network.parameters():
            parameter.data = parameter.data * 2  # moves it out of its slice's memory
        optimizer.step()
    torch.testing.assert_close(model(torch.ones(2, 4)), plain(torch.ones(2, 4)))
    close(plain, model)
