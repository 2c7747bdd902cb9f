"""The modules of `smp.nn` that replace Hugging Face models: their outputs, and how their calls are read."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final

import torch

from smpkit.errors import UsageError
from smpkit.torch.core.runtime import state
from smpkit.torch.nn.huggingface.calls import CallRules, check_given_once, refuse_recorded_outputs
from smpkit.torch.nn.huggingface.generation import generate
from smpkit.torch.tensor_parallel.layers.config import with_options
from smpkit.torch.tensor_parallel.layers.lm_head import DistributedTransformerLMHead, Inputs
from smpkit.torch.tensor_parallel.layers.transformer import DistributedTransformer, LayerInputs
from smpkit.torch.tensor_parallel.layouts import Layout
from smpkit.torch.tensor_parallel.loss import gather_logits, with_lazy_logits

__all__ = ["ENCODER_CALLS", "LM_HEAD_CALLS", "HuggingFaceEncoder", "HuggingFaceLMHead"]


class HuggingFaceLMHead(DistributedTransformerLMHead):
    """A language model that returns what Hugging Face's return: `output["loss"]`, `output["logits"]`.

    With labels, logits are gathered when they are first read, which all ranks of the tensor-parallel group do together.
    """

    __signature__ = with_options(DistributedTransformerLMHead)

    needs_cross_states = False

    def forward(
        self,
        inputs: Inputs,
        *,
        cross: tuple[torch.Tensor | None, ...] = (None, None),
        num_items_in_batch: torch.Tensor | int | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        return_dict: bool | None = None,
    ) -> Any:
        """Return a `CausalLMOutputWithCrossAttentions`, or without a head a `BaseModelOutputWithPast`.

        Args:
            inputs: as of a DistributedTransformerLMHead without cross attention.
            cross: the states to attend to, if there are any, and their mask.
            num_items_in_batch: divide the sum of the losses by this.
            logits_to_keep: return those of so many last positions, or of these positions; 0 for all.
            return_dict: False for a tuple; None for what the configuration says.
        """
        config: Any = self.config
        refuse_recorded_outputs(config)
        if inputs[1] is None and inputs[3] is not None and not getattr(config, "use_cache", True):
            inputs = (inputs[0], _packed_sequence_mask(inputs[3]), *inputs[2:])
        if self.add_cross_attention:
            inputs = (*inputs[:4], *cross, inputs[4])
        elif cross[0] is not None:
            raise UsageError(
                "`encoder_hidden_states` are given, and the model has no cross attention",
                hint="leave them out, or make it with `add_cross_attention=True` in its configuration",
            )
        output = self._output(self.run(inputs, num_items_in_batch), logits_to_keep)
        is_dict = getattr(config, "return_dict", True) if return_dict is None else return_dict
        return output if is_dict else output.to_tuple()

    def _output(self, result: torch.Tensor | tuple[torch.Tensor, torch.Tensor], kept: int | torch.Tensor) -> Any:
        from transformers import modeling_outputs

        if self.lm_head is None:
            assert isinstance(result, torch.Tensor)
            return modeling_outputs.BaseModelOutputWithPast(last_hidden_state=result)
        gather = functools.partial(gather_logits, num_classes=self.vocab_size, boundary=self.boundary)
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

    def _embed_token_types(self, token_types: torch.Tensor | None, ids: torch.Tensor) -> torch.Tensor | None:
        """Return the embeddings of token types, which are words of the vocabulary here."""
        if token_types is None:
            return None
        return self._embed_words(token_types.reshape(-1, ids.shape[1]))

    def generate(self, inputs: torch.Tensor | None = None, **arguments: Any) -> Any:
        """Return what `generate` of the replaced model would, for the same arguments, computed without a cache.

        All ranks of the tensor-parallel group call this together. Where each brings its own samples, each gets its rows
        of what the samples of the whole group become, padded to the longest of these. Samples are drawn with the random
        numbers of the first rank.

        Raises:
            UsageError: over a pipeline, or without a prompt.
            UnsupportedError: of a model without a head, with a cache, or with `max_time`.
        """
        return generate(self, **({} if inputs is None else {"inputs": inputs}), **arguments)


class HuggingFaceEncoder(DistributedTransformer):
    """A stack of layers that returns what Hugging Face's encoders return."""

    __signature__ = with_options(DistributedTransformer)

    def forward(self, inputs: LayerInputs, *, return_dict: bool | None = None) -> Any:
        """Return a `BaseModelOutputWithPastAndCrossAttentions`, or with `return_dict=False` a tuple."""
        from transformers import modeling_outputs

        refuse_recorded_outputs(self.config)
        hidden, mask = inputs
        assert hidden is not None
        hidden = super().forward((hidden, self._agreed_mask(mask, hidden)))[0]
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


# --- calls ------------------------------------------------------------------------------------------------------------


def _lm_head_call(given: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of HuggingFaceLMHead."""
    tokens = check_given_once(given.get("input_ids"), given.get("inputs_embeds"))
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    if positions is not None:
        positions = positions.reshape(-1, tokens.shape[1])  # one row is for all samples
        if mask is None and given.get("use_cache") is False:
            mask = _packed_sequence_mask(positions)
    inputs: list[Any] = [
        tokens,
        None if mask is None else _mask_of(mask, tokens),
        given.get("token_type_ids"),
        positions,
    ]
    options = {name: given[name] for name in ("return_dict", "logits_to_keep", "num_items_in_batch") if name in given}
    states = given.get("encoder_hidden_states")
    if states is not None:
        options["cross"] = (states, given.get("encoder_attention_mask"))
    return ((*inputs, given.get("labels")),), options


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


def _packed_sequence_mask(positions: torch.Tensor) -> torch.Tensor:
    """Return an additive mask (batch, 1, length, length) that separates sequences packed into one sample.

    Hugging Face's models do so when they make no cache. A new sequence begins where a position is not one more than the
    position before. No value is read on the host, so that the step can be traced on fake tensors.
    """
    begins = positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1
    sequence = begins.cumsum(-1)
    others = sequence.unsqueeze(1) != sequence.unsqueeze(2)
    length = positions.shape[1]
    later = torch.ones(length, length, dtype=torch.bool, device=positions.device).triu(1)
    return torch.zeros(others.shape, device=positions.device).masked_fill(others | later, -torch.inf).unsqueeze(1)


LM_HEAD_CALLS: Final = CallRules(
    honoured=frozenset(
        {
            "attention_mask",
            "encoder_attention_mask",
            "encoder_hidden_states",
            "input_ids",
            "inputs_embeds",
            "labels",
            "logits_to_keep",
            "num_items_in_batch",
            "position_ids",
            "return_dict",
            "token_type_ids",
        }
    ),
    translate=_lm_head_call,
)
"""Of language models. No cache is made, but without one positions tell of sequences packed into a sample."""


def _encoder_call(given: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    options = {"return_dict": given["return_dict"]} if "return_dict" in given else {}
    return ((given["hidden_states"], given.get("attention_mask")),), options


ENCODER_CALLS: Final = CallRules(
    honoured=frozenset({"attention_mask", "hidden_states", "return_dict"}),
    # Positions are in the embeddings; an encoder makes no cache, and has no other states that a mask could be for.
    ignored=frozenset({"encoder_attention_mask", "position_ids", "use_cache"}),
    translate=_encoder_call,
)
"""Of BERT's encoder and those that are made as it is."""
