"""Where values decide which module gets what, or shapes, training over a pipeline is as in one process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import rnn

from smpkit.testing.ranks import RankFailed
from tests.models import LENGTH, TOKENS, WIDTH, Case, Does, Stack, block, mse_step, tokens, vectors, with_residuals
from tests.pairwise import slow
from tests.train import Way, run, same

# --- which module gets what -------------------------------------------------------------------------------------------


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


def mixing() -> nn.Module:
    """Return a model with experts that are no child of a stack, too."""
    layers = nn.ModuleList([Experts() for _ in range(3)])
    return Does(lambda own, x: with_residuals([own.first, *own.layers], x), first=Experts(), layers=layers)


def adaptive() -> nn.Module:
    body = nn.Sequential(nn.Embedding(TOKENS, WIDTH), block(), block())
    loss = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, TOKENS, [2, 6])
    return Does(lambda own, ids, labels: own.loss(own.body(ids).flatten(0, 1), labels.flatten()), body=body, loss=loss)


def adaptive_step(model: Any, ids: Tensor, labels: Tensor) -> Any:
    out = model(ids, labels)
    model.backward(out.loss)
    return out.loss, out.output


# --- shapes -----------------------------------------------------------------------------------------------------------


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
        return self.head(padded).sum(1) + last[-1]


class Packing(nn.Linear):
    def forward(self, x: Tensor, lengths: Tensor) -> rnn.PackedSequence:  # type: ignore[override]
        return rnn.pack_padded_sequence(super().forward(x), lengths, batch_first=True, enforce_sorted=False)


class PackedInside(Packed):
    """Packs in a layer of its own, so that only its rank knows how long the result is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Packing(WIDTH, WIDTH)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed, _ = self.gru(self.first(x, lengths))
        return self.head(rnn.pad_packed_sequence(packed, batch_first=True)[0].sum(1))


class Masked(Stack):
    """Goes on with what masks choose, which is more or less from one microbatch to the next."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        mask = torch.arange(LENGTH) < lengths[:, None]
        x = self.layers[1](self.layers[0](x))
        chosen = self.layers[2](x[mask])
        some = x.masked_select(mask[..., None]).sum() + x.mT[:, :, mask.any(0)].mean()
        parts = self.layers[3](x[:, 0]).repeat_interleave(lengths, 0) + chosen
        return torch.zeros_like(x[:, 0]).index_add(0, mask.nonzero()[:, 0], parts) + some


class Sliced(Stack):
    """Bounds slices by what a layer has made."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        x = self.layers[0](x)
        half = (x.detach().abs().max() > 0).long() * (LENGTH // 2)
        left, right = x[:, :half].sum(1), x[:, half:, half]
        left = left.clone()
        left[half:] = 0.5
        return self.layers[2](self.layers[1](left + right.sum(1, keepdim=True)))


CASES = {
    "experts": Case(mixing, vectors, mse_step),
    "adaptive softmax": Case(adaptive, tokens, adaptive_step),
    # Packed sequences were an AttributeError, masks that choose other numbers refused; a bound made ranks wait in vain.
    "packed": Case(Packed, ragged, length_step),
    "packed by a layer": Case(PackedInside, even, length_step),
    "masked": Case(Masked, ragged, length_step),
    "sliced": Case(partial(Sliced, 3), ragged, length_step),
}


WAY = Way(pipeline=2, microbatches=2, batches=(8, 4))


ROWS = [(case, replace(WAY, traced=True)) for case in CASES]
MORE = [(case, replace(WAY, placement=11, config={"pipeline": "simple"})) for case in CASES]


@pytest.mark.parametrize(("case", "way"), [*ROWS, *slow(MORE)], ids=str)
def test_it_trains_as_in_one_process(case: str, way: Way) -> None:
    same(CASES[case], way)


def test_shapes_that_one_rank_alone_knows_are_refused() -> None:
    message = r"`first` returned float64\[\d+, 6\] the first time and float64\[\d+, 6\] now"
    with pytest.raises(RankFailed, match=message):
        run(Case(PackedInside, ragged, length_step), replace(WAY, placement=11))
