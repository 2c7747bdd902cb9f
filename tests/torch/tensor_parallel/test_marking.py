from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from smpkit.errors import UsageError
from smpkit.torch.placement.delayed import is_delayed
from smpkit.torch.tensor_parallel.marking import marking_of


def enabled(module: nn.Module) -> bool | None:
    marking = marking_of(module)
    return None if marking is None else marking.enabled


def test_what_is_created_in_the_block_is_marked_and_nothing_else() -> None:
    before = nn.Linear(2, 2)
    with smp.tensor_parallelism(fused_softmax=False):
        inside = nn.Sequential(nn.Linear(2, 2))
    after = nn.Linear(2, 2)
    assert [enabled(each) for each in (before, inside, inside[0], after)] == [None, True, True, None]
    marking = marking_of(inside[0])
    assert marking is not None
    assert marking.config == {"fused_softmax": False}


def test_the_innermost_block_wins() -> None:
    with smp.tensor_parallelism():
        with smp.tensor_parallelism(enabled=False):
            inner = nn.Linear(2, 2)
        outer = nn.Linear(2, 2)
    assert (enabled(inner), enabled(outer)) == (False, True)


def test_it_decorates_functions() -> None:
    @smp.tensor_parallelism()
    def build() -> nn.Linear:
        return nn.Linear(2, 2)

    assert enabled(build())
    assert enabled(build()), "each call is a block of its own"


def test_a_failing_block_leaves_nothing_behind() -> None:
    with pytest.raises(ZeroDivisionError), smp.tensor_parallelism():
        _ = 1 // 0
    assert enabled(nn.Linear(2, 2)) is None


def test_copies_are_marked_like_their_original() -> None:
    # nn.TransformerEncoder makes copies of the layer that it is given, past every __init__.
    with smp.tensor_parallelism():
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2), 2, enable_nested_tensor=False)
    assert enabled(encoder.layers[1])
    assert enabled(copy.deepcopy(encoder.layers[1].linear1))


def test_a_later_call_for_a_part_overrides_that_for_the_whole() -> None:
    model: Any = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    smp.set_tensor_parallelism(model)
    smp.set_tensor_parallelism(model[0], enabled=False)
    smp.set_tensor_parallelism(model[0][1])
    assert [enabled(each) for each in (model, model[0][0], model[0][1], model[1])] == [True, False, True, True]


def test_marks_are_no_part_of_the_state() -> None:
    with smp.tensor_parallelism():
        linear = nn.Linear(2, 2)
    assert set(linear.state_dict()) == {"weight", "bias"}


# --- model_creation ---------------------------------------------------------------------------------------------------


def test_model_creation_takes_the_delay_from_the_configuration() -> None:
    smp.init({"delayed_parameter_initialization": True})
    with smp.model_creation(tensor_parallelism=True, dtype=torch.bfloat16, fused_softmax=False):
        linear = nn.Linear(2, 3)
    assert linear.weight.dtype == torch.bfloat16
    assert is_delayed(linear.weight)
    marking = marking_of(linear)
    assert marking is not None
    assert marking.enabled
    assert marking.config == {"fused_softmax": False}
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("name", ["delayed_parameter_initialization", "delay_param_initialization"])
def test_both_names_of_the_delay_work(name: str) -> None:
    smp.init()
    with smp.model_creation(**{name: True}):  # type: ignore[arg-type]
        delayed = nn.Linear(2, 3)
    with smp.model_creation(**{name: False}):  # type: ignore[arg-type]
        made = nn.Linear(2, 3)
    assert is_delayed(delayed.weight)
    assert not is_delayed(made.weight)


def test_contradicting_names_are_refused() -> None:
    smp.init()
    with (
        pytest.raises(UsageError, match="are one argument"),
        smp.model_creation(delayed_parameter_initialization=True, delay_param_initialization=False),
    ):
        pass


def test_a_dtype_of_integers_is_refused() -> None:
    with (
        pytest.raises(UsageError, match=r"floating-point torch.dtype, got torch.int8"),
        smp.model_creation(dtype=torch.int8),
    ):
        pass
