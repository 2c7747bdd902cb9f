"""Inputs that every microbatch gets whole, handed on to the output."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from smpkit import OffloadModel
from smpkit.errors import UsageError

pytestmark = pytest.mark.usefixtures("place")
CPU = torch.device("cpu")
Values = tuple[Tensor, Tensor, Tensor]


class Masked(nn.Module):
    """Hands mask and factor on; the hidden values may be changed in place before."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.linear, self.in_place = nn.Linear(2, 2), in_place

    def forward(self, value: Tensor, mask: Tensor, factor: Tensor) -> Values:
        value = value.relu_() if self.in_place else value
        return self.linear(value) * mask * factor, mask, factor


class Chain(nn.Module):
    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Masked(in_place=False), Masked(in_place=in_place), Masked(in_place=in_place)])

    def forward(self, *values: Tensor) -> Values:
        first, second, third = self.layers
        return third(*second(*first(*values)))


@pytest.mark.parametrize(("in_place", "checkpoint"), [(False, False), (False, True), (True, False)])
def test_what_all_microbatches_get_and_hand_on_comes_out_once(in_place: bool, checkpoint: bool) -> None:
    torch.manual_seed(0)
    plain = Chain(in_place=in_place)
    model = OffloadModel(list(copy.deepcopy(plain).layers), CPU, CPU, 3, checkpoint, 3)
    given = [torch.randn(7, 2), torch.randn(1, 2), torch.tensor(1.5)]
    results: list[list[Tensor | None]] = []
    for network in (plain, model):
        inputs = [tensor.clone().requires_grad_() for tensor in given]
        outputs = network(*inputs)
        torch.stack([output.square().sum() for output in outputs]).sum().backward()
        found = [*outputs, *(tensor.grad for tensor in (*inputs, *network.parameters()))]
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                found += network(*[tensor.clone() for tensor in given])
        results.append(found)
    for expected, ours in zip(*results, strict=True):
        assert expected is not None
        assert ours is not None
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


class ChangesMask(nn.Module):
    def forward(self, value: Tensor, mask: Tensor) -> Tensor:
        return value * mask.mul_(2)


def test_what_all_microbatches_get_may_not_be_changed_in_place() -> None:
    inputs = torch.ones(4, 2), torch.ones(1, 2)
    assert OffloadModel([ChangesMask()], CPU)(*inputs).eq(2).all()
    with pytest.raises(UsageError, match="changed in place a tensor that all microbatches get whole"):
        OffloadModel([ChangesMask()], CPU, num_microbatches=2)(*inputs)


def test_one_row_of_a_batch_of_several_cannot_be_joined() -> None:
    class Mean(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            return value.mean(0, keepdim=True)

    model = OffloadModel([Mean()], CPU, CPU, 1, False, 2)
    with pytest.raises(UsageError, match=r"shape \(1, 2\) for each of 2 microbatches with up to 2 rows"):
        model(torch.randn(3, 2))
    assert model(torch.randn(2, 2)).shape == (2, 2)  # each microbatch is one row, and its mean its own
