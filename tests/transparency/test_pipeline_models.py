"""Models of every shape train unmodified over pipelines, to the losses, gradients and weights of one process.

By default each model trains where smpkit places it, and some in another way; `-m slow` trains each in all ways.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smpkit.torch as smp
from tests.models import HUGGING_FACE, LENGTH, MODELS, TOKENS, Case, token_step, tokens, with_residuals
from tests.pairwise import slow
from tests.train import Way, same

SIMPLE, SPLIT = {"pipeline": "simple"}, {"pipeline": "zero_bubble"}
CHANGING = (8, 16, 8)


@pytest.mark.parametrize("model", MODELS)
def test_a_model_trains_as_in_one_process(model: str) -> None:
    same(MODELS[model], Way(pipeline=2, traced=True, batches=(8, 16)))


OTHERS = {
    Way(): ("Sequential", "BatchNorm", "several backwards"),
    Way(pipeline=2, placement=2, config=SPLIT): (
        "frozen and unused parameters",
        "tied by a function",
        "several losses",
    ),
    Way(pipeline=2, replicas=2, placement=11, config=SIMPLE): ("BatchNorm",),
    Way(pipeline=3, placement=13, microbatches=2, config=SPLIT): ("skip connections", "parameters of the root"),
    Way(pipeline=4, placement=12, microbatches=8, batches=CHANGING): (
        "a module in several layers",
        "a module used twice",
    ),
    Way(pipeline=4, placement=-1, microbatches=1, config=SIMPLE): ("returns a dict", "changes in place"),
}


ROWS = [(model, way) for way, models in OTHERS.items() for model in models] + [
    # Two scalar losses on two ranks went to a third under one tag, and arrived in the order of sending.
    ("several losses", Way(pipeline=4, microbatches=1, placement=11)),
    # Ranks share weights with one neighbour or with two. They had made unlike many process groups by then, of which
    # torch makes the name of the next: they never met.
    ("tied neighbours", Way(pipeline=4, placement=-1)),
    ("tied neighbours", Way(pipeline=3, replicas=2, placement=-1)),
]
GRID = [*product(MODELS, [Way(pipeline=4, replicas=2, microbatches=8), Way(pipeline=3), *OTHERS])]


@pytest.mark.parametrize(("model", "way"), [*ROWS, *slow(row for row in GRID if row not in ROWS)], ids=str)
def test_some_models_train_in_other_ways(model: str, way: Way) -> None:
    same(MODELS[model], way)


# --- inputs of language models ----------------------------------------------------------------------------------------


def of_any_length(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    """Make the length follow from the size, so that it is another one in every step."""
    length = {8: LENGTH, 4: 3, 16: 7}[size]
    ids = torch.randint(TOKENS, (size, length + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


@pytest.mark.parametrize("model", ["tied modules", "Llama"])
def test_the_sequence_length_may_change_between_steps(model: str) -> None:
    same(replace(MODELS[model], batch=of_any_length), Way(pipeline=2, microbatches=2, batches=(8, 4, 16, 8)))


def padded_step(model: Any, ids: Tensor, labels: Tensor) -> Any:
    mask = (torch.arange(ids.shape[1]) < 2 + ids[:, :1] % 3).long()
    out = model(input_ids=ids, attention_mask=mask, labels=labels.masked_fill(mask == 0, -100))
    model.backward(out.loss)
    return out.loss


@pytest.mark.parametrize("model", ["GPT-2", "BERT", "T5"])
def test_padding_masks_reach_every_layer(model: str) -> None:
    same(replace(HUGGING_FACE[model], step=padded_step), Way(pipeline=2, microbatches=2))


# --- a module of two parents ------------------------------------------------------------------------------------------


class Stack(nn.Module):
    """Layers around an embedding that is not theirs alone."""

    def __init__(self, embed_tokens: nn.Embedding) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, ids: Tensor, memory: Tensor | float = 0.0) -> Tensor:
        return with_residuals(self.layers, self.embed_tokens(ids) + memory)


class TwoStacks(nn.Module):
    """As T5 and BART are in transformers 4: encoder and decoder call one embedding, which all three have."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(TOKENS, 8)
        self.encoder, self.decoder = Stack(self.shared), Stack(self.shared)
        self.head = nn.Linear(8, TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.decoder(ids.flip(1), self.encoder(ids)))


def checkpoint_decoder(model: TwoStacks) -> None:
    smp.set_activation_checkpointing(model.decoder)


@pytest.mark.parametrize("prepare", [None, checkpoint_decoder])
def test_a_stack_calls_an_embedding_of_another_rank(prepare: Any) -> None:
    same(Case(TwoStacks, tokens, token_step), Way(pipeline=2, prepare=prepare))
