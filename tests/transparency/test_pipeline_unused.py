"""What the loss leaves out gets no gradient over a pipeline, as in one process: none of zeros, which optimizers use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.models import WIDTH, Case, Does, NoGradient, Square, block, by_torch, plainly, vectors
from tests.train import Way, same

# --- models, each with something aside that its step leaves out of the loss -------------------------------------------


class Aside(nn.Module):
    """A stem and a head, and layers in a row between them, over all ranks, whose outcome the loss leaves out."""

    def __init__(self, call: Callable[..., Tensor] = plainly) -> None:
        super().__init__()
        self.call = call
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.row = nn.ModuleList([block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        aside = x = self.stem(x)
        for layer in self.row:
            aside = aside + self.call(layer, aside)
        return self.head(x), aside


class TiedAside(Aside):
    """One weight is used by a layer that counts and by one that does not, most often on two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.row.insert(0, nn.Linear(WIDTH, WIDTH))
        self.row[0].weight = self.head.weight


def both() -> nn.Module:
    """Return a layer with two outputs, of which the right one lies in another order."""
    return Does(lambda own, x: (own.left(x), own.right(x).T.contiguous().T), left=Square(), right=Square())


class OneOfTwo(nn.Module):
    """Layers with two outputs, each used by a rank of its own, of which one counts."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.again = both(), both()
        self.left, self.right, self.unused = block(), block(), block()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        left, right = self.both(x)
        _, last = self.again(left)
        return self.left(last), self.unused(right) + self.right(right) + right


class Blocks(nn.Module):
    """Uses its weight and the input's data alone, which it may change."""

    def __init__(self, *, inplace: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        x = x.mul_(2) if self.inplace else x
        return NoGradient.apply(x) * self.weight


def blocked() -> nn.Module:
    layers = nn.ModuleList([block(), block(), Blocks(inplace=False), Blocks(inplace=True)])
    return Does(lambda own, x: (own.layers[2](own.layers[0](x)) + own.layers[3](own.layers[1](x)), x), layers=layers)


def head_step(model: Any, x: Tensor, y: Tensor) -> Any:
    head, aside = model(x)
    loss = functional.mse_loss(head, y)
    model.backward(loss)
    return loss, aside


def sometimes_step(model: Any, x: Tensor, y: Tensor) -> Any:
    """Let it count in some microbatches, which all ranks know."""
    head, aside = model(x)
    loss = functional.mse_loss(head if y.sum() > 0 else aside, y)
    model.backward(loss)
    return loss


def asked_step(model: Any, x: Tensor, y: Tensor) -> Any:
    """Let it count in some microbatches, which a value of one rank decides."""
    head, aside = model(x)
    loss = functional.mse_loss(head, y)
    if loss > 1.3:
        loss = loss + aside.square().mean()
    model.backward(loss)
    return loss


CASES = {
    "layers in a row": Case(Aside, vectors, head_step),
    "checkpointed by torch": Case(partial(Aside, by_torch), vectors, head_step),
    "tied weights": Case(TiedAside, vectors, head_step),
    "one of two outputs": Case(OneOfTwo, vectors, head_step),
    "a layer that gives no gradient": Case(blocked, vectors, head_step),
    "in some microbatches": Case(Aside, vectors, sometimes_step),
    "in some microbatches, asked": Case(Aside, vectors, asked_step),
}


SHORT: dict[str, Any] = {"microbatches": 2, "batches": (4, 4)}
EVENLY = Way(pipeline=2, placement=-1, **SHORT)
SPLIT = Way(pipeline=2, placement=5, config={"pipeline": "zero_bubble", "active_microbatches": 2}, **SHORT)
ROWS = [(case, SPLIT) for case in CASES] + [
    ("in some microbatches, asked", EVENLY),
    # That there is none is handed on from rank to rank.
    ("layers in a row", Way(pipeline=4, placement=-1, config={"pipeline": "simple"}, **SHORT)),
    ("one of two outputs", Way(pipeline=4, placement=5, config={"pipeline": "zero_bubble"}, **SHORT)),
    # Replicas leave out different things, and reduce what they have.
    ("in some microbatches", Way(pipeline=2, replicas=2, placement=-1, **SHORT)),
    # Weight decay leaves alone what has no gradient; the middle rank has none at all.
    ("layers in a row", Way(pipeline=3, placement=-1, optimizer="AdamW", **SHORT)),
    # What backward does not need may be offloaded.
    ("checkpointed by torch", Way(pipeline=2, placement=-1, config={"offload_activations": True}, **SHORT)),
]


@pytest.mark.parametrize(("case", "way"), ROWS, ids=str)
def test_gradients_are_none_where_those_of_one_process_are(case: str, way: Way) -> None:
    same(CASES[case], way)
