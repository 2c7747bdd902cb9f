"""Shapes that hang on values: packed sequences, masks and slices whose bounds were computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import rnn

from tests.models import LENGTH, WIDTH, Case, block
from tests.ranks import RankFailed, run_ranks
from tests.torch.pipeline.training import Setup, run_all

SETUPS = [Setup(3, "interleaved", None, (9, 9)), Setup(2, "simple", 11, (8, 4))]


def train(cases: dict[str, Case], setups: list[Setup]) -> int:
    return len(run_all(cases, setups, 2))


def ragged(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    x = torch.randn(size, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randint(1, LENGTH + 1, (size,), generator=generator), x.sum(1).sin()


def even(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    x, _, y = ragged(size, generator)
    return x, torch.full((size,), LENGTH - 1), y


def length_step(model: Any, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
    loss = functional.mse_loss(model(x, lengths), y)
    model.backward(loss)
    return loss


class Packed(nn.Module):
    """Packs between layers, as models of text did before transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.lstm, self.gru = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = rnn.pack_padded_sequence(self.first(x), lengths, batch_first=True, enforce_sorted=False)
        packed, (last, _) = self.lstm(packed)
        packed, _ = self.gru(packed)
        padded, _ = rnn.pad_packed_sequence(packed, batch_first=True)
        result: Tensor = self.head(padded).sum(1) + last[-1]
        return result


class Packing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, lengths: Tensor) -> rnn.PackedSequence:
        return rnn.pack_padded_sequence(self.linear(x), lengths, batch_first=True, enforce_sorted=False)


class PackedInside(Packed):
    """Packs in a layer of its own, so that only its rank knows how long the result is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Packing()  # type: ignore[assignment]

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed, _ = self.gru(self.first(x, lengths))
        return self.head(rnn.pad_packed_sequence(packed, batch_first=True)[0].sum(1))


class Masked(nn.Module):
    """Goes on with what masks choose, which is more or less from one microbatch to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([block() for _ in range(4)])

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(LENGTH) < lengths[:, None]
        x = self.layers[1](self.layers[0](x))
        chosen = self.layers[2](x[mask])
        some = x.masked_select(mask[..., None]).sum() + x.mT[:, :, mask.any(0)].mean()
        parts = self.layers[3](x[:, 0]).repeat_interleave(lengths, 0) + chosen
        return torch.zeros_like(x[:, 0]).index_add(0, mask.nonzero()[:, 0], parts) + some


class Sliced(nn.Module):
    """Bounds slices by what a layer has made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([block() for _ in range(3)])

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = self.layers[0](x)
        half = (x.detach().abs().max() > 0).long() * (LENGTH // 2)
        left, right = x[:, :half].sum(1), x[:, half:, half]
        left = left.clone()
        left[half:] = 0.5
        result: Tensor = self.layers[2](self.layers[1](left + right.sum(1, keepdim=True)))
        return result


def test_shapes_that_hang_on_values_which_every_rank_knows() -> None:
    # Packed sequences were an AttributeError, masks that choose other numbers refused; a bound made ranks wait in vain.
    cases = {
        "packed": Case(Packed, ragged, length_step),
        "packed by a layer": Case(PackedInside, even, length_step),
        "masked": Case(Masked, ragged, length_step),
        "sliced": Case(Sliced, ragged, length_step),
    }
    assert run_ranks(train, 2, cases, SETUPS, timeout=120) == [len(cases)] * 2


def test_shapes_that_one_rank_alone_knows_are_refused() -> None:
    with pytest.raises(
        RankFailed, match=r"`first` returned float64\[\d+, 6\] the first time and float64\[\d+, 6\] now"
    ):
        run_ranks(train, 2, {"it": Case(PackedInside, ragged, length_step)}, SETUPS[1:])
