"""What a pipeline keeps of the shapes inside a step stays bounded, and what it cannot do is said."""

from __future__ import annotations

import linecache
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from smpkit.errors import UnsupportedError
from smpkit.torch.pipeline import executor as executor_module
from smpkit.torch.pipeline import microbatch
from tests.torch.steps import asking_step, executor, in_a_row, on_ranks, over_ranks, train_step


@smp.step
def masked_step(model: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x)[mask].square().sum()
    model.backward(loss)
    return loss


@smp.step
def masked_between_step(model: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    first, second = model.module
    loss: torch.Tensor = second(first(x)[mask]).square().sum()
    model.backward(loss)
    return loss


def begin() -> Any:
    torch.manual_seed(0)
    return in_a_row(nn.Linear(2, 2), nn.Linear(2, 2))


@on_ranks(2)
def test_a_mask_of_another_count_in_each_step_leaves_the_table_bounded_and_the_loss_right() -> None:
    executor_module.MAX_OUTPUT_SPECS = 12  # type: ignore[misc]
    model = begin()
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    plain.load_state_dict(model.state_dict())
    for step in range(40):
        x, mask = torch.arange(80.0).view(40, 2) / 40, torch.arange(40) < step + 1
        loss = masked_step(model, x, mask).reduce_mean().item()
        assert loss == pytest.approx(plain(x)[mask].square().sum().item(), rel=1e-5)
        assert sum(len(known.output_specs) for known in executor()._kinds.values()) < 12 + 12


@on_ranks(2)
def test_too_many_values_between_ranks_are_an_error_with_a_way_out() -> None:
    microbatch.TRANSFERS_PER_MICROBATCH = 1  # type: ignore[attr-defined]
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model = over_ranks(module, {module[1]: 1})
    message = "one microbatch sends more than 1 values between pipeline ranks, the last for `2`(?s:.*)hint: put a loop"
    with pytest.raises(UnsupportedError, match=message):
        train_step(model, torch.ones(2, 2))


@smp.step
def branching_step(model: Any, x: torch.Tensor) -> torch.Tensor:
    first, second = model.module
    hidden = first(x)
    if (x + 0 * hidden).sum() > 0:
        hidden = first(second(hidden))
    loss: torch.Tensor = second(hidden).square().sum()
    model.backward(loss)
    return loss


@pytest.mark.parametrize(
    ("name", "how", "line"),
    [
        ("mask", "it sent float32[2, 2] from rank 0 to rank 1 for `1`, where the first one sent", "second(first(x)["),
        ("branch", "it ended before the first one", "branching_step"),
        ("value", "", ""),
        ("plain", "", ""),
    ],
)
@on_ranks(2)
def test_a_step_that_loses_its_schedule_says_so_once_at_the_line_of_the_script(name: str, how: str, line: str) -> None:
    model, had_schedule = begin(), list[bool]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(8):
            x = torch.arange(16.0).view(8, 2) * (-1) ** step
            if name == "mask":
                masked_between_step(model, x, torch.arange(8) < step + 1)
            else:
                {"branch": branching_step, "value": asking_step, "plain": train_step}[name](model, x)
            had_schedule.append(executor().last_schedule is not None)
    warned = [each for each in caught if "follow no schedule" in str(each.message)]
    assert smp.allgather(had_schedule) == [had_schedule] * 2
    assert len(warned) == (bool(how) and smp.rank() == 0)
    assert had_schedule[-2:] == [False] * 2 if how else had_schedule == [True] * 8
    for warning in warned:
        assert how in str(warning.message)
        assert "hand the same layers the same shapes" in str(warning.message)
        assert warning.filename == __file__
        assert line in linecache.getline(warning.filename, warning.lineno)
