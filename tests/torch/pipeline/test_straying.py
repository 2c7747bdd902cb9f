"""Microbatches that leave the recorded path train right if all ranks leave it alike, and are named early if not."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit.errors import SmpkitError
from smpkit.torch import deadline
from smpkit.torch.pipeline.divergence import disagreement
from tests.ranks import run_ranks
from tests.torch.pipeline.training import Setup, check_same, train, train_plainly
from tests.transparency.pipeline_models import WIDTH, Case, mse_step, vectors

MANY_SECONDS = 600
"""`timeout_seconds`: whoever waits for that has not noticed."""


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


CASE = Case(Skipping, vectors, mse_step)
SETUPS = {2: Setup(4, seed=-1), 3: Setup(4, seed=4), 4: Setup(4, "simple", seed=-1)}


def stray(degree: int) -> None:
    setup = SETUPS[degree]
    check_same(train(CASE, setup, degree), train_plainly(CASE, setup))


def test_a_path_that_pythons_dice_choose_alike_on_all_ranks_trains_as_in_one_process() -> None:
    for degree in SETUPS:
        run_ranks(stray, degree, degree)


def begin(num_ranks: int) -> Any:
    smp.init(
        {"pipeline_parallel_degree": num_ranks, "microbatches": 4, "timeout_seconds": MANY_SECONDS, "ddp": True}
        | {"auto_partition": False, "default_partition": 0}
    )
    torch.manual_seed(3)
    module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(num_ranks + 1)])
    for index, layer in enumerate(module):
        smp.set_partition(layer, index % num_ranks)
    return smp.DistributedModel(module)


def told(action: Callable[[], object]) -> tuple[str, float]:
    started = time.monotonic()
    try:
        action()
    except SmpkitError as error:
        seconds = time.monotonic() - started
        deadline.report_failure(error)
        return str(error), seconds
    return "", time.monotonic() - started


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


def diverge(num_ranks: int, microbatch: int) -> tuple[str, float]:
    """Let one rank leave a layer out in one microbatch of the second step."""
    model = begin(num_ranks)
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    skipping = [False] * 8
    if microbatch >= 0:
        skipping[4 + microbatch] = smp.pp_rank() == 1
    else:
        skipping[0] = smp.pp_rank() == 1
    numbers = iter(skipping)
    return told(lambda: [own_way(model, x, numbers) for _ in range(2)])


def test_a_rank_that_leaves_the_others_way_is_named_with_its_call_long_before_the_deadline() -> None:
    for num_ranks, microbatch in ((2, 2), (3, 0), (2, -1)):
        for message, seconds in run_ranks(diverge, num_ranks, num_ranks, microbatch, timeout=120):
            assert f"another way through microbatch {max(microbatch, 0)} than pipeline rank" in message
            assert "its call 2 was `2`, not `1`" in message or "its call 2 was `1`, not `2`" in message
            assert seconds < MANY_SECONDS / 4


def test_ranks_that_have_got_differently_far_do_not_disagree() -> None:
    ways = {0: {0: ["a", "b"], 1: ["a"]}, 1: {0: ["a"]}, 2: {0: ["a", "b", "c"]}}
    assert disagreement(ways) is None
    error = disagreement(ways, ended=True)
    assert error is not None
    assert "its call 2 was `nothing more`, not `b`" in error.message
