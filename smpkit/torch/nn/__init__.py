"""`smp.nn`: modules whose weights lie on several tensor-parallel ranks."""

from __future__ import annotations

from smpkit.torch.nn import huggingface
from smpkit.torch.tensor_parallel.attention import DistributedAttentionLayer, FlashAttentionLayer
from smpkit.torch.tensor_parallel.cross_entropy import cross_entropy, gather_logits
from smpkit.torch.tensor_parallel.embedding import DistributedEmbedding, VocabularyParallelEmbedding
from smpkit.torch.tensor_parallel.linear import ColumnParallelLinear, DistributedLinear, RowParallelLinear
from smpkit.torch.tensor_parallel.lm_head import DistributedTransformerLMHead
from smpkit.torch.tensor_parallel.module import DistributedModule
from smpkit.torch.tensor_parallel.norms import FusedLayerNorm
from smpkit.torch.tensor_parallel.transformer import (
    DistributedTransformer,
    DistributedTransformerLayer,
    DistributedTransformerOutputLayer,
)

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
    "RowParallelLinear",
    "VocabularyParallelEmbedding",
    "cross_entropy",
    "gather_logits",
    "huggingface",
]
