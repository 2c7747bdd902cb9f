"""`smp.nn`: modules whose weights lie on several tensor-parallel ranks."""

from __future__ import annotations

from smpkit.torch.tensor_parallel.embedding import DistributedEmbedding, VocabularyParallelEmbedding
from smpkit.torch.tensor_parallel.linear import ColumnParallelLinear, DistributedLinear, RowParallelLinear
from smpkit.torch.tensor_parallel.module import DistributedModule
from smpkit.torch.tensor_parallel.norms import FusedLayerNorm

__all__ = [
    "ColumnParallelLinear",
    "DistributedEmbedding",
    "DistributedLinear",
    "DistributedModule",
    "FusedLayerNorm",
    "RowParallelLinear",
    "VocabularyParallelEmbedding",
]
