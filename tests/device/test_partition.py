"""A job on GPUs is cut as a job on CPUs is, and as `smpkit plan` shows it: by what its layers compute and keep."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import smpkit.torch as smp
from smpkit.torch.core.runtime import state
from tests.device.device import CPU_ONLY, gpu
from tests.device.ranks import run_on_gpu
from tests.ranks import run_ranks

_TOKENS, _WIDTH, _LENGTH = 5000, 64, 32


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.mixed, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.grow, self.shrink = nn.Linear(_WIDTH, hidden), nn.Linear(hidden, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mixed(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.shrink(functional.dropout(functional.gelu(self.grow(x)), 0.1))


class Model(nn.Module):
    """A large embedding, which computes nothing, a tied head, which computes much, and blocks of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_TOKENS, _WIDTH)
        self.blocks = nn.ModuleList([Block(hidden) for hidden in (64, 512, 64, 1024, 64, 256)])
        self.head = nn.Linear(_WIDTH, _TOKENS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(x)
        return scores


@smp.step
def train_step(model: Any, tokens: Tensor, half: bool) -> Tensor:
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=half):
        scores = model(tokens)
    loss = functional.cross_entropy(scores.float().flatten(0, 1), tokens.flatten())
    model.backward(loss)
    return loss


def cut(delayed: bool, half: bool, options: dict[str, Any]) -> tuple[str, dict[str, int], list[str]]:
    """Return the device, where units lie, and what was said at the level of a warning or above."""
    lines: list[str] = []
    logger = logging.getLogger("smpkit")
    logger.addHandler(handler := logging.Handler(logging.WARNING))
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True, **options})
    torch.manual_seed(3)
    with smp.delay_param_initialization() if delayed else contextlib.nullcontext():
        module = Model()
    model = smp.DistributedModel(module)
    tokens = torch.arange(4 * _LENGTH).view(4, _LENGTH) % _TOKENS
    train_step(model, tokens, half)
    assert model.pipeline is not None
    assert model.pipeline.assignment is not None
    return state.device.type, model.pipeline.assignment.partition_of, lines


@pytest.mark.parametrize("delayed", [False, True], ids=["on the CPU", "delayed"])
@pytest.mark.parametrize("options", [{}, {"memory_weight": 1.0, "optimize": "memory"}], ids=["speed", "memory"])
def test_the_partition_is_that_of_a_job_on_cpus(delayed: bool, options: dict[str, Any]) -> None:
    ours = run_on_gpu(cut, delayed, False, options)
    theirs = run_ranks(cut, 2, delayed, False, options, env=CPU_ONLY)
    assert {device for device, _, _ in ours} == {gpu().type}
    assert {device for device, _, _ in theirs} == {"cpu"}
    assert ours[0][1] == ours[1][1] == theirs[0][1]
    assert not [line for _, _, lines in ours for line in lines if "tracing" in line]


def test_the_tracing_pass_works_under_autocast() -> None:
    for _, places, lines in run_on_gpu(cut, False, True, {}):
        assert set(places.values()) == {0, 1}
        assert not [line for line in lines if "tracing" in line]
