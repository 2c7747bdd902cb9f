"""Graphs that live longer than one backward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from smpkit import OffloadModel, OffloadOptimizer
from smpkit.errors import UnsupportedError, UsageError

pytestmark = pytest.mark.usefixtures("place")
CPU = torch.device("cpu")
both_ways = pytest.mark.parametrize("checkpoint", [False, True], ids=["graph", "checkpoint"])


def make_pair(*, checkpoint: bool, num_microbatches: int = 1) -> tuple[nn.Sequential, OffloadModel]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2))
    return plain, OffloadModel(
        copy.deepcopy(plain), CPU, checkpoint_activation=checkpoint, num_microbatches=num_microbatches
    )


@both_ways
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_a_graph_may_be_gone_through_twice(checkpoint: bool, num_microbatches: int) -> None:
    """The second backward must not find the first one's gradients at the borders between slices."""
    plain, model = make_pair(checkpoint=checkpoint, num_microbatches=num_microbatches)
    values = torch.randn(6, 3)
    gradients: list[list[Tensor]] = []
    for network in (plain, model):
        inputs = values.clone().requires_grad_()
        loss = network(inputs).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        gradients.append(
            [parameter.grad for parameter in (inputs, *network.parameters()) if parameter.grad is not None]
        )
    assert len(gradients[0]) == len(gradients[1]) == 7
    for p, q in zip(*gradients, strict=True):
        torch.testing.assert_close(q, p, rtol=1e-5, atol=1e-6)


@both_ways
def test_a_graph_older_than_a_step_is_refused(checkpoint: bool) -> None:
    plain, model = make_pair(checkpoint=checkpoint)
    optimizers = torch.optim.SGD(plain.parameters(), lr=0.1), OffloadOptimizer(model, torch.optim.SGD, lr=0.1)
    for network, optimizer in zip((plain, model), optimizers, strict=True):
        losses = [network(torch.ones(2, 3)).square().sum() for _ in range(2)]
        losses[0].backward()
        optimizer.step()
        with pytest.raises((RuntimeError, UsageError), match=r"modified by an inplace operation|was changed in place"):
            losses[1].backward()


@both_ways
def test_a_second_derivative_is_refused(checkpoint: bool) -> None:
    _, model = make_pair(checkpoint=checkpoint)
    inputs = torch.randn(5, 3, requires_grad=True)
    with pytest.raises(UnsupportedError, match="a second derivative through an OffloadModel"):
        torch.autograd.grad(model(inputs).square().sum(), inputs, create_graph=True)
    model(inputs).sum().backward()
    assert inputs.grad is not None
