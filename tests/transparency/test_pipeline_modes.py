"""One model in many modes, one after the other: training, evaluation, without gradients, under autocast, other sizes.

What is recorded of a step must never be used for another mode, and a mode must leave nothing behind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smpkit.torch as smp
from tests.models import Case, Normed, autocast_step, gpt2, mse_step, singles, tokens, vectors
from tests.pairwise import slow
from tests.ranks import run_ranks
from tests.train import OPTIMIZERS, Plain, Trace, Way, batch, check_same, flat, trace_of, training

MICROBATCHES = 2


@dataclass(frozen=True)
class Turn:
    """A call of a step: the model's mode, whether it asks for a backward, what is around it, and the batch's size."""

    training: bool = True
    backward: bool = True
    mode: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    size: int = 8


def autocast() -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


@contextlib.contextmanager
def autocast_evaluation() -> Any:
    with autocast(), torch.no_grad():
        yield


SCRIPT = (
    Turn(),
    Turn(training=False, backward=False, mode=torch.no_grad, size=4),
    Turn(),
    Turn(mode=autocast),
    Turn(training=False, backward=False, size=12),
    Turn(training=False, backward=False, mode=autocast_evaluation),
    Turn(training=False, backward=False, mode=torch.inference_mode),
    Turn(mode=autocast, size=4),
    Turn(training=False),
    Turn(backward=False, mode=torch.no_grad),
    Turn(backward=False),
    Turn(size=4),
    Turn(),
)


def evaluation(case: Case) -> Callable[..., Any]:
    """Return the step of a case without its backward."""

    def forward_only(model: Any, *arguments: Any) -> Any:
        silent: Any = Plain(model, 1)
        silent.backward = lambda *_: None
        return case.step(silent, *arguments)

    return forward_only


def play(case: Case, model: nn.Module, train: Callable[..., Any], evaluate: Callable[..., Any]) -> list[Any]:
    """Run the script and return what each call returned."""
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    outputs = []
    for number, turn in enumerate(SCRIPT):
        optimizer.zero_grad()
        model.train(turn.training)
        with turn.mode():
            outputs.append(flat((train if turn.backward else evaluate)(model, *batch(case, number, turn.size))))
        if turn.backward:
            optimizer.step()
    return outputs


def played(case: Case, way: Way) -> Trace:
    with training(case, way) as trained:
        outputs = play(case, trained.model, smp.step(case.step), smp.step(evaluation(case)))
        return trace_of(outputs, trained.model)


def gpt2_step(model: Any, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    out = model(ids, labels=labels, use_cache=False)
    model.backward(out.loss)
    return out.loss, out.logits


DROPPING, SINGLE = partial(gpt2, 0.1), torch.float32
CASES = {
    "BatchNorm": (Case(Normed, vectors, mse_step), 1e-12),
    "BatchNorm, autocast in the step": (Case(Normed, singles, autocast_step, SINGLE), 1e-6),
    "dropout": (Case(DROPPING, tokens, gpt2_step), 1e-10),
    "dropout in float32": (Case(DROPPING, tokens, gpt2_step, SINGLE), 1e-4),
}
ANYWHERE = Way(pipeline=2, microbatches=MICROBATCHES, placement=5)
MORE = [replace(ANYWHERE, pipeline=degree, placement=placement) for degree, placement in ((2, None), (4, -1), (4, 3))]


@pytest.mark.parametrize("way", [ANYWHERE, *slow((way,) for way in MORE)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_modes_in_turn_give_on_any_number_of_ranks_what_they_give_on_one(name: str, way: Way) -> None:
    case, tolerance = CASES[name]
    [expected] = run_ranks(played, 1, case, Way(microbatches=MICROBATCHES))
    assert expected.outputs[0] != expected.outputs[2]
    for trace in run_ranks(played, way.ranks, case, way):
        check_same(trace, expected, tolerance)
