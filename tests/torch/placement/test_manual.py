"""Placing modules by hand: `smp.partition`, `smp.set_partition`, `default_partition`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import smpkit.torch as smp
from smpkit.errors import UsageError
from smpkit.torch.placement.manual import inherit_partition, manual_placement
from tests.ranks import run_ranks

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


@smp.step
def train_step(model: Any, x: Tensor) -> Tensor:
    loss = functional.mse_loss(model(x), x)
    model.backward(loss)
    return loss


def begin(**options: Any) -> None:
    smp.init({"pipeline_parallel_degree": 4, "microbatches": 4, "ddp": True, **options})
    torch.manual_seed(3)


def placed(module: nn.Module) -> dict[str, int]:
    """Train a step and return where the parts are."""
    model = smp.DistributedModel(module)
    x = torch.ones(8, WIDTH)
    expected = functional.mse_loss(module(x), x).item()
    assert train_step(model, x).reduce_mean().item() == pytest.approx(expected, rel=1e-5)
    assert model.pipeline is not None
    assert model.pipeline.assignment is not None
    return model.pipeline.assignment.partition_of


def nested() -> dict[str, int]:
    begin(auto_partition=False, default_partition=2)
    return placed(Nested())


def test_the_innermost_context_wins_and_what_is_in_none_goes_to_the_default() -> None:
    expected = {"first": 1, "inner.0": 2, "inner.1": 2, "second": 1, "innermost": 3, "nowhere": 2}
    assert run_ranks(nested, 4) == [expected] * 4


def moved() -> dict[str, int]:
    begin(auto_partition=False, default_partition=0)
    module = Nested()
    smp.set_partition(module, 0)
    smp.set_partition(module.inner, 1)
    smp.set_partition(module.inner[1], 3)
    return placed(module)


def test_what_is_said_last_counts() -> None:
    partitions = run_ranks(moved, 4)[0]
    assert partitions.pop("inner.0") == 1
    assert partitions.pop("inner.1") == 3
    assert set(partitions.values()) == {0}


def ignored() -> dict[str, int]:
    begin()
    module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    smp.set_partition(module, 3)
    return placed(module)


def test_a_script_for_many_pipeline_ranks_runs_on_one(world: None) -> None:
    smp.init()
    with smp.partition(3):
        layer = nn.Linear(2, 2)
    smp.set_partition(layer, 5)
    with pytest.raises(UsageError, match="partition -1 is no pipeline rank"), smp.partition(-1):
        pass


def test_automatic_partitioning_takes_no_notice() -> None:
    assert list(run_ranks(ignored, 4)[0].values()) == [0, 1, 2, 3]


def divided() -> tuple[dict[str, int], str]:
    options = {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "auto_partition": False}
    begin(**options, default_partition=0)
    with smp.tensor_parallelism():
        module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        for layer, index in zip(module, (0, 1, 0, 1), strict=True):
            smp.set_partition(layer, index)
    x = torch.ones(8, WIDTH)
    apart = nn.TransformerEncoderLayer(WIDTH, 2, 8)
    smp.set_partition(apart.linear1, 0)
    smp.set_partition(apart.linear2, 1)
    with pytest.raises(UsageError) as caught:
        inherit_partition("layer", apart, nn.Linear(2, 2))
    expected = functional.mse_loss(module(x), x).item()
    model = smp.DistributedModel(module)
    assert train_step(model, x).reduce_mean().item() == pytest.approx(expected, rel=1e-5)
    assert model.pipeline is not None
    assert model.pipeline.assignment is not None
    return model.pipeline.assignment.partition_of, caught.value.message


def test_what_tensor_parallelism_puts_in_the_place_of_modules_is_where_they_were() -> None:
    for partitions, message in run_ranks(divided, 4):
        assert partitions == {"0": 0, "1": 1, "2": 0, "3": 1}
        assert message.startswith(
            "parts of `layer` are placed on the pipeline ranks 0, 1, and tensor parallelism makes"
        )


def refused(auto_partition: bool) -> list[str]:
    begin(auto_partition=auto_partition, **({} if auto_partition else {"default_partition": 0}))
    messages = []
    module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    for rank, layer in enumerate(module):
        smp.set_partition(layer, rank)
    for index in (4, -1, True, 1.0):
        with pytest.raises(UsageError) as caught:
            smp.set_partition(module, index)  # type: ignore[arg-type]
        messages.append(str(caught.value))
        with pytest.raises(UsageError), smp.partition(index):  # type: ignore[arg-type]
            pass
    with pytest.raises(ZeroDivisionError), smp.partition(1):
        _ = 1 / 0
    assert not manual_placement(nn.Linear(2, 2)).partitions, "a context that raised is still open"
    placed(module)
    with pytest.raises(UsageError, match="has been partitioned"):
        smp.set_partition(module, 0)
    return messages


@pytest.mark.parametrize("auto_partition", [False, True])
def test_a_partition_that_is_none_is_refused(auto_partition: bool) -> None:
    for messages in run_ranks(refused, 4, auto_partition):
        assert messages[0] == ("partition 4 is no pipeline rank; pipeline_parallel_degree is 4\nhint: valid are 0 to 3")
        assert [text.split()[1] for text in messages] == ["4", "-1", "True", "1.0"]
