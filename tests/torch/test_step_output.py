"""What microbatches returned is put together in the containers they returned it in."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from smpkit.errors import UsageError
from smpkit.torch.step import StepOutput, StepOutputError, collate


def test_reductions_over_microbatches() -> None:
    output = StepOutput([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])])
    assert output.reduce_mean().tolist() == [2.0, 3.0]
    assert output.reduce_sum().tolist() == [4.0, 6.0]
    assert output.concat().tolist() == [1.0, 2.0, 3.0, 4.0]
    assert output.stack().tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_scalars_concatenate_to_a_vector_and_integers_have_a_mean() -> None:
    output = StepOutput([torch.tensor(1), torch.tensor(2)])
    assert output.concat().tolist() == [1, 2]
    assert output.reduce_mean().item() == 1.5


def test_concat_joins_batches_of_different_size() -> None:
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


def test_trap_6_a_dict_subclass_stays_one() -> None:
    made = collate([OrderedDict(loss=torch.tensor(1.0))] * 2)
    assert type(made) is OrderedDict
    assert made["loss"].outputs == [1.0, 1.0]


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
    [
        [torch.zeros(1), None],
        [{"a": 1}, {"b": 1}],
        [[1], [1, 2]],
        [{1, 2}, {3, 4}],
    ],
    ids=["types", "keys", "lengths", "sets"],
)
def test_what_differs_between_microbatches_stays_a_list(values: list[object]) -> None:
    assert collate(values) == values


def test_repr_says_what_is_inside() -> None:
    assert repr(StepOutput([torch.zeros(2, 3)] * 4)) == "StepOutput(4 microbatches, shape (2, 3))"


@pytest.mark.parametrize("use", [lambda loss: loss.item(), lambda loss: loss == 0.0])
def test_a_step_output_that_is_used_as_a_number_says_how_to_get_one(use: Any) -> None:
    loss = StepOutput([torch.tensor(1.0), torch.tensor(2.0)])
    with pytest.raises(UsageError, match=r"StepOutput, which holds a tensor for each microbatch") as caught:
        use(loss)
    assert isinstance(caught.value, AttributeError)
    assert isinstance(caught.value, TypeError)
    assert caught.value.hint == "`.reduce_mean()` gives their mean"


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


def test_a_step_output_of_batches_also_names_concat() -> None:
    with pytest.raises(UsageError) as caught:
        StepOutput([torch.zeros(2, 3)]).argmax(-1)
    assert caught.value.hint == "`.concat()` gives those of the whole batch, `.reduce_mean()` gives their mean"


def test_a_step_output_is_still_a_plain_object() -> None:
    output = StepOutput([torch.tensor(1.0)])
    assert output == output  # noqa: PLR0124 - what is tested
    assert output not in (None, "x", StepOutput([torch.tensor(1.0)]))
    assert bool(output)
    assert len({output}) == 1
    assert f"{output}" == str(output) == "StepOutput(1 microbatches, shape ())"
    assert not hasattr(output, "no_such_attribute")
    assert copy.deepcopy(output).outputs == output.outputs
    assert pickle.loads(pickle.dumps(output)).outputs == output.outputs
