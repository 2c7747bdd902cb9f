"""Models that are no Sequential: their own forward runs, and blocks are found in them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from smpkit import OffloadModel, OffloadOptimizer
from smpkit.errors import UsageError
from smpkit.torch.core.module_call import ModuleCall
from tests.models import HUGGING_FACE
from tests.models_of_others import TRANSFORMERS
from tests.train import Plain, batch, build

CPU = torch.device("cpu")
NAMES = ["GPT-2", "BERT", "Llama", "T5", "ViT"]
NAMES += ["Bloom", "Falcon", "Gemma", "Gemma 2", "GPT-NeoX", "Mistral", "OPT", "Phi", "Qwen 2 MoE", "Qwen 3"]


def same_weights(plain: nn.Module, model: nn.Module) -> None:
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("place")
def test_models_of_hugging_face_train_as_in_plain_scripts(name: str) -> None:
    """Accumulation, dropout, clipping, a schedule; to the bit, for the operations are the same."""
    case = {**TRANSFORMERS, **HUGGING_FACE}[name]
    plain = build(case)
    for each in plain.modules():
        if isinstance(each, nn.Dropout):
            each.p = 0.1
    model = OffloadModel(copy.deepcopy(plain), CPU, checkpoint_activation=True)
    losses: list[list[float]] = []
    for network in (plain, model):
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
        torch.manual_seed(1)
        losses.append([])
        for number in range(2):
            optimizer.zero_grad()
            for part in range(2):
                losses[-1].append(case.step(Plain(network, 2), *batch(case, 2 * number + part, 4)).item())
            torch.nn.utils.clip_grad_norm_(network.parameters(), 0.5)
            optimizer.step()
            schedule.step()
    assert losses[0] == losses[1]
    same_weights(plain, model)


def test_what_trainers_pass_to_a_loss() -> None:
    plain, tokens = build(HUGGING_FACE["Llama"]), torch.ones(2, 4).long()
    inputs: dict[str, Any] = {"input_ids": tokens, "labels": tokens, "num_items_in_batch": 3}
    assert torch.equal(OffloadModel(copy.deepcopy(plain), CPU)(**inputs).loss, plain(**inputs).loss)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, *, mask: Tensor, aside: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x + self.dropout(self.narrow(functional.gelu(self.wide(self.norm(x))))) * mask
        return x, mask, aside + self.narrow.bias.mean()  # the mask is handed on, with its gradient


class LanguageModel(nn.Module):
    """Embedding and head have one weight; blocks take keywords and return tuples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.mask = nn.Embedding(11, 8), nn.Parameter(torch.rand(8))
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x, mask, aside = self.embedding(tokens), self.mask * 1, torch.zeros((), dtype=self.mask.dtype)
        for block in self.blocks:
            x, mask, aside = block(x, mask=mask, aside=aside)
        scores = self.head(self.norm(x))
        loss = functional.cross_entropy(scores.flatten(0, 1).float(), labels.flatten()) + mask.sum() * 1e-3 + aside
        return {"loss": loss, "scores": scores}


def train(network: nn.Module, optimizer: Any, clip: float | None, backwards: int) -> list[float]:
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        for part in range(backwards):
            torch.manual_seed(10 * step + part)
            tokens = torch.randint(11, (4, 6))
            loss = network(tokens, labels=tokens)["loss"]
            loss.backward()
            losses.append(loss.item())
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(network.parameters(), clip)
        optimizer.step()
    return losses


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("num_slices", [1, 2, 5])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_tied_language_model_to_the_bit(checkpoint: bool, num_slices: int, clip: float | None) -> None:
    for backwards in (1, 2):
        plain = LanguageModel()
        model = OffloadModel(LanguageModel(), CPU, num_slices=num_slices, checkpoint_activation=checkpoint)
        expected = train(plain, torch.optim.AdamW(plain.parameters(), 1e-2, fused=True), clip, backwards)
        optimizer = OffloadOptimizer(model, lr=1e-2, max_grad_norm=clip)
        assert train(model, optimizer, None, backwards) == expected
        same_weights(plain, model)


def test_a_plain_model_is_whole_again_when_its_offload_model_is_gone() -> None:
    plain = LanguageModel()
    tokens = torch.randint(11, (2, 3))
    model = OffloadModel(plain, CPU, checkpoint_activation=True)
    expected = model(tokens, labels=tokens)["loss"]
    del model
    assert all(ModuleCall.of(block).checkpointing is None for block in plain.blocks)
    torch.manual_seed(0)
    plain(tokens, labels=tokens)["loss"].backward()
    assert expected.requires_grad


def test_microbatches_of_such_a_model_are_refused() -> None:
    with pytest.raises(UsageError, match="num_microbatches=2 needs a chain"):
        OffloadModel(LanguageModel(), CPU, num_microbatches=2)
