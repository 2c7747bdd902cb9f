"""What scripts do with plain models, done with an OffloadModel."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smpkit import OffloadModel

CPU = torch.device("cpu")
both_ways = pytest.mark.parametrize("checkpoint", [False, True], ids=["graph", "checkpoint"])


def make_pair(plain: nn.Sequential, **options: Any) -> tuple[nn.Sequential, OffloadModel]:
    return plain, OffloadModel(copy.deepcopy(plain), CPU, **options)


@both_ways
@pytest.mark.parametrize("num_slices", [1, 2, 6])
def test_a_layer_may_be_there_several_times(num_slices: int, checkpoint: bool) -> None:
    torch.manual_seed(0)
    layer, activation = nn.Linear(3, 3), nn.Tanh()
    plain, model = make_pair(
        nn.Sequential(nn.Linear(3, 3), activation, layer, activation, layer, nn.Linear(3, 2)),
        num_slices=num_slices,
        checkpoint_activation=checkpoint,
    )
    inputs = torch.randn(4, 3)
    outputs = [network(inputs) for network in (plain, model)]
    assert torch.equal(outputs[0], outputs[1])
    for output in outputs:
        output.square().sum().backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=1e-6)


@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_slices_may_work_in_place_without_a_graph(mode: Any, num_microbatches: int) -> None:
    torch.manual_seed(0)
    plain, model = make_pair(
        nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3)),
        num_microbatches=num_microbatches,
    )
    inputs = torch.randn(9, 3)
    with mode():
        torch.testing.assert_close(model(inputs), plain(inputs))


def test_the_first_parameter_may_be_a_number() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(2.0))

        def forward(self, value: Tensor) -> Tensor:
            return value * self.factor

    plain, model = make_pair(nn.Sequential(Scale(), nn.Linear(3, 2)))
    inputs = torch.randn(4, 3)
    for network in (plain, model.to("cpu")):
        network(inputs).sum().backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=0)


@both_ways
def test_dropout_in_place_works_in_training_after_a_pass_in_evaluation(checkpoint: bool) -> None:
    torch.manual_seed(0)
    plain, model = make_pair(
        nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Linear(4, 4), nn.Dropout(0.5, inplace=True), nn.Linear(4, 4)),
        num_slices=4,
        checkpoint_activation=checkpoint,
    )
    inputs = torch.randn(3, 4)
    for network in (plain, model):
        network.eval()
        network(inputs.clone()).sum().backward()
        network.train()
        torch.manual_seed(1)
        network(inputs.clone()).sum().backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=0)


@both_ways
def test_the_mode_may_change_between_forward_and_backward(checkpoint: bool) -> None:
    torch.manual_seed(0)
    plain, model = make_pair(
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)),
        checkpoint_activation=checkpoint,
    )
    inputs = torch.randn(3, 4)
    for network in (plain, model):
        torch.manual_seed(1)
        loss = network(inputs).square().sum()
        network.eval()
        loss.backward()
        assert not any(module.training for module in network.modules())
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=0)
    for one, other in zip(plain.buffers(), model.buffers(), strict=True):
        assert torch.equal(one, other)


@both_ways
def test_a_backward_that_failed_cannot_be_repeated(checkpoint: bool) -> None:
    class Interrupted(nn.Module):
        now = False

        def forward(self, value: Tensor) -> Tensor:
            output = value * 1
            if output.requires_grad:
                output.register_hook(self.interrupt)
            return output

        def interrupt(self, _: Tensor) -> None:
            if self.now:
                raise KeyboardInterrupt

    torch.manual_seed(0)
    middle = Interrupted()
    model = OffloadModel(
        nn.Sequential(nn.Linear(4, 4), middle, nn.Linear(4, 2)), CPU, num_slices=3, checkpoint_activation=checkpoint
    )
    loss = model(torch.randn(3, 4)).sum()
    middle.now = True
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    middle.now = False
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    model(torch.randn(3, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
