"""A weight that another pipeline rank holds has no numbers here: what needs them says so, and all else goes on."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit.errors import UnsupportedError, UsageError
from tests.models import WIDTH, Case, Does, vectors
from tests.torch.steps import error_of, in_a_row, on_ranks
from tests.torch.steps import train_step as train_plainly
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
    model = in_a_row(*module, around=module, microbatches=2)
    train_step(model, torch.ones(4, WIDTH))
    return model


READS: dict[str, Callable[[Any], object]] = {
    "item": lambda weight: weight[0, 0].item(),
    "number": lambda weight: float(sum(part.norm() for part in weight)),
    "branch": lambda weight: bool((torch.ones(()) + weight.data).max() > 0),
    "largest": lambda weight: weight.max(0).indices.tolist(),
    "numpy": lambda weight: weight.detach().numpy(),
    "stacked": lambda weight: torch.equal(torch.stack([weight, weight]).mean(0), weight),
    "shape": lambda weight: weight.nonzero(),
    "average": lambda weight: torch.zeros(weight.shape).mul_(0.9).add_(weight.detach()),
    "copy": lambda weight: torch.zeros(weight.shape).copy_(weight),
    "out": lambda weight: torch.mul(weight, 2, out=torch.zeros(weight.shape)),
    "file": lambda weight: safetensors.torch.save({"weight": weight.detach().contiguous()}),
    "file of peft": lambda weight: safetensors.torch.save({"weight": weight}),  # it was an error of strides
    "backward": lambda weight: nn.functional.linear(torch.ones(WIDTH), weight).sum().backward(),
}


@on_ranks(2)
def test_reading_a_weight_of_another_rank_says_where_it_is() -> None:
    model, rank = begin(), smp.pp_rank()
    theirs = model.module[2].linear.weight if rank == 0 else model.module[0].weight
    name = ["2.linear.weight", "0.weight"][rank]
    needed = f" needs the numbers of `{name}`, which pipeline rank {1 - rank} holds and rank {rank} does not"
    for how, reading in READS.items():
        with pytest.raises(UsageError) as caught:
            reading(theirs)
        assert caught.value.message.endswith(needed)
        assert how != "item" or caught.value.message.startswith("`item` needs")
    own = model.module[rank * 2].linear.weight if rank else model.module[0].weight
    with pytest.raises(UsageError, match=rf"`data`{needed}"):
        own.data = own.data * 0.9 + theirs.data * 0.1  # as momentum encoders are averaged: it trained on NaN
    own.data = own.data.clone()
    theirs.data = theirs.data * 0.9 + own.data * 0.1
    assert f"{theirs} {theirs.data[0]!r}" == (
        f"Parameter(`{name}` on pp_rank {1 - rank}, float32[{WIDTH}, {WIDTH}])"
        f" Tensor(`{name}` on pp_rank {1 - rank}, float32[{WIDTH}])"
    )


@on_ranks(2, meets=False)
def test_a_module_that_reads_a_weight_of_another_rank_is_refused() -> None:
    # It computed with NaN.
    model = begin()
    model.module[2].reads = True
    message = error_of(lambda: train_step(model, torch.ones(6, WIDTH)))
    assert "`2` needs the numbers of `0.weight`, which pipeline rank 0 holds and rank 1 does not" in message


@torch.no_grad()
def initialise(module: nn.Module) -> None:
    """Do to weights what scripts do to start them."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        module.bias.data.normal_(0.0, 0.02).add_(1)
    if isinstance(module, nn.LayerNorm):
        module.bias[1:].uniform_()


@on_ranks(2)
def test_initialising_after_partitioning_is_one_warning() -> None:
    model = begin()
    with warnings.catch_warnings(record=True) as caught:
        model.apply(initialise)
        model.apply(initialise)
    assert model.module[smp.pp_rank() * 2 + 1].weight.isfinite().all()
    texts = {str(each.message) for each in caught}
    assert len(texts) == 1 - smp.pp_rank(), texts
    assert all("initialise before smp.DistributedModel" in text for text in texts)


def train(optimizer: Any, step: Callable[[], float]) -> list[float]:
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(step())
        optimizer.step()
    return losses


@on_ranks(2)
def test_a_file_does_not_get_what_another_rank_holds() -> None:
    # It got NaN.
    model = begin()
    with pytest.raises(
        UsageError, match=r"(?s)`pickle` needs the numbers of .* let all ranks call `model.state_dict\(\)`"
    ):
        torch.save(model.get_module().state_dict(), io.BytesIO())
    torch.save(model.state_dict(), io.BytesIO())


@on_ranks(2)
def test_what_needs_no_numbers_goes_on_for_all_parameters() -> None:
    """Do what libraries do to all parameters, and train on."""
    model, plain, x = begin(), build(), torch.ones(4, WIDTH)
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
    for each in parameters:
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            each.add_(1)
        assert isinstance(each, nn.Parameter)
        assert isinstance(copy.deepcopy(each), nn.Parameter)
        assert each.is_leaf
        assert torch.zeros_like(each).shape == each.T.T.shape == each.shape
        assert nn.functional.normalize(each, dim=0).shape == each.shape
    assert sum(each.numel() for each in parameters) == sum(each.numel() for each in plain.parameters())

    def step_plainly() -> float:
        loss = loss_of(plain, x)
        loss.backward()
        return loss.item()

    expected = train(torch.optim.AdamW(plain.parameters(), lr=0.1), step_plainly)
    found = train(optimizer, lambda: train_step(model, x).reduce_mean().item())
    assert found == pytest.approx(expected, rel=1e-5)
    model.module.load_state_dict(model.state_dict())
    model.to(torch.float64)


@on_ranks(2)
def test_a_model_with_buffers_of_other_ranks_moves_but_is_not_made_whole() -> None:
    model = in_a_row(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(2)))
    train_plainly(model, torch.ones(4, WIDTH))
    model.to("cpu", torch.float64)  # torch copies no buffer that has no data
    assert {each.dtype for each in (*model.local_parameters(), *model.local_buffers())} == {torch.float64, torch.int64}
    assert train_plainly(model, torch.ones(4, WIDTH, dtype=torch.float64)).reduce_mean().dtype is torch.float64
    with pytest.raises(UnsupportedError, match=r"model\.cpu\(\) would move this rank's part"):
        model.cpu()


@on_ranks(2)
def test_reading_a_buffer_of_another_rank_says_where_it_is() -> None:
    model = in_a_row(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(2)))
    average, other = copy.deepcopy(model.module), 1 - smp.pp_rank()
    train_plainly(model, torch.ones(4, WIDTH))
    old, now = average[other][1].running_mean, model.module[other][1].running_mean
    # timm's ModelEmaV3, YOLO's ModelEMA and torch's AveragedModel; the third one changed nothing, without a word.
    readings: tuple[Callable[[], object], ...] = (
        lambda: old.copy_(now),
        lambda: now.to("cpu"),
        lambda: old.mul_(0.9).add_(now, alpha=0.1),
        lambda: old * 0.9 + now * 0.1,
        lambda: now.mean().item(),
        lambda: torch._foreach_lerp_([old], [now], 0.1),
    )
    for reading in readings:
        with pytest.raises(UsageError, match=rf"needs the numbers of `{other}\.1\.running_mean`, which pipeline rank"):
            reading()
    later = copy.deepcopy(model.module)[other][1].running_mean
    later.mul_(0.9).add_(now, alpha=0.1)  # an average of this rank's part
    assert later.is_meta


def penalised() -> nn.Module:
    """Return a model with a parameter of no unit, which every rank has."""
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    return Does(lambda own, x: own.layers(x), layers=layers, scale=nn.Parameter(torch.ones(3)))


def penalised_step(model: Any, x: Tensor, y: Tensor) -> None:
    model.backward([(model(x) - y).square().mean(), model.module.scale.square().sum()])


def test_a_loss_that_all_ranks_know_counts_once() -> None:
    same(Case(penalised, vectors, penalised_step), Way(pipeline=2))
