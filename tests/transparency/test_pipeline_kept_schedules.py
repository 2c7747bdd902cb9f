"""Steps whose shapes, numbers or values change keep the schedule, and train as in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from smpkit.torch.pipeline.executor import Executor
from tests.models import TOKENS, WIDTH, Case, block, tokens
from tests.ranks import run_ranks
from tests.torch.pipeline.training import Setup, compare

SETUP = Setup(4, seed=-1, batches=(8, 8, 8, 8, 8))


class Tagger(nn.Module):
    """Labels tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x) + x
        logits: Tensor = self.head(x)
        return logits


def some_labels(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    """Ignore tokens by chance, so that each microbatch has another number of targets."""
    ids, labels = tokens(size, generator)
    return ids, labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.4, -100)


def masked_step(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    logits, mask = model(ids), labels != -100
    loss = functional.cross_entropy(logits[mask], labels[mask])
    model.backward(loss)
    return loss


def masked_module_step(model: Any, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits, mask = model(ids), labels != -100
    chosen = logits.masked_select(mask[..., None]).view(-1, TOKENS)
    loss = nn.CrossEntropyLoss(reduction="none")(chosen, labels[mask]).mean()
    model.backward(loss)
    return loss, chosen


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


def branching_step(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    loss = functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
    if loss > 2.4:
        loss = loss * 0.5
    else:
        loss = (loss - 2).abs()
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
    "branch": Case(Tagger, some_labels, branching_step),
    "skipped backward": Case(Tagger, some_labels, skipping_step),
    "masked": Case(Tagger, some_labels, masked_step),
    "masked, losses returned": Case(Tagger, some_labels, masked_module_step),
    "masked under autocast": Case(Tagger, some_labels, masked_in_bfloat16_step, torch.float32),
}


@contextmanager
def watched(schedules: list[str]) -> Iterator[list[int]]:
    """Collect what each step followed, and count the plans that were abandoned."""
    abandoned: list[int] = []
    run, record_again = Executor.run, Executor._record_again

    def noting_run(self: Executor, *args: Any) -> list[Any]:
        outputs = run(self, *args)
        schedules.append(str(self.last_schedule))
        return outputs

    def noting_abandoned(self: Executor, *args: Any) -> None:
        abandoned.append(len(schedules))
        record_again(self, *args)

    Executor.run, Executor._record_again = noting_run, noting_abandoned  # type: ignore[assignment, method-assign]
    try:
        yield abandoned
    finally:
        Executor.run, Executor._record_again = run, record_again  # type: ignore[method-assign]


def train(cases: dict[str, Case], setups: list[Setup], degree: int) -> dict[str, tuple[list[int], bool]]:
    """Compare with one process; return by case in which steps plans were abandoned, and whether all steps had one."""
    found = {}
    for name, case in cases.items():
        for setup in setups:
            schedules: list[str] = []
            with watched(schedules) as abandoned:
                compare(case, setup, degree)
            found[f"{name}, {setup.pipeline}"] = (abandoned, "None" not in schedules)
    return found


@pytest.mark.parametrize("degree", [2, 4])
def test_the_schedule_is_kept(degree: int) -> None:
    setups = [SETUP, replace(SETUP, pipeline="simple")][: 2 if degree == 2 else 1]
    for found in run_ranks(train, degree, CASES, setups, degree, timeout=120):
        assert found == dict.fromkeys(found, ([], True))
        assert len(found) == len(CASES) * len(setups)


class Detour(Tagger):
    """Calls other layers where a value or a number says so."""

    def forward(self, ids: Tensor, depth: int = 4) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers[:depth]:
            x = layer(x) + x
        if x.square().mean() > 2.5:
            x = self.layers[0](x)
        logits: Tensor = self.head(x)
        return logits


def deep_step(model: Any, ids: Tensor, labels: Tensor, depth: int) -> Tensor:
    loss = functional.cross_entropy(model(ids, depth).flatten(0, 1), labels.flatten())
    model.backward(loss)
    return loss


def of_any_depth(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    return *tokens(size, generator), int(torch.randint(2, 5, (1,), generator=generator))


def train_on_detours(setups: list[Setup], degree: int) -> int:
    return len(train({"detour": Case(Detour, of_any_depth, deep_step)}, setups, degree))


@pytest.mark.parametrize("degree", [2, 3])
def test_branches_after_which_other_layers_are_called_train_right(degree: int) -> None:
    setups = [replace(SETUP, seed=seed, pipeline=name) for seed, name in ((-1, "interleaved"), (5, "simple"))]
    assert run_ranks(train_on_detours, degree, setups, degree, timeout=120) == [2] * degree
