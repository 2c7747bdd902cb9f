"""The step decorator runs the body per microbatch, and puts together what microbatches returned."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, assert_type

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from smpkit.errors import UsageError
from smpkit.torch.step import StepOutput, StepOutputError, collate

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
    output: Any = forward(torch.ones(4, 3))
    assert type(output) is OrderedDict
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
        module: Any = nn.Linear(1, 1, bias=False)
        model = smp.DistributedModel(module, average_grads_across_microbatches=average)
        train(model, x)
        assert module.weight.grad.item() == expected
        smp.shutdown()


def several_tensors(model: Any, x: torch.Tensor) -> None:
    y = model(x)
    model.backward([y, y.sum()], [torch.full_like(y, 2.0), None])


def a_loss_that_is_changed_in_place(model: Any, x: torch.Tensor) -> None:
    loss = model(x).mean()
    loss /= 4
    model.backward(loss)


@pytest.mark.parametrize(
    ("body", "gradient"), [(several_tensors, (2 * 2 + 2 * 1) * 2 / 2), (a_loss_that_is_changed_in_place, 0.25)]
)
def test_backward_starts_at_what_it_is_given(body: Any, gradient: float) -> None:
    smp.init({"microbatches": 2})
    module: Any = nn.Linear(1, 1, bias=False)
    smp.step(body)(smp.DistributedModel(module), torch.ones(4, 1))
    assert module.weight.grad.item() == gradient


@pytest.mark.parametrize(
    ("backward", "error", "message"),
    [
        (lambda model, y: model.backward(y), RuntimeError, "grad can be implicitly created only for scalar outputs"),
        (lambda model, y: y.sum().backward(), UsageError, r"model\.backward\(loss\)"),
        (lambda model, y: model.backward([y, y.sum()], [y]), UsageError, "was given 2 tensors and 1 gradients"),
    ],
    ids=["a vector", "on the loss", "too few gradients"],
)
def test_a_backward_that_cannot_be_meant_is_refused(backward: Any, error: type[Exception], message: str) -> None:
    smp.init({"microbatches": 2})
    model = smp.DistributedModel(nn.Linear(1, 1))
    with pytest.raises(error, match=message):
        smp.step(lambda model, x: backward(model, model(x)))(model, torch.ones(4, 1))
    model(torch.ones(1, 1)).sum().backward()  # outside a step it is the documented way


def test_reductions_over_microbatches() -> None:
    output = StepOutput([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])])
    assert output.reduce_mean().tolist() == [2.0, 3.0]
    assert output.reduce_sum().tolist() == [4.0, 6.0]
    assert output.concat().tolist() == [1.0, 2.0, 3.0, 4.0]
    assert output.stack().tolist() == [[1.0, 2.0], [3.0, 4.0]]
    integers = StepOutput([torch.tensor(1), torch.tensor(2)])
    assert integers.concat().tolist() == [1, 2]
    assert integers.reduce_mean().item() == 1.5
    assert StepOutput([torch.zeros(2, 3), torch.zeros(1, 3)]).concat().shape == (3, 3)


def test_trap_6_tensors_become_step_outputs_and_everything_else_lists() -> None:
    loss = torch.tensor(1.0)
    made = collate([(loss, 1, None, {"a": loss, "b": "x"}), (loss, 2, None, {"a": loss, "b": "y"})])
    assert isinstance(made, tuple)
    assert isinstance(made[0], StepOutput)
    assert made[1:3] == ([1, 2], [None, None])
    assert isinstance(made[3]["a"], StepOutput)
    assert made[3]["b"] == ["x", "y"]


def test_trap_6_nothing_returned_is_a_list_of_none() -> None:
    nothing = collate([None, None])
    assert nothing == [None, None]
    with pytest.raises(StepOutputError, match=r"for `.reduce_mean` here: the function of the step returned None"):
        nothing.reduce_mean()
    assert not hasattr(nothing, "item")


def test_a_step_that_returns_numbers_is_told_to_return_the_tensor() -> None:
    numbers = collate([1.5, 2.5])
    assert numbers == [1.5, 2.5]
    with pytest.raises(
        StepOutputError, match=r"returned numbers \(float\)\nhint: end it with `return loss`, the tensor"
    ):
        numbers.reduce_mean()


def test_a_dataclass_of_tensors_stays_one() -> None:
    @dataclass
    class Result:
        loss: object
        count: object

    made = collate([Result(torch.tensor(1.0), 3), Result(torch.tensor(2.0), 4)])
    assert isinstance(made, Result)
    assert isinstance(made.loss, StepOutput)
    assert made.count == [3, 4]


@pytest.mark.parametrize(
    "values",
    [[torch.zeros(1), None], [{"a": 1}, {"b": 1}], [[1], [1, 2]], [{1, 2}, {3, 4}]],
    ids=["types", "keys", "lengths", "sets"],
)
def test_what_differs_between_microbatches_stays_a_list(values: list[object]) -> None:
    assert collate(values) == values


MEAN = "`.reduce_mean()` gives their mean"


@pytest.mark.parametrize(
    ("value", "use", "hint"),
    [
        (torch.tensor(1.0), lambda loss: loss.item(), MEAN),
        (torch.tensor(1.0), lambda loss: loss == 0.0, MEAN),
        (torch.zeros(2, 3), lambda rows: rows.argmax(-1), f"`.concat()` gives those of the whole batch, {MEAN}"),
    ],
    ids=["a number", "compared", "a batch"],
)
def test_a_step_output_that_is_used_as_a_tensor_says_how_to_get_one(value: torch.Tensor, use: Any, hint: str) -> None:
    with pytest.raises(UsageError, match=r"StepOutput, which holds a tensor for each microbatch") as caught:
        use(StepOutput([value, value]))
    assert isinstance(caught.value, AttributeError)
    assert isinstance(caught.value, TypeError)
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    "use",
    [
        *(float, torch.isnan, lambda loss: loss < 3, lambda loss: torch.ones(()) * loss, lambda loss: loss[0]),
        lambda loss: f"{loss:.3f}",
    ],
)
def test_operators_on_a_step_output_raise_pythons_own_error(use: Any) -> None:
    with pytest.raises(TypeError, match="StepOutput"):
        use(StepOutput([torch.tensor(1.0)]))


def test_a_step_output_is_still_a_plain_object() -> None:
    output = StepOutput([torch.tensor(1.0)])
    assert output == output  # noqa: PLR0124 - what is tested
    assert output not in (None, "x", StepOutput([torch.tensor(1.0)]))
    assert bool(output)
    assert len({output}) == 1
    assert f"{output}" == str(output) == repr(output) == "StepOutput(1 microbatches, shape ())"
    assert not hasattr(output, "no_such_attribute")
    assert copy.deepcopy(output).outputs == output.outputs
    assert pickle.loads(pickle.dumps(output)).outputs == output.outputs


@pytest.mark.parametrize("call", ["step", "zero_grad"])
def test_gradients_are_not_for_the_code_of_a_step_with_several_microbatches(call: str) -> None:
    smp.init({"microbatches": 2})
    model = smp.DistributedModel(nn.Linear(2, 1))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))

    @smp.step
    def step(model: smp.DistributedModel, x: torch.Tensor) -> None:
        model.backward(model(x).sum())
        getattr(optimizer, call)()

    with pytest.raises(UsageError, match=f"optimizer.{call} was called inside a step, where the gradients of all"):
        step(model, torch.ones(4, 2))
