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

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"num_hidden_layers": 3, "hidden_size": 16, "num_attention_heads": 4}
LIKE_LLAMA: dict[str, Any] = SIZES | {"intermediate_size": 32, "num_key_value_heads": 2}
GEMMA: dict[str, Any] = LIKE_LLAMA | {"head_dim": 4}
GPT2: dict[str, Any] = {"n_layer": 3, "n_embd": 16, "n_head": 4, "n_positions": 8}
OPT: dict[str, Any] = SIZES | {"ffn_dim": 32, "max_position_embeddings": 8}
MIXED: dict[str, Any] = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"] * 2}

# Dropout is at its default, which is not 0 in GPT-2, OPT and BERT; Phi, Falcon and BLOOM get some.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", "BertConfig", SIZES | {"intermediate_size": 32, "max_position_embeddings": 8}),
    "bloom": ("BloomForCausalLM", "BloomConfig", SIZES | {"hidden_dropout": 0.1, "attention_dropout": 0.1}),
    "falcon": ("FalconForCausalLM", "FalconConfig", SIZES | {"hidden_dropout": 0.1}),
    "falcon-alibi": ("FalconForCausalLM", "FalconConfig", SIZES | {"alibi": True, "parallel_attn": False}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", GEMMA),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", GEMMA | {"sliding_window": 3}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA | MIXED | {"num_hidden_layers": 4}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SIZES | {"intermediate_size": 32, "hidden_dropout": 0.1}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", LIKE_LLAMA),
    "mistral": ("MistralForCausalLM", "MistralConfig", LIKE_LLAMA | {"sliding_window": None}),
    "mistral-sliding": ("MistralForCausalLM", "MistralConfig", LIKE_LLAMA | {"sliding_window": 3}),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        LIKE_LLAMA | {"num_local_experts": 4, "experts_implementation": "eager"},  # the other takes no float64
    ),
    "opt": ("OPTForCausalLM", "OPTConfig", OPT | {"layerdrop": 0.3}),
    "opt-350m": ("OPTForCausalLM", "OPTConfig", OPT | {"word_embed_proj_dim": 8, "do_layer_norm_before": False}),
    "phi": ("PhiForCausalLM", "PhiConfig", LIKE_LLAMA | {"resid_pdrop": 0.1, "embd_pdrop": 0.1}),
    "qwen2-mixed": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        LIKE_LLAMA | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    ),
    "qwen2-tied": ("Qwen2ForCausalLM", "Qwen2Config", LIKE_LLAMA | {"tie_word_embeddings": True}),
    "router-losses": (
        "MixtralForCausalLM",
        "MixtralConfig",
        LIKE_LLAMA | {"num_local_experts": 4, "experts_implementation": "eager", "output_router_logits": True},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"num_layers": 3, "d_model": 16, "num_heads": 4, "d_kv": 4, "d_ff": 32},
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", GEMMA),
}


def make(name: str, **more: Any) -> nn.Module:
    import transformers

    model, config, sizes = MODELS[name]
    torch.manual_seed(0)
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 0}
    made: nn.Module = getattr(transformers, model)(
        getattr(transformers, config)(vocab_size=11, **special, **sizes, **more)
    )
    return made.double()


def same_weights(plain: nn.Module, model: nn.Module) -> None:
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("place")
def test_models_of_hugging_face_train_as_in_plain_scripts(name: str) -> None:
    """Accumulation, padding, labels, clipping, a schedule; to the bit, for the operations are the same."""
    plain = make(name)
    model = OffloadModel(copy.deepcopy(plain), CPU, num_slices=3, checkpoint_activation=True)
    assert len(model.model_slices) == 3
    losses: list[list[float]] = []
    for network in (plain, model):
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
        torch.manual_seed(1)
        losses.append([])
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(2):
                tokens = torch.randint(3, 11, (4, 8))
                mask = torch.ones_like(tokens)
                mask[1, 6:] = 0
                loss = network(input_ids=tokens, attention_mask=mask, labels=tokens).loss / 2
                loss.backward()
                losses[-1].append(loss.item())
            torch.nn.utils.clip_grad_norm_(network.parameters(), 0.5)
            optimizer.step()
            schedule.step()
    assert losses[0] == losses[1]
    same_weights(plain, model)


def test_images_and_what_trainers_pass_to_a_loss() -> None:
    import transformers

    more: dict[str, Any] = {"num_labels": 3}
    config = transformers.ViTConfig(**SIZES, intermediate_size=32, image_size=8, patch_size=4, **more)
    images = transformers.ViTForImageClassification(config)
    for plain, inputs in (
        (images, {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.tensor([0, 2])}),
        (
            make("llama"),
            {"input_ids": torch.ones(2, 4).long(), "labels": torch.ones(2, 4).long(), "num_items_in_batch": 3},
        ),
    ):
        model = OffloadModel(copy.deepcopy(plain), CPU)
        loss = model(**inputs).loss
        assert torch.equal(loss, plain(**inputs).loss)
        loss.backward()


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
@pytest.mark.parametrize("checkpoint", [False, True], ids=["graph", "checkpoint"])
@pytest.mark.parametrize("num_slices", [1, 2, 5])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_tied_language_model_to_the_bit(checkpoint: bool, num_slices: int, clip: float | None) -> None:
    for backwards in (1, 2):
        plain, model = (
            LanguageModel(),
            OffloadModel(LanguageModel(), CPU, num_slices=num_slices, checkpoint_activation=checkpoint),
        )
        expected = train(plain, torch.optim.AdamW(plain.parameters(), 1e-2, fused=True), clip, backwards)
        optimizer = OffloadOptimizer(model, lr=1e-2, max_grad_norm=clip)
        assert train(model, optimizer, None, backwards) == expected
        same_weights(plain, model)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("checkpoint", [False, True], ids=["graph", "checkpoint"])
def test_bf16_computation_is_the_recipe_by_hand(checkpoint: bool) -> None:
    plain = LanguageModel()
    model = OffloadModel(LanguageModel(), CPU, num_slices=2, checkpoint_activation=checkpoint, dtype=torch.bfloat16)
    optimizer = OffloadOptimizer(model, lr=1e-3)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)
    for step in range(3):
        half = copy.deepcopy(plain).bfloat16()
        half.head.weight = half.embedding.weight
        tokens = torch.randint(11, (4, 6))
        losses = []
        for network in (half, model):
            torch.manual_seed(step)
            losses.append(network(tokens, labels=tokens)["loss"])
            losses[-1].backward()
        for p, q in zip(plain.parameters(), half.parameters(), strict=True):
            assert q.grad is not None
            p.grad = q.grad.float()
        for each in (theirs, optimizer):
            each.step()
        assert torch.equal(*losses)
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    same_weights(plain, model)


def test_blocks_by_path_and_a_skipped_one() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.others = (
                nn.Linear(4, 4),
                nn.ModuleList([nn.Linear(4, 4), nn.GRU(4, 4), nn.Bilinear(4, 4, 4)]),
            )

        def forward(self, x: Tensor, *, skips: bool) -> Tensor:
            x = self.others[0](self.first(x))
            return self.others[2](x, x) if skips else self.others[2](*self.others[1](x)[:1], self.others[0](x))

    torch.manual_seed(0)
    plain = Skips()
    model: Any = OffloadModel(copy.deepcopy(plain), CPU, num_slices=4, layers=["first", "others"])
    assert [len(group) for group in model.model_slices] == [1, 1, 1, 1]
    inputs = torch.randn(3, 4)
    for skips in (False, True, False):
        for network in (plain, model):
            network.zero_grad()
            network(inputs, skips=skips).square().sum().backward()
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or torch.equal(p.grad, q.grad)
    model(inputs, skips=True)


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
    with pytest.raises(UsageError, match="num_microbatches=2 needs a model that is a chain"):
        OffloadModel(LanguageModel(), CPU, num_microbatches=2)
