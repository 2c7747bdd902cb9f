"""Tracebacks show the lines of the script, and all lines where smpkit itself is wrong."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit.errors import UsageError
from smpkit.torch.distributed import tracebacks
from tests.ranks import run_ranks
from tests.torch.steps import in_a_row

WIDTH = 4


class Broken(nn.Module):
    """Raises in a line of its own, in torch's, or nowhere."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "own":
            raise ValueError("no such layer")
        return self.linear(x[:, 1:] if self.how == "torch" else x)


@smp.step
def train_step(model: Any, x: Tensor, how: str) -> Tensor:
    y = model(x)
    loss: Tensor = (y @ x).mean() if how == "between" else y.mean()
    if how == "refused":
        loss.backward()
    model.backward(loss)
    return loss


def shown(how: str) -> list[str]:
    """Return which functions the traceback names, for rank 0, whose layer it is."""
    model = in_a_row(Broken(how), nn.Linear(WIDTH, WIDTH), microbatches=2)
    try:
        train_step(model, torch.ones(4, WIDTH), how)
    except Exception as error:
        tracebacks.shorten(error)
        return [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    return []


@pytest.mark.parametrize(
    ("how", "rank", "names"),
    [
        pytest.param("own", 0, ["shown", "train_step", "forward"], id="a line of the script"),
        pytest.param("between", 1, ["shown", "train_step"], id="an operation between units"),
        pytest.param("refused", 0, ["shown", "train_step"], id="something refused"),
    ],
)
def test_only_the_lines_of_the_script_are_shown(how: str, rank: int, names: list[str]) -> None:
    assert run_ranks(shown, 2, how)[rank] == names


def test_what_torch_did_after_the_last_line_of_the_script_is_shown() -> None:
    names = run_ranks(shown, 2, "torch")[0]
    assert names[:3] == ["shown", "train_step", "forward"]
    assert names[-1] == "forward"
    assert "run_on_owner" not in names


def test_an_error_that_was_not_foreseen_keeps_all_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong() -> None:
        raise KeyError("a mistake of smpkit's")

    with pytest.raises(KeyError) as caught:
        wrong()
    monkeypatch.setattr(tracebacks, "_OURS", (__file__,))
    before = traceback.extract_tb(caught.value.__traceback__)
    tracebacks.shorten(caught.value)
    assert traceback.extract_tb(caught.value.__traceback__) == before


def test_errors_behind_an_error_are_shortened_too() -> None:
    def outer() -> None:
        try:
            smp.barrier()
        except UsageError as error:
            raise ValueError("outer") from error

    with pytest.raises(ValueError, match="outer") as caught:
        outer()
    tracebacks.shorten(caught.value)
    assert caught.value.__cause__ is not None
    assert [frame.name for frame in traceback.extract_tb(caught.value.__cause__.__traceback__)] == ["outer"]


# Diffusers' EMAModel from before; torchvision's ExponentialMovingAverage; timm's AGC; safetensors; torch's example
# of a language model.
MEETS_PARTS: dict[str, Callable[[Any, Any], object]] = {
    "copies": lambda before, model: [old - now for old, now in zip(before, model.parameters(), strict=True)],
    "a copy": lambda _, model: torch.optim.swa_utils.AveragedModel(model.module),
    "adaptive": lambda _, model: [each.grad.norm(dim=0).clamp_(min=1e-3) for each in model.parameters()],
    "a file": lambda _, model: safetensors.torch.save(dict(model.named_parameters())),
    "update": lambda _, model: [each.data.add_(each.grad, alpha=-0.1) for each in model.parameters()],
    "scaled": lambda _, model: [0.1 * each.grad for each in model.parameters()],
}


def notes_on(config: dict[str, Any], what: str) -> list[str]:
    smp.init({"microbatches": 2, "ddp": True, **config})
    module = nn.Sequential(Broken(""), nn.Linear(WIDTH, WIDTH))
    before = [each.detach().clone() for each in module.parameters()]
    model = smp.DistributedModel(module)
    train_step(model, torch.ones(WIDTH, WIDTH), "")
    with pytest.raises((AssertionError, RuntimeError, TypeError)) as caught:
        MEETS_PARTS[what](before, model)
    tracebacks.explain_parts(caught.value)
    return caught.value.__notes__


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("config", "what", "note"),
    [
        ({"sharded_data_parallel_degree": 2}, "copies", "averages of weights (EMA, SWA) copy each of"),
        ({"sharded_data_parallel_degree": 2}, "a copy", "copy each of `model.parameters()` after"),
        ({"sharded_data_parallel_degree": 2}, "adaptive", "made DTensors of the weights and their gradients"),
        ({"sharded_data_parallel_degree": 2}, "a file", "let all ranks call `model.state_dict()`"),
        ({"pipeline_parallel_degree": 2}, "update", "go through `model.local_parameters()`"),
        ({"shard_optimizer_state": True}, "scaled", "leave the update to smp.DistributedOptimizer"),
    ],
)
def test_an_error_of_torch_says_that_a_rank_has_parts(config: dict[str, Any], what: str, note: str) -> None:
    for notes in run_ranks(notes_on, 2, config, what):
        assert note in "".join(notes)
