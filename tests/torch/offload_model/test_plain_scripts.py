"""What scripts do with plain models, done with an OffloadModel."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smpkit import OffloadModel, OffloadOptimizer
from smpkit.errors import UsageError
from smpkit.torch.offload_model import model as module
from smpkit.torch.offload_model.slices import Slice

pytestmark = pytest.mark.usefixtures("place")
CPU = torch.device("cpu")


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 2))


def test_one_weight_is_saved_without_its_slice() -> None:
    model = OffloadModel(nn.Sequential(*[nn.Linear(100, 100) for _ in range(4)]), CPU, num_slices=1)
    file = io.BytesIO()
    torch.save({name: value for name, value in model.state_dict().items() if "bias" in name}, file)
    assert file.tell() < 10_000


class Zeroes(torch.optim.Optimizer):
    """Writes through `.data`."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.param_groups[0]["params"]:
            each.data.zero_()


@pytest.mark.parametrize("computed", [None, torch.bfloat16], ids=["fp32", "fp32-in-bf16"])
@pytest.mark.parametrize("way", ["data", "evaluation", "optimizer"])
def test_weights_written_past_their_versions_count(computed: torch.dtype | None, way: str) -> None:
    """Averages are put in with `parameter.data.copy_`; torch_optimizer's rules update with `parameter.data.add_`."""
    model = OffloadModel(layers(), CPU, num_slices=2, dtype=computed)
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.25)
    inputs = torch.ones(1, 4, dtype=computed)
    held = list(model.parameters())
    for _ in range(2):
        model(inputs).float().sum().backward()
        optimizer.step()
    if way == "data":
        for parameter in model.parameters():
            parameter.data.zero_()
    elif way == "optimizer":
        model(inputs).float().sum().backward()
        Zeroes(held, {}).step()
        for parameter in held:
            parameter.grad = None
    else:
        model.synchronize()
        for parameter in held:
            parameter.data.zero_()
        model.eval()
    assert not model(inputs).any()
    model.train()
    model(inputs).float().sum().backward()
    optimizer.step()
    expected = [torch.full((2,), -0.25) if p is held[-1] else torch.zeros_like(p) for p in held]
    for p, q in zip(expected, model.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize(("asked", "roundings"), [("never", 4), ("before step()", 4), ("after step()", 6)])
def test_asking_for_parameters_costs_no_copy_before_the_step(
    asked: str, roundings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scripts do so in each step, to clip or to log; a step rounds each slice once all the same.

    Behind `step()` parameters may be written to through `.data`, which no version tells: the next forward rounds again.
    """
    model = OffloadModel(layers(), CPU, num_slices=2, dtype=torch.bfloat16)
    optimizer = OffloadOptimizer(model, lr=1e-2, max_grad_norm=1.0)
    published: list[int] = []
    publish = Slice.publish

    def noted(piece: Slice) -> None:
        published.append(piece.index)
        publish(piece)

    monkeypatch.setattr(Slice, "publish", noted)
    for _ in range(3):
        model(torch.ones(2, 4, dtype=torch.bfloat16)).float().sum().backward()
        if asked == "before step()":
            assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        if asked == "after step()":
            assert all(parameter.grad is None for parameter in model.parameters())
    model.synchronize()
    assert sorted(published) == [0] * roundings + [1] * roundings  # and once when the optimizer was made


class Moves(nn.Linear):
    """Gives its weight other memory, as nn.LSTM's `flatten_parameters()` does on a GPU, which forwards often call."""

    def forward(self, value: Tensor) -> Tensor:
        self.weight.data = self.weight.data.clone()
        return super().forward(value)


def test_a_weight_that_a_forward_moves_keeps_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_the_host", lambda _: False)
    plain = nn.Sequential(Moves(4, 4), nn.Tanh(), Moves(4, 4))
    model = OffloadModel(copy.deepcopy(plain), CPU)
    for _ in range(2):
        for network in (plain, model):
            network(torch.ones(3, 4)).sum().backward()
    gradients, expected = ([each.grad for each in network.parameters()] for network in (model, plain))
    torch.testing.assert_close(gradients, expected, rtol=0, atol=0)


class Fragile(nn.Module):
    """Raises an error as long as its class has one."""

    error: type[BaseException] | None = None

    def forward(self, value: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return value.tanh()


def fragile_model() -> OffloadModel:
    return OffloadModel(nn.Sequential(nn.Linear(4, 4), Fragile(), nn.Linear(4, 2)), CPU, checkpoint_activation=True)


def test_after_an_interrupt_the_next_backward_updates_again() -> None:
    model = fragile_model()
    optimizer = OffloadOptimizer(model, overlap="backward")
    loss = model(torch.randn(3, 4)).sum()
    Fragile.error = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    Fragile.error = None
    for _ in range(3):
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    model(torch.randn(3, 4)).sum().backward()
    with pytest.raises(UsageError, match="a second backward"):
        model(torch.randn(3, 4)).sum().backward()


def test_an_error_in_a_layer_leaves_the_model_usable() -> None:
    model = fragile_model()
    Fragile.error = ZeroDivisionError
    with pytest.raises(ZeroDivisionError):
        model(torch.randn(3, 4))
    Fragile.error = None
    output = model(torch.randn(3, 4))
    Fragile.error = ZeroDivisionError
    with pytest.raises(ZeroDivisionError):
        output.sum().backward()
    Fragile.error = None
    assert {parameter.data_ptr() for parameter in model.parameters()} == {
        master.data_ptr() for piece in model._engine.slices for master in piece.masters
    }
    model(torch.randn(3, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
