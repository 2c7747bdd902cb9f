"""Where values decide which module gets what, it is not cut, and trains over a pipeline as in one process."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.models import TOKENS, WIDTH, Case, block, mse_step, tokens, vectors
from tests.ranks import run_ranks
from tests.torch.pipeline.training import Setup, run_all


class Experts(nn.Module):
    """A mixture of experts as it is written by hand; also found in code that comes with checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3, bias=False)
        self.experts = nn.ModuleList([block() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = torch.topk(self.gate(x).softmax(-1), 2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            if len(rows):
                out.index_add_(0, rows, expert(x[rows]) * weights[rows, places, None])
        return out


class Mixing(nn.Module):
    """Experts that are no child of a stack, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Experts()
        self.layers = nn.ModuleList([Experts() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


class Adaptive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(TOKENS, WIDTH), block(), block())
        self.loss = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, TOKENS, [2, 6])

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        return self.loss(self.body(ids).flatten(0, 1), labels.flatten())


def adaptive_step(model: Any, ids: Tensor, labels: Tensor) -> Any:
    out = model(ids, labels)
    model.backward(out.loss)
    return out.loss, out.output


class Averaging(nn.Module):
    """Keeps a running mean, and has nothing that would give it a place on one rank."""

    mean: Tensor
    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.mean[0] += functional.relu(x[0, 0])
            torch.maximum(self.largest, x.max(), out=self.largest)
        return (x - self.mean) / (1 + self.largest)


def averaging() -> nn.Module:
    return nn.Sequential(block(), Averaging(), block(), Averaging())


CASES = {
    "experts": Case(Mixing, vectors, mse_step),
    "adaptive": Case(Adaptive, tokens, adaptive_step),
    "averages": Case(averaging, vectors, mse_step),
}
SETUPS = [Setup(2, "interleaved", None, (8, 8, 8)), Setup(4, "simple", 3, (8, 8))]


def train() -> int:
    warnings.simplefilter("ignore")  # averages that all ranks need let them wait for each other
    return len(run_all(CASES, SETUPS, 2))


def test_what_values_decide_trains_as_in_one_process() -> None:
    assert run_ranks(train, 2, timeout=120) == [len(CASES)] * 2
