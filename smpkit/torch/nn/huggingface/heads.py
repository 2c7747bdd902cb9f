"""The modules of `smp.nn` that replace Hugging Face models: they are called as those are, and return what those do."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from smpkit.errors import UnsupportedError, UsageError
from smpkit.torch.core.runtime import state
from smpkit.torch.tensor_parallel.layers.lm_head import DistributedTransformerLMHead
from smpkit.torch.tensor_parallel.layers.transformer import DistributedTransformer
from smpkit.torch.tensor_parallel.layouts import Layout
from smpkit.torch.tensor_parallel.loss import gather_logits, with_lazy_logits


class HuggingFaceLMHead(DistributedTransformerLMHead):
    """A language model that returns what Hugging Face's return: `output["loss"]`, `output["logits"]`.

    With labels, logits are gathered when they are first read, which all ranks of the tensor-parallel group do together.
    """

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Any:
        """Return a `CausalLMOutputWithCrossAttentions`, or without a head a `BaseModelOutputWithPast`.

        Args are those of Hugging Face's models, by name.

        Raises:
            UnsupportedError: `others`, or the configuration, ask for something; this module keeps no cache.
            UsageError: arguments contradict each other.
        """
        refuse_others(others, self.config)
        if (input_ids is None) is (inputs_embeds is None):
            both = "neither" if input_ids is None else "both"
            raise UsageError(f"the model was called with {both} of `input_ids`, `inputs_embeds`")
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        assert tokens is not None
        if position_ids is not None and attention_mask is None:
            raise UsageError(
                "`position_ids` are given without `attention_mask`, which may mean several sequences in one sample",
                hint="give `attention_mask`, too: ones if each sample is one sequence",
            )
        positions = None if position_ids is None else position_ids.reshape(-1, tokens.shape[1])
        mask = None if attention_mask is None else _mask_of(attention_mask, tokens)
        result = super().forward((tokens, mask, token_type_ids, positions, labels), num_items_in_batch)
        output = self._output(result, logits_to_keep)
        is_dict = getattr(self.config, "return_dict", True) if return_dict is None else return_dict
        return output if is_dict else output.to_tuple()

    def _output(self, result: torch.Tensor | tuple[torch.Tensor, torch.Tensor], kept: int | torch.Tensor) -> Any:
        from transformers import modeling_outputs

        if self.lm_head is None:
            assert isinstance(result, torch.Tensor)
            return modeling_outputs.BaseModelOutputWithPast(last_hidden_state=result)
        gather = functools.partial(gather_logits, num_classes=self.vocab_size)
        keeps_all = isinstance(kept, int) and kept == 0
        if isinstance(result, tuple):
            if not keeps_all:
                raise UsageError(
                    "`logits_to_keep` is given with `labels`, which are compared with the logits of all positions",
                    hint="leave one of them out",
                )
            output = modeling_outputs.CausalLMOutputWithCrossAttentions(loss=result[0], logits=result[1])
            return with_lazy_logits(output, gather)
        logits = gather(result)
        if not keeps_all:
            logits = logits[:, slice(-kept, None) if isinstance(kept, int) else kept]
        return modeling_outputs.CausalLMOutputWithCrossAttentions(logits=logits)

    def generate(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse to generate."""
        hint = "load `model.original_state_dict()` into the original class, and generate there"
        raise UnsupportedError(
            "a model that tensor parallelism has replaced keeps no cache to generate with", hint=hint
        )

    def _embed_token_types(self, token_types: torch.Tensor | None, ids: torch.Tensor) -> torch.Tensor | None:
        """Return the embeddings of token types, which are words of the vocabulary here."""
        return None if token_types is None else self._embed_words(token_types.reshape(-1, ids.shape[1]))


class HuggingFaceEncoder(DistributedTransformer):
    """A stack of layers that returns what Hugging Face's encoders return."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        return_dict: bool | None = None,
        encoder_attention_mask: Any = None,  # noqa: ARG002  for states that an encoder does not have
        position_ids: Any = None,  # noqa: ARG002  they are in the embeddings
        use_cache: Any = None,  # noqa: ARG002  an encoder has none
        num_items_in_batch: Any = None,  # noqa: ARG002  it is for the loss
        **others: Any,
    ) -> Any:
        """Return a `BaseModelOutputWithPastAndCrossAttentions`, or with `return_dict=False` a tuple."""
        from transformers import modeling_outputs

        refuse_others(others, self.config)
        hidden = super().forward((hidden_states, self._agreed_mask(attention_mask, hidden_states)))[0]
        if return_dict is False:
            return (hidden,)
        return modeling_outputs.BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden)

    def _agreed_mask(self, mask: torch.Tensor | None, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return a mask of four dimensions, of the form that the other ranks of the group have, whatever their samples.

        From one of (batch, length) Hugging Face makes one with a row for each position, all equal, or passes it on as
        it is (for flash attention); and none where nothing is padding.
        """
        samples, length = hidden.shape[:2]
        if mask is None:
            if state.tp_size == 1 or self.boundary is not Layout.SHARD_BATCH:
                return None
            return hidden.new_zeros((samples, 1, length, length))
        if mask.dim() == 2:
            return mask[:, None, None, :].bool().expand(-1, -1, length, -1)
        return mask[:, None].bool() if mask.dim() == 3 else mask


def refuse_others(others: Mapping[str, Any], config: Any) -> None:
    """Refuse arguments that ask for something, and a configuration that asks for outputs of the layers."""
    hint = "leave it out, or load the weights (`original_state_dict`) into the original model"
    for name, value in others.items():
        asked = value if isinstance(value, (list, tuple)) else [value]  # a head mask has a part for each layer
        if any(part is not None and part is not False for part in asked):
            raise UnsupportedError(
                f"a model that tensor parallelism has replaced cannot be called with `{name}`", hint=hint
            )
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, False):
            raise UnsupportedError(
                f"the configuration has `{name}`, and a model that tensor parallelism has replaced returns none",
                hint=f"set `model.config.{name} = False`",
            )


def _mask_of(mask: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return a mask of (samples, length), or of four dimensions with a row for each position."""
    if mask.dim() == 4:
        return mask.expand(-1, -1, tokens.shape[1], -1) if mask.shape[2] == 1 else mask
    if mask.numel() != tokens.shape[0] * tokens.shape[1]:
        samples, length = tokens.shape[:2]
        raise UsageError(
            f"`attention_mask` is {list(mask.shape)}, for {samples} samples of {length} positions",
            hint=f"give [{samples}, {length}], or [{samples}, 1, {length}, {length}]",
        )
    return mask.reshape(tokens.shape[:2])
