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
        handed: Values = third(*second(*first(*values)))
        return handed


@pytest.mark.parametrize("checkpoint", [False, True], ids=["graph", "checkpoint"])
@pytest.mark.parametrize("in_place", [False, True])
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
    """Changes the mask in place, and returns rows of its own that do not depend on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, value: Tensor, mask: Tensor) -> Values:
        known = mask.mul_(2).add_(1).clone()
        return self.linear(value) * known, mask, self.linear(known)


class ChangesMaskAgain(ChangesMask):
    def forward(self, value: Tensor, mask: Tensor, rows: Tensor) -> Values:  # type: ignore[override]
        value, mask, more = super().forward(value, mask)
        return value, mask, rows + more


@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("checkpoint", [False, True], ids=["graph", "checkpoint"])
def test_what_all_microbatches_get_may_be_changed_in_place_and_computed_with(
    checkpoint: bool, num_microbatches: int
) -> None:
    torch.manual_seed(0)
    parts = [ChangesMask().double(), ChangesMaskAgain().double()]
    model = OffloadModel(copy.deepcopy(parts), CPU, CPU, 2, checkpoint, num_microbatches)
    given = [torch.randn(7, 2).double(), torch.randn(1, 2).double()]

    def plain(*values: Tensor) -> Values:
        handed: Values = parts[1](*parts[0](*values))
        return handed

    results: list[list[Tensor | None]] = []
    for network, parameters in ((plain, nn.ModuleList(parts).parameters()), (model, model.parameters())):
        found: list[Tensor | None] = []
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                found += network(*[tensor.clone() for tensor in given])
        inputs = [tensor.clone().requires_grad_() for tensor in given]
        outputs = network(*[tensor * 1 for tensor in inputs])
        torch.stack([output.square().sum() for output in outputs]).sum().backward()
        found += [*outputs, *(tensor.grad for tensor in (*inputs, *parameters))]
        results.append(found)
    for expected, ours in zip(*results, strict=True):
        assert expected is not None
        assert ours is not None
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-9)


def test_one_row_of_a_batch_of_several_cannot_be_joined() -> None:
    class Mean(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            return value.mean(0, keepdim=True)

    model = OffloadModel([Mean()], CPU, CPU, 1, False, 2)
    with pytest.raises(UsageError, match=r"shape \(1, 2\) for each of 2 microbatches with up to 2 rows"):
        model(torch.randn(3, 2))
    assert model(torch.randn(2, 2)).shape == (2, 2)  # each microbatch is one row, and its mean its own
