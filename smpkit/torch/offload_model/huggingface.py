"""Hugging Face decoders as chains: the embedding, each block, and the head, with what blocks share handed along.

transformers is imported only for models that come from it.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from smpkit.errors import UnsupportedError

__all__ = ["stages"]

_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"
"""As configurations of transformers name them."""


class _Stream(NamedTuple):
    """What goes from block to block: only `hidden` changes, so only it is kept at every slice's border."""

    hidden: Tensor
    shared: dict[str, Any]
    """Keyword arguments of every block."""
    masks: dict[str, Any]
    """Of attention, by kind of block."""
    ending: dict[str, Any]
    """For the head."""


def stages(model: Any) -> list[nn.Module] | None:
    """Return the layers of a GPT-2, Llama, Mistral, Qwen2 or Qwen3 language model; None for any other object."""
    if not type(model).__module__.startswith("transformers."):
        return None
    from transformers import (
        GPT2LMHeadModel,
        LlamaForCausalLM,
        MistralForCausalLM,
        Qwen2ForCausalLM,
        Qwen3ForCausalLM,
    )

    if isinstance(model, GPT2LMHeadModel):
        blocks = [_Block(block, _FULL) for block in model.transformer.h]
        return [_Gpt2Start(model.transformer), *blocks, _Head(model.transformer.ln_f, model)]
    if isinstance(model, LlamaForCausalLM):
        return _llama(model, [_FULL] * len(model.model.layers))
    if isinstance(model, MistralForCausalLM):
        kind = _FULL if model.config.sliding_window is None else _SLIDING
        return _llama(model, [kind] * len(model.model.layers))
    if isinstance(model, Qwen2ForCausalLM | Qwen3ForCausalLM):
        return _llama(model, model.config.layer_types or [])
    return None


def _llama(model: Any, kinds: list[str]) -> list[nn.Module]:
    """Return the layers of a model that is built as Llama is, with the kind of attention that each block has."""
    decoder = model.model
    blocks = [_Block(block, kind) for block, kind in zip(decoder.layers, kinds, strict=True)]
    return [_LlamaStart(decoder, sorted(set(kinds))), *blocks, _Head(decoder.norm, model)]


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
        **options: Any,
    ) -> _Stream:
        _check_options(options)
        embedded = self.wte(input_ids)
        positions = _positions(embedded, position_ids)
        hidden = embedded + self.wpe(positions)
        mask = _mask(_FULL, self._config, embedded, attention_mask, positions)
        if token_type_ids is not None:
            hidden = hidden + self.wte(token_type_ids)
        return _Stream(
            self.drop(hidden),
            {"position_ids": positions, "use_cache": False},
            {_FULL: mask},
            {"labels": labels},
        )


class _LlamaStart(nn.Module):
    def __init__(self, decoder: Any, kinds: list[str]) -> None:
        super().__init__()
        self._kinds = kinds
        self.embed_tokens, self.rotary_emb = decoder.embed_tokens, decoder.rotary_emb
        self._config = decoder.config

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **options: Any,
    ) -> _Stream:
        _check_options(options)
        hidden = self.embed_tokens(input_ids)
        positions = _positions(hidden, position_ids)
        shared = {
            "position_ids": positions,
            "position_embeddings": self.rotary_emb(hidden, position_ids=positions),
            "use_cache": False,
        }
        masks = {kind: _mask(kind, self._config, hidden, attention_mask, positions) for kind in self._kinds}
        return _Stream(hidden, shared, masks, {"labels": labels})


class _Block(nn.Module):
    def __init__(self, block: nn.Module, kind: str) -> None:
        super().__init__()
        self.block, self._kind = block, kind

    def forward(self, stream: _Stream) -> _Stream:
        return stream._replace(
            hidden=self.block(stream.hidden, attention_mask=stream.masks[self._kind], **stream.shared)
        )


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


def _check_options(options: dict[str, Any]) -> None:
    """Accept what training scripts pass to say that they want nothing special."""
    for name, value in options.items():
        if value is not None and (name, value) not in _HARMLESS:
            raise UnsupportedError(
                f"`{name}` is not something that a Hugging Face model takes inside an OffloadModel",
                hint="pass input_ids, attention_mask, position_ids and labels; it returns logits and loss",
            )


_HARMLESS: Final = (
    ("use_cache", False),
    ("return_dict", True),
    ("output_attentions", False),
    ("output_hidden_states", False),
)


def _positions(embedded: Tensor, given: Tensor | None) -> Tensor:
    return torch.arange(embedded.shape[1], device=embedded.device).unsqueeze(0) if given is None else given


def _mask(kind: str, config: Any, embedded: Tensor, given: Tensor | None, positions: Tensor) -> Any:
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    create = {_FULL: create_causal_mask, _SLIDING: create_sliding_window_causal_mask}[kind]
    return create(
        config=config,
        inputs_embeds=embedded,
        attention_mask=given,
        past_key_values=None,
        position_ids=positions,
    )
