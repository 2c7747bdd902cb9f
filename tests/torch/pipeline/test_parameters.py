"""A weight that another pipeline rank holds has no numbers here: what needs them says so, and all else goes on."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit.errors import UsageError
from smpkit.torch.distributed import deadline
from tests.models import WIDTH, Case, vectors
from tests.ranks import run_ranks
from tests.torch.steps import over_ranks
from tests.train import Way, same


class Reads(nn.Module):
    """Looks, in its forward, at a weight that is another module's."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.others = [other]
        self.reads = False

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x)
        return result * self.others[0].weight.norm() if self.reads else result


def build() -> nn.Sequential:
    torch.manual_seed(3)
    first = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(first, nn.LayerNorm(WIDTH), Reads(first), nn.Embedding(4, WIDTH))


def loss_of(module: Any, x: Tensor) -> Tensor:
    x = module[:3](x)
    return x.square().mean() + (x @ module[3].weight.T).mean(0).sum()


@smp.step
def train_step(model: Any, x: Tensor) -> Tensor:
    loss = loss_of(model.module, x)
    model.backward(loss)
    return loss


def begin() -> Any:
    """Return a model whose first half lies on one rank and whose other on the next, after a step."""
    module = build()
    model = over_ranks(module, {layer: number // 2 for number, layer in enumerate(module)}, microbatches=2)
    train_step(model, torch.ones(4, WIDTH))
    return model


def shadows(weight: Any) -> None:
    torch.zeros(weight.shape).mul_(0.9).add_(weight.detach())


READS: dict[str, Callable[[Any], object]] = {
    "item": lambda weight: weight[0, 0].item(),
    "number": lambda weight: float(sum(part.norm() for part in weight)),
    "branch": lambda weight: bool((torch.ones(()) + weight.data).max() > 0),
    "largest": lambda weight: weight.max(0).indices.tolist(),
    "numpy": lambda weight: weight.detach().numpy(),
    "stacked": lambda weight: torch.equal(torch.stack([weight, weight]).mean(0), weight),
    "shape": lambda weight: weight.nonzero(),
    "average": shadows,
    "copy": lambda weight: torch.zeros(weight.shape).copy_(weight),
    "out": lambda weight: torch.mul(weight, 2, out=torch.zeros(weight.shape)),
    "backward": lambda weight: nn.functional.linear(torch.ones(WIDTH), weight).sum().backward(),
}


def read() -> dict[str, str]:
    """Return what reading a weight of the other rank says, by the way in which it is read."""
    model, told = begin(), {}
    theirs = model.module[2].linear.weight if smp.pp_rank() == 0 else model.module[0].weight
    for name, reading in READS.items():
        with pytest.raises(UsageError) as caught:
            reading(theirs)
        told[name] = caught.value.message
    told["printed"] = f"{theirs} {theirs.data[0]!r}"
    return told


def test_reading_a_weight_of_another_rank_says_where_it_is() -> None:
    for rank, told in enumerate(run_ranks(read, 2)):
        weight = ["2.linear.weight", "0.weight"][rank]
        printed = told.pop("printed")
        assert told["item"] == (
            f"`item` needs the numbers of `{weight}`, which pipeline rank {1 - rank} holds and rank {rank} does not"
        )
        for message in told.values():
            assert message.endswith(told["item"].removeprefix("`item`"))
        assert printed == (
            f"Parameter(`{weight}` on pp_rank {1 - rank}, float32[{WIDTH}, {WIDTH}])"
            f" Tensor(`{weight}` on pp_rank {1 - rank}, float32[{WIDTH}])"
        )


def read_in_a_unit() -> str:
    model = begin()
    model.module[2].reads = True
    with pytest.raises(Exception) as caught:  # noqa: PT011 - what the other rank gets is told below
        train_step(model, torch.ones(6, WIDTH))
    deadline.report_failure(caught.value)
    return str(caught.value)


def test_a_module_that_reads_a_weight_of_another_rank_is_refused() -> None:
    # It computed with NaN.
    for message in run_ranks(read_in_a_unit, 2):
        assert "`2` needs the numbers of `0.weight`, which pipeline rank 0 holds and rank 1 does not" in message


@torch.no_grad()
def initialise(module: nn.Module) -> None:
    """Do to weights what scripts do to start them."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        module.bias.data.normal_(0.0, 0.02).add_(1)
    if isinstance(module, nn.LayerNorm):
        module.bias[1:].uniform_()


def initialise_over_ranks() -> list[str]:
    model = begin()
    with warnings.catch_warnings(record=True) as caught:
        model.apply(initialise)
        model.apply(initialise)
    assert model.module[smp.pp_rank() * 2 + 1].weight.isfinite().all()
    return [str(each.message) for each in caught]


def test_initialising_after_partitioning_is_one_warning() -> None:
    first, second = run_ranks(initialise_over_ranks, 2)
    assert len(set(first)) == 1, first
    assert "initialise before smp.DistributedModel" in first[0]
    assert second == []


def go_on() -> list[Any]:
    """Do what libraries do to all parameters, and train on."""
    model = begin()
    parameters = list(model.parameters())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(parameters, lr=0.1, foreach=True))
    optimizer.zero_grad(set_to_none=False)
    shadow = [each.detach().clone() for each in parameters]
    with torch.no_grad():
        for average, each in zip(shadow, parameters, strict=True):
            average.mul_(0.9).add_(each, alpha=0.1)
            each.data.copy_(average)
            each.requires_grad_(False)
            each.requires_grad = True
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    for module in model.module.modules():
        copy.deepcopy(module)
    torch.save(parameters, io.BytesIO())
    for each in parameters:
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            each.add_(1)
        assert isinstance(each, nn.Parameter)
        assert isinstance(copy.deepcopy(each), nn.Parameter)
        assert each.is_leaf
        assert torch.zeros_like(each).shape == each.T.T.shape == each.shape
    total = sum(each.numel() for each in parameters)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(train_step(model, torch.ones(4, WIDTH)).reduce_mean().item())
        optimizer.step()
    model.module.load_state_dict(model.state_dict())
    model.to(torch.float64)
    return [total, losses]


def test_what_needs_no_numbers_goes_on_for_all_parameters() -> None:
    plain = build()
    total, optimizer = sum(each.numel() for each in plain.parameters()), torch.optim.AdamW(plain.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(plain, torch.ones(4, WIDTH))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    for told in run_ranks(go_on, 2):
        assert told[0] == total
        assert told[1] == pytest.approx(losses, rel=1e-5)


class Penalised(nn.Module):
    """Holds a parameter of no unit, which every rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def penalised_step(model: Any, x: Tensor, y: Tensor) -> None:
    model.backward([(model(x) - y).square().mean(), model.module.scale.square().sum()])


def test_a_loss_that_all_ranks_know_counts_once() -> None:
    same(Case(Penalised, vectors, penalised_step), Way(pipeline=2))
