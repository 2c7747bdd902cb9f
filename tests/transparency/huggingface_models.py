"""Hugging Face models from small configurations, with random weights, and steps as their users write them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.transparency.pipeline_models import Case, tokens

# transformers takes seconds to import: each builder imports what it needs, on the ranks that need it.


def gpt2(dropout: float = 0.0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 4, "n_head": 2}
    chances: dict[str, Any] = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return GPT2LMHeadModel(GPT2Config(**sizes, **chances, bos_token_id=0, eos_token_id=0))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=11,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=16,
        )
    )


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            **dict[str, Any](
                vocab_size=11,
                hidden_size=8,
                num_hidden_layers=3,
                num_attention_heads=2,
                intermediate_size=16,
                max_position_embeddings=16,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )
    )


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            **dict[str, Any](
                vocab_size=11,
                d_model=8,
                d_kv=4,
                d_ff=16,
                num_layers=2,
                num_heads=2,
                dropout_rate=0.0,
                decoder_start_token_id=0,
                pad_token_id=0,
            )
        )
    )


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            **dict[str, Any](
                image_size=8,
                patch_size=4,
                num_channels=1,
                hidden_size=8,
                num_hidden_layers=3,
                num_attention_heads=2,
                intermediate_size=16,
                num_labels=5,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )
    )


def images(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    pixels = torch.randn(size, 1, 8, 8, generator=generator, dtype=torch.float64)
    return pixels, torch.randint(5, (size,), generator=generator)


def loss_inside_step(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    out = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels)
    model.backward(out.loss)
    return out.loss


def loss_outside_step(model: Any, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = model(ids, use_cache=False).logits
    loss = functional.cross_entropy(logits.view(-1, logits.size(-1)), labels.reshape(-1))
    model.backward(loss)
    return loss, logits


def image_step(model: Any, pixels: Tensor, labels: Tensor) -> Tensor:
    out = model(pixel_values=pixels, labels=labels)
    model.backward(out.loss)
    return out["loss"]


CASES: dict[str, Case] = {
    "GPT-2": Case(gpt2, tokens, loss_inside_step),
    "GPT-2, loss outside": Case(gpt2, tokens, loss_outside_step),
    "Llama": Case(llama, tokens, loss_inside_step),
    "Llama, loss outside": Case(llama, tokens, loss_outside_step),
    "BERT": Case(bert, tokens, loss_inside_step),
    "T5": Case(t5, tokens, loss_inside_step),
    "ViT": Case(vit, images, image_step),
}
