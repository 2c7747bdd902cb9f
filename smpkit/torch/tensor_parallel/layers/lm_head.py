"""A whole language model, divided over the tensor-parallel ranks: embeddings, layers, head and loss.

Shapes, of this rank's samples outside of the stack of layers and of what its layout says inside (layouts.py)::

    input_ids, labels   [batch, length]
    hidden states       [batch, length, hidden_size]
    logits of the head  [batch of the group, length, vocab_size / tp_size]    this rank's classes
    logits, returned    [batch, length, vocab_size], or as the head makes them with `whole_logits=False`
    loss                one number, the mean over this rank's samples
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from smpkit.errors import UsageError
from smpkit.torch.tensor_parallel import collectives
from smpkit.torch.tensor_parallel.dropout import ParallelDropout
from smpkit.torch.tensor_parallel.embedding import VocabularyParallelEmbedding
from smpkit.torch.tensor_parallel.layers.attention import additive_mask, unpack_tuple
from smpkit.torch.tensor_parallel.layers.config import OPTIONS, TransformerConfig, config_of
from smpkit.torch.tensor_parallel.layers.norms import optional_layernorm
from smpkit.torch.tensor_parallel.layers.transformer import DistributedTransformer, LayerInputs
from smpkit.torch.tensor_parallel.layouts import Layout, mark_replicated, stack_layout
from smpkit.torch.tensor_parallel.linear import ColumnParallelLinear
from smpkit.torch.tensor_parallel.loss import causal_loss, gather_logits
from smpkit.torch.tensor_parallel.module import DistributedModule


class ReplicatedEmbedding(nn.Embedding):
    """A small embedding (of positions, of token types): every rank holds it, for what it holds of the values."""

    def __init__(self, num_embeddings: int, embedding_dim: int, initializer_range: float, boundary: Layout) -> None:
        self.initializer_range = initializer_range
        super().__init__(num_embeddings, embedding_dim)
        for table in self.parameters():
            mark_replicated(table, boundary)

    def reset_parameters(self) -> None:
        """Draw the table from N(0, initializer_range)."""
        nn.init.normal_(self.weight, 0.0, self.initializer_range)


class DistributedTransformerLMHead(DistributedModule):
    """A transformer with embeddings, and a head that is tied to the word embedding (the class of that name in SMP v1).

    Word embedding and head are divided by the vocabulary, so the loss needs no rank to hold all logits of a sample.
    With `pre_layernorm` alone the output of the stack is normalised, as in GPT-2; with `post_layernorm` alone the
    embeddings are, as in BERT; with both, DistributedTransformer does both.

    Args:
        config: a TransformerConfig, or its fields in SMP v1's order or by name.
    """

    options = OPTIONS

    def __init__(
        self,
        num_layers: int | TransformerConfig = 12,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        vocab_size: int = 30522,
        num_positions: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-05,
        num_token_types: int = 0,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        add_lm_head: bool = True,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        *,
        tie_lm_head: bool = True,
        lm_head_bias: bool = False,
        whole_logits: bool = True,
        embedding_dropout_prob: float | None = None,
        window_sizes: Sequence[int | None] | None = None,
        **options: Any,
    ) -> None:
        config = config_of(type(self), locals(), options)
        super().__init__()
        self.inner = stack_layout()
        self.vocab_size = config.vocab_size
        self.is_causal = config.causal_mask_size is not None
        self.add_cross_attention = config.add_cross_attention
        self.rotates = bool(config.rotary_dim) and not config.add_cross_attention
        self.whole_logits = config.whole_logits
        self.word_embedding = VocabularyParallelEmbedding(
            config.vocab_size, config.hidden_size, initializer_range=config.initializer_range, boundary=self.inner
        )
        self.position_embedding = self._small_embedding(config.num_positions, config)
        self.token_type_embedding = self._small_embedding(config.num_token_types, config)
        after_only = config.post_layernorm and not config.pre_layernorm
        self.embedding_layernorm = optional_layernorm(after_only, config, self.inner)
        self.dropout = ParallelDropout(config.embedding_dropout, self.inner)
        self.transformer = DistributedTransformer(config, boundary=self.inner)
        before_only = config.pre_layernorm and not config.post_layernorm
        self.layernorm = optional_layernorm(before_only, config, self.inner)
        self.lm_head = None
        if config.add_lm_head:
            self.lm_head = ColumnParallelLinear(
                config.hidden_size,
                config.vocab_size,
                config.lm_head_bias,
                boundary=self.inner,
                initializer_range=config.initializer_range,
            )
            if config.tie_lm_head:
                self.lm_head.weight = self.word_embedding.weight

    def _small_embedding(self, rows: int, config: TransformerConfig) -> ReplicatedEmbedding | None:
        return ReplicatedEmbedding(rows, config.hidden_size, config.initializer_range, self.inner) if rows else None

    def forward(
        self, inputs: LayerInputs, num_items: torch.Tensor | int | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return logits, or `(loss, logits)` if there are labels, or hidden states without a head.

        Args:
            inputs: `(input_ids, attention_mask, token_type_ids, position_ids, labels)`, or with cross attention
                `(input_ids, attention_mask, token_type_ids, position_ids, cross_states, cross_mask, labels)`; all but
                `input_ids` may be None; these may also be embeddings, (batch, length, hidden_size). Positions, (batch,
                length) or (1, length), are looked up in the position embedding and rotate queries and keys; None is 0,
                1, 2, .... Masks of (batch, length) are 1 where positions may be attended to, as in Hugging Face's
                models; masks of four dimensions are added to the scores, or True where positions may be attended to.
                With a causal mask each label is compared with the logits of the position before, so that `labels` may
                be `input_ids`; labels of -100 count for nothing.
            num_items: divide the sum of the losses by this; None for the mean.

        Raises:
            UsageError: the tuple has another length, or positions are given that nothing here reads.
        """
        parts = self._parts_of(inputs)
        ids, positions, labels = parts["input_ids"], parts["position_ids"], parts["labels"]
        hidden = self._embed(ids, parts["token_type_ids"], positions)
        mask, cross_mask = (_as_additive(parts.get(name), hidden.dtype) for name in ("attention_mask", "cross_mask"))
        if self.add_cross_attention:
            hidden = self.transformer((hidden, parts["cross_states"], mask, cross_mask))[0]
        else:
            more = (positions,) if positions is not None and self.rotates else ()
            hidden = self.transformer((hidden, mask, *more))[0]
        if self.layernorm is not None:
            hidden = self.layernorm(hidden)
        if self.lm_head is None:
            return collectives.gather_from_tp(hidden, 1) if self.inner is Layout.SHARD_SEQUENCE else hidden
        logits = self.lm_head(hidden)
        whole = gather_logits(logits, self.vocab_size) if self.whole_logits else logits
        if labels is None:
            return whole
        shifted = None if self.is_causal else labels
        return causal_loss(logits, labels, self.vocab_size, num_items, shift_labels=shifted), whole

    def _parts_of(self, inputs: LayerInputs) -> dict[str, Any]:
        names = ["input_ids", "attention_mask", "token_type_ids", "position_ids", "labels"]
        if self.add_cross_attention:
            names[4:4] = ["cross_states", "cross_mask"]
        parts = unpack_tuple("DistributedTransformerLMHead", inputs, names)
        if self.add_cross_attention and parts["cross_states"] is None:
            raise UsageError("DistributedTransformerLMHead needs `cross_states`")
        if parts["position_ids"] is not None and self.position_embedding is None and not self.rotates:
            raise UsageError(
                "`position_ids` are given, but this model has no position embedding, and positions do not rotate"
                " queries and keys",
                hint="leave them out; num_positions or rotary_dim make a model that reads them",
            )
        return parts

    def _embed(
        self, ids: torch.Tensor, token_types: torch.Tensor | None, positions: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the sum of the embeddings, normalised and with dropout, as the layers take it."""
        hidden = self._embed_words(ids)
        if self.position_embedding is not None:
            if positions is None:
                positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
            else:  # given: ranks with their own samples may have other ones
                positions = positions.expand(ids.shape[0], -1)
            hidden = hidden + self.position_embedding(self._own_positions(positions))
        types = self._embed_token_types(token_types, ids)
        if types is not None:
            hidden = hidden + types
        if self.embedding_layernorm is not None:
            hidden = self.embedding_layernorm(hidden)
        dropped: torch.Tensor = self.dropout(hidden)
        return dropped

    def _embed_words(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of tokens, as the layers take them; given ones as they are."""
        embedded: torch.Tensor = self._own_positions(ids) if ids.is_floating_point() else self.word_embedding(ids)
        return embedded

    def _embed_token_types(self, token_types: torch.Tensor | None, ids: torch.Tensor) -> torch.Tensor | None:
        if self.token_type_embedding is None:
            return None
        if token_types is None:
            token_types = torch.zeros(ids.shape[:2], dtype=torch.int64, device=ids.device)
        embedded: torch.Tensor = self.token_type_embedding(self._own_positions(token_types))
        return embedded

    def _own_positions(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of those positions that this rank holds inside the stack."""
        return collectives.scatter_to_tp(values, 1) if self.inner is Layout.SHARD_SEQUENCE else values


def _as_additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if mask is None:
        return None
    if mask.dim() == 2:  # [batch, length] of 0 and 1 -> [batch, 1, 1, length]
        mask = mask[:, None, None, :] != 0
    return additive_mask(mask, dtype)
