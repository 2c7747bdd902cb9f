"""`smp.nn`: modules whose weights lie on several tensor-parallel ranks."""

from __future__ import annotations

from smpkit.torch.nn import huggingface
from smpkit.torch.tensor_parallel.embedding import DistributedEmbedding, VocabularyParallelEmbedding
from smpkit.torch.tensor_parallel.layers.attention import DistributedAttentionLayer, FlashAttentionLayer
from smpkit.torch.tensor_parallel.layers.config import LayerOptions, TransformerConfig
from smpkit.torch.tensor_parallel.layers.lm_head import DistributedTransformerLMHead
from smpkit.torch.tensor_parallel.layers.norms import FusedLayerNorm
from smpkit.torch.tensor_parallel.layers.transformer import (
    DistributedTransformer,
    DistributedTransformerLayer,
    DistributedTransformerOutputLayer,
)
from smpkit.torch.tensor_parallel.linear import ColumnParallelLinear, DistributedLinear, RowParallelLinear
from smpkit.torch.tensor_parallel.loss import cross_entropy, gather_logits
from smpkit.torch.tensor_parallel.module import DistributedModule

__all__ = [
    "ColumnParallelLinear",
    "DistributedAttentionLayer",
    "DistributedEmbedding",
    "DistributedLinear",
    "DistributedModule",
    "DistributedTransformer",
    "DistributedTransformerLMHead",
    "DistributedTransformerLayer",
    "DistributedTransformerOutputLayer",
    "FlashAttentionLayer",
    "FusedLayerNorm",
    "LayerOptions",
    "RowParallelLinear",
    "TransformerConfig",
    "VocabularyParallelEmbedding",
    "cross_entropy",
    "gather_logits",
    "huggingface",
]
