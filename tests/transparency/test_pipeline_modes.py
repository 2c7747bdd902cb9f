"""One model in many modes, one after the other: training, evaluation, without gradients, under autocast, other sizes.

What is recorded of a step must never be used for another mode, and a mode must leave nothing behind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import smpkit.torch as smp
from smpkit.torch.step import collate
from tests.models import Case, Loop, Normed, gpt2, mse_step, tokens, vectors
from tests.ranks import run_ranks
from tests.torch.pipeline.training import (
    Plain,
    Setup,
    Trace,
    batch,
    build,
    check_same,
    flat,
    optimizer_of,
    part,
    place,
    trace_of,
    world,
)

MICROBATCHES = 2


@dataclass(frozen=True)
class Turn:
    """A call of a step.

    Args:
        training: the model's mode.
        backward: whether the step asks for it.
        mode: what is around the call.
        size: of the batch.
    """

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
        return case.step(_WithoutBackward(model), *arguments)

    return forward_only


class _WithoutBackward:
    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def backward(self, *_: Any) -> None:
        pass


def play(case: Case, model: nn.Module, train: Callable[..., Any], evaluate: Callable[..., Any]) -> list[Any]:
    """Run the script and return what each call returned."""
    optimizer = optimizer_of(list(model.parameters()))
    outputs = []
    for number, turn in enumerate(SCRIPT):
        optimizer.zero_grad()
        model.train(turn.training)
        with turn.mode():
            outputs.append(flat((train if turn.backward else evaluate)(model, *batch(case, number, turn.size))))
        if turn.backward:
            optimizer.step()
    return outputs


def played_plainly(case: Case) -> Trace:
    def over_microbatches(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(model: Any, *whole: Any) -> Any:
            parts = [[part(each, index, MICROBATCHES) for each in whole] for index in range(MICROBATCHES)]
            return collate([step(model, *arguments) for arguments in parts])

        return run

    model = Plain(build(case), MICROBATCHES)
    outputs = play(case, model, over_microbatches(case.step), over_microbatches(evaluation(case)))
    module = model.module
    values = {name: each.detach() for name, each in [*module.named_parameters(), *module.named_buffers()]}
    return Trace(outputs, {name: each.grad for name, each in module.named_parameters()}, values)


def played(case: Case, setup: Setup, degree: int) -> Trace:
    with world(setup, degree):
        module = build(case)
        if setup.seed is not None:
            place(module, setup.seed, degree)
        model = smp.DistributedModel(module)
        smp.DistributedOptimizer(optimizer_of(list(model.parameters())))
        return trace_of(play(case, model, smp.step(case.step), smp.step(evaluation(case))), model)


# --- without dropout: the same as plain PyTorch -------------------------------------------------------------------


def singles(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    x, y = vectors(size, generator)
    return x.float(), y.float()


def autocast_step(model: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Lead only the model's own part under autocast, as SMP v1's examples did."""
    with autocast():
        out = model(x)
    loss = functional.mse_loss(out.float(), y)
    model.backward(loss)
    return loss, out


def gpt2_step(model: Any, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    out = model(ids, labels=labels, use_cache=False)
    model.backward(out.loss)
    return out.loss, out.logits


SINGLE = torch.float32
PLAIN_CASES = {
    "float64": (Case(Loop, vectors, mse_step), 1e-12),
    "BatchNorm": (Case(Normed, vectors, mse_step), 1e-12),
    "autocast in the step": (Case(Loop, singles, autocast_step, SINGLE), 1e-6),
    "BatchNorm, autocast in the step": (Case(Normed, singles, autocast_step, SINGLE), 1e-6),
    "GPT-2": (Case(gpt2, tokens, gpt2_step, SINGLE), 1e-5),
}
SETUPS = {1: (None,), 2: (None, 5), 4: (-1, 3)}


def compare_all(degree: int) -> int:
    done = 0
    for name, (case, tolerance) in PLAIN_CASES.items():
        expected = played_plainly(case)
        for seed in SETUPS[degree]:
            try:
                check_same(played(case, Setup(MICROBATCHES, seed=seed), degree), expected, tolerance)
            except AssertionError as error:
                raise AssertionError(f"`{name}` at seed {seed}: {error}") from error
            done += 1
    return done


@pytest.mark.parametrize(
    "degree", [pytest.param(1, id="pp1"), pytest.param(2, id="pp2"), pytest.param(4, id="pp4", marks=pytest.mark.slow)]
)
def test_modes_in_turn_give_what_plain_pytorch_gives(degree: int) -> None:
    assert run_ranks(compare_all, degree, degree, timeout=170) == [len(PLAIN_CASES) * len(SETUPS[degree])] * degree


# --- with dropout: the same for any number of ranks -----------------------------------------------------------------


def dropping() -> nn.Module:
    return gpt2(0.1)


DROPPING = (Case(dropping, tokens, gpt2_step), Case(dropping, tokens, gpt2_step, SINGLE))


def play_dropping(degree: int) -> list[Trace]:
    return [played(case, Setup(MICROBATCHES, seed=seed), degree) for seed in SETUPS[degree] for case in DROPPING]


def test_dropout_is_the_same_on_any_number_of_ranks_with_other_modes_between() -> None:
    first = run_ranks(play_dropping, 1, 1)[0]
    assert first[0].outputs[0] != first[0].outputs[2]
    for degree in (2, 4):
        for rank in run_ranks(play_dropping, degree, degree, timeout=120):
            for index, trace in enumerate(rank):
                expected = first[index % len(DROPPING)]
                check_same(trace, expected, 1e-10 if index % len(DROPPING) == 0 else 1e-4)
