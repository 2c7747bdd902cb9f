"""The step decorator runs the body per microbatch and hands back what it returned."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, assert_type

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from smpkit.errors import UsageError

pytestmark = pytest.mark.usefixtures("world")


@smp.step
def bare(x: torch.Tensor) -> torch.Tensor:
    """Count the rows."""
    return torch.tensor(len(x))


@smp.step()
def called(x: torch.Tensor) -> torch.Tensor:
    return x


class Trainer:
    """As in the public GPT-J example: decorated inside a class, without `self`."""

    @smp.step
    def train_step(model: Any, x: torch.Tensor) -> tuple[Any, torch.Tensor]:  # noqa: N805
        return model, x.sum()

    @smp.step()
    def other_step(model: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: N805
        return x

    def run(self) -> Any:
        return self.train_step("model", torch.ones(4))


def test_trap_5_bare_called_and_inside_a_class_without_self() -> None:
    smp.init({"microbatches": 2})
    assert bare(torch.zeros(4)).outputs == [2, 2]
    assert called(torch.zeros(4)).concat().shape == (4,)
    models, sums = Trainer().run()
    assert models == ["model", "model"]
    assert sums.outputs == [2.0, 2.0]
    assert isinstance(Trainer().other_step("model", torch.ones(2)), smp.StepOutput)


@smp.step
def typed(model: smp.DistributedModel, x: torch.Tensor) -> torch.Tensor:
    return x


@smp.step(non_split_inputs=["model"])
def pair(model: smp.DistributedModel, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x, x


def test_type_checkers_know_what_a_step_takes_and_returns() -> None:
    """What it returned had been `Any`; mypy reads this test."""
    smp.init({"microbatches": 2})
    model = smp.DistributedModel(nn.Linear(1, 1))
    assert_type(typed(model, torch.ones(4)), smp.StepOutput)
    assert_type(pair(model, torch.ones(4)), tuple[smp.StepOutput, ...])
    with pytest.raises(TypeError, match="missing a required argument"):
        typed(model)  # type: ignore[call-arg]


def test_the_function_keeps_its_name_and_docstring() -> None:
    assert bare.__name__ == "bare"  # type: ignore[attr-defined]
    assert bare.__doc__ == "Count the rows."
    assert repr(bare) == "<smp.step bare>"


def test_trap_6_a_step_that_returns_a_model_output_gives_it_back() -> None:
    @smp.step
    def forward(x: torch.Tensor) -> OrderedDict[str, Any]:
        return OrderedDict(loss=x.sum(), logits=x, count=3, nothing=None)

    smp.init({"microbatches": 2})
    output = forward(torch.ones(4, 3))
    assert isinstance(output, dict)
    assert output["loss"].reduce_sum().item() == 12
    assert output["logits"].concat().shape == (4, 3)
    assert output["count"] == [3, 3]
    assert output["nothing"] == [None, None]


def test_trap_7_one_dict_argument_is_split_all_the_way_down() -> None:
    seen = []

    @smp.step()
    def forward(model: Any, inputs: dict[str, Any], gradient_accumulation_steps: int = 1) -> None:
        seen.append((inputs["ids"].shape, inputs["labels"], gradient_accumulation_steps))

    smp.init({"microbatches": 2})
    forward(None, {"ids": torch.zeros(4, 5), "labels": None}, gradient_accumulation_steps=3)
    assert seen == [((2, 5), None, 3)] * 2


def test_outputs_are_detached_unless_asked_otherwise() -> None:
    weight = nn.Parameter(torch.ones(1))

    def body(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": x * weight}

    smp.init()
    assert not smp.step(body)(torch.ones(1))["y"].outputs[0].requires_grad
    assert smp.step(detach_outputs=False)(body)(torch.ones(1))["y"].outputs[0].requires_grad


def test_a_step_inside_a_step_is_refused() -> None:
    @smp.step
    def outer(x: torch.Tensor) -> Any:
        return bare(x)

    smp.init()
    with pytest.raises(UsageError, match="`bare` was called inside another step"):
        outer(torch.ones(2))
    assert bare(torch.ones(2)).outputs == [2]


def test_a_step_before_init_says_what_to_call() -> None:
    with pytest.raises(UsageError, match=r"smp\.init\(\)"):
        bare(torch.ones(2))


def test_gradients_are_the_average_over_microbatches_or_the_sum() -> None:
    x = torch.arange(4.0)

    @smp.step
    def train(model: Any, x: torch.Tensor) -> None:
        model.backward(model(x[:, None]).sum())

    for average, expected in ((True, 3.0), (False, 6.0)):
        smp.init({"microbatches": 2})
        module = nn.Linear(1, 1, bias=False)
        model = smp.DistributedModel(module, average_grads_across_microbatches=average)
        train(model, x)
        assert module.weight.grad is not None
        assert module.weight.grad.item() == expected
        smp.shutdown()


def test_backward_takes_several_tensors_and_their_gradients() -> None:
    @smp.step
    def train(model: Any, x: torch.Tensor) -> None:
        y = model(x)
        model.backward([y, y.sum()], [torch.full_like(y, 2.0), None])

    smp.init({"microbatches": 2})
    module = nn.Linear(1, 1, bias=False)
    train(smp.DistributedModel(module), torch.ones(4, 1))
    assert module.weight.grad is not None
    assert module.weight.grad.item() == (2 * 2 + 2 * 1) * 2 / 2


def test_backward_on_a_vector_without_a_gradient_raises_what_torch_raises() -> None:
    @smp.step
    def train(model: Any, x: torch.Tensor) -> None:
        model.backward(model(x))

    smp.init({"microbatches": 2})
    model = smp.DistributedModel(nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar outputs"):
        train(model, torch.ones(4, 1))


def test_backward_called_on_the_loss_inside_a_step_is_refused() -> None:
    @smp.step
    def train(model: Any, x: torch.Tensor) -> None:
        model(x).sum().backward()

    smp.init({"microbatches": 2})
    model = smp.DistributedModel(nn.Linear(1, 1))
    with pytest.raises(UsageError, match=r"model\.backward\(loss\)"):
        train(model, torch.ones(4, 1))
    model(torch.ones(1, 1)).sum().backward()  # outside a step it is the documented way


def test_the_loss_may_be_changed_in_place_before_backward() -> None:
    @smp.step
    def train(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).mean()
        loss /= 4
        model.backward(loss)
        return loss

    smp.init({"microbatches": 2})
    module = nn.Linear(1, 1, bias=False)
    train(smp.DistributedModel(module), torch.ones(4, 1))
    assert module.weight.grad is not None
    assert module.weight.grad.item() == 0.25
