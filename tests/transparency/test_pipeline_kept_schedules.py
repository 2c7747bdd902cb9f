"""Steps whose shapes, numbers or values change keep the schedule, and train as in one process."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from smpkit.torch.pipeline.executor import Executor
from tests.models import TOKENS, WIDTH, Case, Does, Tied, block, tokens
from tests.train import Trace, Way, same, train


class Tagger(Tied):
    """Labels tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, TOKENS)


class Cooled(nn.Linear):
    """Divides by a temperature."""

    def forward(self, x: Tensor, temperature: float) -> Tensor:  # type: ignore[override]
        return super().forward(x) / temperature


def annealed() -> nn.Module:
    """Return a model that hands a number that changes from step to step to a layer."""
    parts = {"embed": nn.Embedding(TOKENS, WIDTH), "layer": block(), "head": Cooled(WIDTH, TOKENS)}
    return Does(lambda own, ids, temperature: own.head(own.layer(own.embed(ids)), temperature), **parts)


def some_labels(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    """Ignore tokens by chance, so that each microbatch has another number of targets."""
    ids, labels = tokens(size, generator)
    return ids, labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.4, -100)


def masked_step(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    logits, mask = model(ids), labels != -100
    loss = functional.cross_entropy(logits[mask], labels[mask])
    model.backward(loss)
    return loss


def masked_in_bfloat16_step(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits, mask = model(ids), labels != -100
        chosen = logits[mask] @ torch.ones(TOKENS, TOKENS) + logits[mask]
        loss = functional.cross_entropy(chosen, labels[mask])
    model.backward(loss)
    return loss


def with_numbers(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    return *some_labels(size, generator), float(torch.rand(1, generator=generator)), size % 3 + int(size / 7)


def scaled_step(model: Any, ids: Tensor, labels: Tensor, scale: float, power: int) -> Tensor:
    loss = functional.cross_entropy(model(ids).flatten(0, 1) * scale, labels.flatten()) ** power / (power + 1)
    model.backward(loss)
    return loss


def annealed_step(model: Any, ids: Tensor, labels: Tensor, scale: float, _: int) -> Tensor:
    loss = functional.cross_entropy(model(ids, 1 + scale).flatten(0, 1), labels.flatten())
    model.backward(loss)
    return loss


def branching_step(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    loss = functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
    loss = loss * 0.5 if loss > 2.4 else (loss - 2).abs()
    model.backward(loss)
    return loss


def skipping_step(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    loss = functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
    if loss < 2.4:
        model.backward(loss)
    return loss


def of_any_length(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    length = int(torch.randint(2, 9, (1,), generator=generator))
    ids = torch.randint(TOKENS, (size, length + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


CASES = {
    "lengths": Case(Tagger, of_any_length, masked_step),
    "numbers": Case(Tagger, with_numbers, scaled_step),
    "a number for a layer": Case(annealed, with_numbers, annealed_step),
    "branch": Case(Tagger, some_labels, branching_step),
    "skipped backward": Case(Tagger, some_labels, skipping_step),
    "masked": Case(Tagger, some_labels, masked_step),
    "masked under autocast": Case(Tagger, some_labels, masked_in_bfloat16_step, torch.float32),
}


def train_on_schedule(case: Case, way: Way) -> Trace:
    """Train, and see that every step followed a schedule to its end."""
    followed = []
    run = Executor.run

    def noting_run(self: Executor, *args: Any) -> list[Any]:
        outputs = run(self, *args)
        followed.append(self.last_schedule is not None)
        return outputs

    with mock.patch.object(Executor, "run", noting_run), mock.patch.object(Executor, "_give_up_schedule") as given_up:
        trace = train(case, way)
    assert followed == [True] * len(way.batches)
    assert not given_up.called
    return trace


@pytest.mark.parametrize("case", CASES)
def test_the_schedule_is_kept(case: str) -> None:
    same(CASES[case], Way(pipeline=2, placement=-1, batches=(8, 8, 8, 8, 8)), by=train_on_schedule)
