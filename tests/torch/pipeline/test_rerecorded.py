"""Microbatches that leave the recorded path train right if all ranks leave it alike, and are named early if not."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit.torch.pipeline.divergence import trace_mismatch
from tests.models import WIDTH, Case, mse_step, vectors
from tests.ranks import run_ranks
from tests.torch.steps import MANY_SECONDS, error_of, executor, on_ranks, over_ranks
from tests.train import Way, same


class Skipping(nn.Module):
    """Leaves layers out as Python's dice say, which the first input seeds, and cuts what it computes at places."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        dice = random.Random(float(x[0, 0]))
        for layer in self.layers:
            if dice.random() < 0.7:
                x = torch.tanh(layer(x)) + x
        rows = dice.randrange(1, x.shape[0] + 1)
        return torch.cat([self.layers[0](x[:rows]), x[rows:]])


SKIPPING = Case(Skipping, vectors, mse_step)
WAYS = [
    Way(pipeline=2, placement=-1),
    Way(pipeline=3, placement=4),
    Way(pipeline=4, placement=-1, config={"pipeline": "simple"}),
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_path_that_pythons_dice_choose_alike_on_all_ranks_trains_as_in_one_process(way: Way) -> None:
    same(SKIPPING, way)


def begin(num_ranks: int) -> Any:
    torch.manual_seed(3)
    module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(num_ranks + 1)])
    places: dict[nn.Module, int] = {layer: index % num_ranks for index, layer in enumerate(module)}
    return over_ranks(module, places, microbatches=4, timeout_seconds=MANY_SECONDS)


@smp.step
def own_way(model: Any, x: Tensor, skipping: Any) -> Tensor:
    layers = list(model.module)
    if next(skipping):
        layers.pop(1)
    for layer in layers:
        x = layer(x)
    loss = x.square().mean()
    model.backward(loss)
    return loss


def diverge(num_ranks: int, microbatch: int) -> str:
    """Let one rank leave a layer out in one microbatch, counted from the second step."""
    model = begin(num_ranks)
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    numbers = iter([number == 4 + microbatch and smp.pp_rank() == 1 for number in range(8)])
    return error_of(lambda: [own_way(model, x, numbers) for _ in range(2)])


@pytest.mark.parametrize(("size", "num_ranks", "microbatch"), [(4, 2, 2), (3, 3, 0), (2, 2, -4)])
def test_a_rank_that_takes_another_way_is_named_with_its_call(size: int, num_ranks: int, microbatch: int) -> None:
    for message in run_ranks(diverge, size, num_ranks, microbatch):
        assert f"another way through microbatch {max(microbatch, 0)} than pipeline rank" in message
        assert "its call 2 was `2`, not `1`" in message or "its call 2 was `1`, not `2`" in message


@on_ranks(2)
def test_a_step_that_has_diverged_has_no_schedule_from_then_on() -> None:
    model, planned = begin(2), []
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    skipping = iter([number == 6 for number in range(16)])
    for _ in range(4):
        own_way(model, x, skipping)
        planned.append(executor().last_schedule is not None)
    assert planned == [True, True, False, False]


@smp.step
def as_far(model: Any, x: Tensor, lengths: Any) -> Tensor:
    for layer in list(model.module)[: next(lengths)]:
        x = layer(x)
    loss = x.square().mean()
    model.backward(loss)
    return loss


@on_ranks(2)
def test_what_was_received_early_for_a_way_that_ends_sooner_takes_nothing_of_later_steps() -> None:
    """Let all microbatches end before the record does, and then train a larger batch."""
    model = begin(2)
    torch.manual_seed(3)
    plain = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1))
    lengths = iter([3] * 4 + [2] * 4 + [3] * 4)
    for rows in (8, 8, 16):
        model.zero_grad()
        as_far(model, x[:rows], lengths)
    for part in x.chunk(4):
        (plain(part).square().mean() / 4).backward()
    expected = dict(plain.named_parameters())
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad)


def test_ranks_that_have_got_differently_far_do_not_disagree() -> None:
    ways = {0: {0: ["a", "b"], 1: ["a"]}, 1: {0: ["a"]}, 2: {0: ["a", "b", "c"]}}
    assert trace_mismatch(ways) is None
    error: Any = trace_mismatch(ways, ended=True)
    assert "its call 2 was `nothing more`, not `b`" in error.message
