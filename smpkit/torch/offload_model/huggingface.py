"""Hugging Face decoders as chains: the embedding, each block, and the head, with what blocks share handed along.

transformers is imported only for models that come from it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["stages"]


class _Stream(NamedTuple):
    """What goes from block to block: only `hidden` changes, so only it is kept at every slice's border."""

    hidden: Tensor
    shared: dict[str, Any]
    """Keyword arguments of every block."""
    ending: dict[str, Any]
    """For the head."""


def stages(model: Any) -> list[nn.Module] | None:
    """Return the layers of a GPT-2 or Llama language model; None for any other object."""
    if not type(model).__module__.startswith("transformers."):
        return None
    from transformers import GPT2LMHeadModel, LlamaForCausalLM

    if isinstance(model, GPT2LMHeadModel):
        blocks = model.transformer.h
        head = _Head(model.transformer.ln_f, model)
        return [_Gpt2Start(model.transformer), *map(_Block, blocks), head]
    if isinstance(model, LlamaForCausalLM):
        return [_LlamaStart(model.model), *map(_Block, model.model.layers), _Head(model.model.norm, model)]
    return None


class _Gpt2Start(nn.Module):
    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = decoder.wte, decoder.wpe, decoder.drop
        self._config = decoder.config

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> _Stream:
        embedded = self.wte(input_ids)
        positions = _positions(embedded, position_ids)
        hidden = embedded + self.wpe(positions)
        mask = _mask(self._config, embedded, attention_mask, positions)
        if token_type_ids is not None:
            hidden = hidden + self.wte(token_type_ids)
        return _Stream(
            self.drop(hidden),
            {"attention_mask": mask, "position_ids": positions, "use_cache": False},
            {"labels": labels},
        )


class _LlamaStart(nn.Module):
    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.embed_tokens, self.rotary_emb = decoder.embed_tokens, decoder.rotary_emb
        self._config = decoder.config

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> _Stream:
        hidden = self.embed_tokens(input_ids)
        positions = _positions(hidden, position_ids)
        shared = {
            "attention_mask": _mask(self._config, hidden, attention_mask, positions),
            "position_ids": positions,
            "position_embeddings": self.rotary_emb(hidden, position_ids=positions),
            "use_cache": False,
        }
        return _Stream(hidden, shared, {"labels": labels})


class _Block(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, stream: _Stream) -> _Stream:
        return stream._replace(hidden=self.block(stream.hidden, **stream.shared))


class _Head(nn.Module):
    def __init__(self, norm: nn.Module, model: Any) -> None:
        super().__init__()
        self.norm, self.lm_head = norm, model.lm_head
        self._loss_function, self._vocabulary = model.loss_function, model.config.vocab_size

    def forward(self, stream: _Stream) -> Any:
        from transformers.modeling_outputs import CausalLMOutput

        logits, labels = self.lm_head(self.norm(stream.hidden)), stream.ending["labels"]
        loss = None if labels is None else self._loss_function(logits, labels, vocab_size=self._vocabulary)
        return CausalLMOutput(loss=loss, logits=logits)


def _positions(embedded: Tensor, given: Tensor | None) -> Tensor:
    return torch.arange(embedded.shape[1], device=embedded.device).unsqueeze(0) if given is None else given


def _mask(config: Any, embedded: Tensor, given: Tensor | None, positions: Tensor) -> Any:
    from transformers.masking_utils import create_causal_mask

    return create_causal_mask(
        config=config,
        inputs_embeds=embedded,
        attention_mask=given,
        past_key_values=None,
        position_ids=positions,
    )
