"""What a program that was written for FairScale's OffloadModel relies on, and FairScale's defects, gone.

Those that show in numbers are rows of `test_same.py`.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smpkit import OffloadModel, OffloadOptimizer
from smpkit.errors import UnsupportedError, UsageError
from tests.models import Does

pytestmark = pytest.mark.usefixtures("place")
CPU = torch.device("cpu")


def chain(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(one, other) for one, other in itertools.pairwise(widths)])


def pair(checkpoint: bool, *widths: int, **options: Any) -> tuple[nn.Sequential, OffloadModel]:
    plain = chain(*widths)
    return plain, OffloadModel(copy.deepcopy(plain), CPU, checkpoint_activation=checkpoint, **options)


# --- the contract ----------------------------------------------------------------------------------------------------


def test_signature_and_defaults() -> None:
    parameters = list(inspect.signature(OffloadModel).parameters.values())
    positional = [(p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    empty = inspect.Parameter.empty
    assert positional == [
        ("model", empty),
        ("device", empty),
        ("offload_device", torch.device("cpu")),
        ("num_slices", 3),
        ("checkpoint_activation", False),
        ("num_microbatches", 1),
    ]


NONE = r"`{}` argument to `OffloadModel` cannot be None\."
TYPE = r"`model` argument to `OffloadModel` must be of type `nn\.Sequential`\."


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        *(((model, CPU), TypeError, NONE.format("model")) for model in list[Any]((None, [], nn.Sequential()))),
        *(
            ((model, CPU), TypeError, TYPE)
            for model in (nn.Linear(1, 1), nn.ModuleList([nn.Linear(1, 1)]), "model", [1])
        ),
        ((chain(1, 1), None), TypeError, NONE.format("device")),
        ((chain(1, 1), CPU, torch.device("meta")), UnsupportedError, "offload_device is meta"),
    ],
)
def test_rejects_wrong_arguments(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        OffloadModel(*arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_said_at_once() -> None:
    with pytest.raises(UnsupportedError, match="device is cuda, but torch sees no GPU"):
        OffloadModel(chain(1, 1), torch.device("cuda"))


def test_names_of_the_state_dict() -> None:
    model = OffloadModel(chain(2, 2, 2, 2, 2), CPU, num_slices=2)
    assert list(model.state_dict()) == [
        f"_model.{part}.model_shard.{layer}.{name}"
        for part in (0, 1)
        for layer in (0, 1)
        for name in ("weight", "bias")
    ]
    listed = OffloadModel([chain(2, 2), nn.Linear(2, 2)], CPU, num_slices=7)
    assert list(listed.state_dict()) == [
        *(f"_model.0.model_shard.0.{name}" for name in ("weight", "bias")),
        *(f"_model.1.model_shard.{name}" for name in ("weight", "bias")),
    ]
    assert len(listed.model_slices) == 2
    assert isinstance(listed._model, nn.Sequential)


# --- the defects -----------------------------------------------------------------------------------------------------


def test_inputs_of_different_batch_sizes_are_named() -> None:
    model = OffloadModel([nn.Bilinear(3, 2, 4)], CPU, num_microbatches=2)
    with pytest.raises(
        UsageError, match=r"inputs of one batch size in dimension 0, but there are tensors of \(6, 3\) and \(5, 2\)"
    ):
        model(torch.randn(6, 3), torch.randn(5, 2))


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_no_grad_makes_no_graph_and_slices_may_work_in_place(checkpoint: bool, num_microbatches: int) -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    model = OffloadModel(copy.deepcopy(plain), CPU, CPU, 3, checkpoint, num_microbatches)
    inputs = torch.randn(9, 3)
    with torch.no_grad():
        assert not model(inputs).requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(model(inputs), plain(inputs))


def test_a_graph_cannot_be_used_up_twice(checkpoint: bool) -> None:
    _, model = pair(checkpoint, 3, 4, 4, 2)
    loss = model(torch.randn(5, 3)).square().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_graph_older_than_a_step_is_refused(checkpoint: bool) -> None:
    plain, model = pair(checkpoint, 3, 5, 5, 2)
    optimizers = torch.optim.SGD(plain.parameters(), lr=0.1), OffloadOptimizer(model, torch.optim.SGD, lr=0.1)
    for network, optimizer in zip((plain, model), optimizers, strict=True):
        losses = [network(torch.ones(2, 3)).square().sum() for _ in range(2)]
        losses[0].backward()
        optimizer.step()
        with pytest.raises((RuntimeError, UsageError), match=r"modified by an inplace operation|was changed in place"):
            losses[1].backward()


def test_a_second_derivative_is_refused(checkpoint: bool) -> None:
    _, model = pair(checkpoint, 3, 5, 5, 2)
    inputs = torch.randn(5, 3, requires_grad=True)
    with pytest.raises(UnsupportedError, match="a second derivative through an OffloadModel"):
        torch.autograd.grad(model(inputs).square().sum(), inputs, create_graph=True)
    model(inputs).sum().backward()
    assert inputs.grad is not None


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
    results: list[list[Any]] = []
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
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


def test_what_all_microbatches_get_may_not_be_changed_in_place() -> None:
    inputs, layer = (torch.ones(4, 2), torch.ones(1, 2)), Does(lambda _, value, mask: value * mask.mul_(2))
    assert OffloadModel([layer], CPU)(*inputs).eq(2).all()
    with pytest.raises(UsageError, match="changed in place a tensor that all microbatches get whole"):
        OffloadModel([layer], CPU, num_microbatches=2)(*inputs)


def test_one_row_of_a_batch_of_several_cannot_be_joined() -> None:
    model = OffloadModel([Does(lambda _, value: value.mean(0, keepdim=True))], CPU, CPU, 1, False, 2)
    with pytest.raises(UsageError, match=r"shape \(1, 2\) for each of 2 microbatches with up to 2 rows"):
        model(torch.randn(3, 2))
    assert model(torch.randn(2, 2)).shape == (2, 2)  # each microbatch is one row, and its mean its own
