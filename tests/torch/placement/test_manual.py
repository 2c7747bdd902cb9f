"""Placing modules by hand: `smp.partition`, `smp.set_partition`, `default_partition`."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit.errors import UsageError
from smpkit.torch.placement.manual import inherit_partition, manual_placement
from tests.torch.steps import assignment, on_ranks, train_step

WIDTH = 4


class Nested(nn.Module):
    """Blocks in blocks: what is made in the inner one belongs to it, what follows to the outer one again."""

    def __init__(self) -> None:
        super().__init__()
        with smp.partition(1):
            self.first = nn.Linear(WIDTH, WIDTH)
            with smp.partition(2):
                self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
            self.second = nn.Linear(WIDTH, WIDTH)
            with smp.partition(0), smp.partition(3):
                self.innermost = nn.Linear(WIDTH, WIDTH)
        self.nowhere = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.children():
            x = part(x)
        return x


def begin(**options: Any) -> None:
    smp.init({"pipeline_parallel_degree": 4, "microbatches": 4, "ddp": True, **options})
    torch.manual_seed(3)


def in_a_row() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])


def placed(module: nn.Module) -> dict[str, int]:
    """Train a step and return where the parts are."""
    x = torch.ones(8, WIDTH)
    expected = module(x).square().mean().item()
    model = smp.DistributedModel(module)
    assert train_step(model, x).reduce_mean().item() == pytest.approx(expected, rel=1e-5)
    return assignment()


@on_ranks(4)
def test_the_innermost_context_wins_and_what_is_in_none_goes_to_the_default() -> None:
    begin(auto_partition=False, default_partition=2)
    expected = {"first": 1, "inner.0": 2, "inner.1": 2, "second": 1, "innermost": 3, "nowhere": 2}
    assert placed(Nested()) == expected


@on_ranks(4)
def test_what_is_said_last_counts() -> None:
    begin(auto_partition=False, default_partition=0)
    module = Nested()
    smp.set_partition(module, 0)
    smp.set_partition(module.inner, 1)
    smp.set_partition(module.inner[1], 3)
    assert placed(module) == {"first": 0, "inner.0": 1, "inner.1": 3, "second": 0, "innermost": 0, "nowhere": 0}


def test_a_script_for_many_pipeline_ranks_runs_on_one(world: None) -> None:
    smp.init()
    with smp.partition(3):
        layer = nn.Linear(2, 2)
    smp.set_partition(layer, 5)
    with pytest.raises(UsageError, match="partition -1 is no pipeline rank"), smp.partition(-1):
        pass


@on_ranks(4)
def test_automatic_partitioning_takes_no_notice() -> None:
    begin()
    module = in_a_row()
    smp.set_partition(module, 3)
    assert list(placed(module).values()) == [0, 1, 2, 3]


@on_ranks(4)
def test_what_tensor_parallelism_puts_in_the_place_of_modules_is_where_they_were() -> None:
    begin(pipeline_parallel_degree=2, tensor_parallel_degree=2, auto_partition=False, default_partition=0)
    apart = nn.TransformerEncoderLayer(WIDTH, 2, 8)
    smp.set_partition(apart.linear1, 0)
    smp.set_partition(apart.linear2, 1)
    with pytest.raises(UsageError, match="parts of `layer` are placed on the pipeline ranks 0, 1, and tensor paral"):
        inherit_partition("layer", apart, nn.Linear(2, 2))
    with smp.tensor_parallelism():
        module = in_a_row()
        for layer, index in zip(module, (0, 1, 0, 1), strict=True):
            smp.set_partition(layer, index)
    assert placed(module) == {"0": 0, "1": 1, "2": 0, "3": 1}


@pytest.mark.parametrize("auto_partition", [False, True])
@on_ranks(4)
def test_a_partition_that_is_none_is_refused(auto_partition: bool) -> None:
    begin(auto_partition=auto_partition, **({} if auto_partition else {"default_partition": 0}))
    module = in_a_row()
    for rank, layer in enumerate(module):
        smp.set_partition(layer, rank)
    for index in (4, -1, True, 1.0):
        message = re.escape(
            f"partition {index} is no pipeline rank; pipeline_parallel_degree is 4\nhint: valid are 0 to 3"
        )
        with pytest.raises(UsageError, match=message):
            smp.set_partition(module, index)  # type: ignore[arg-type]
        with pytest.raises(UsageError), smp.partition(index):  # type: ignore[arg-type]
            pass
    with pytest.raises(ZeroDivisionError), smp.partition(1):
        _ = 1 / 0
    assert not manual_placement(nn.Linear(2, 2)).partitions, "a context that raised is still open"
    placed(module)
    with pytest.raises(UsageError, match="has been partitioned"):
        smp.set_partition(module, 0)
