"""Embeddings whose table lies on several ranks: divided by embedding dimensions, or by the vocabulary."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from smpkit.errors import UnsupportedError
from smpkit.torch.core.arguments import check_sizes
from smpkit.torch.core.runtime import state
from smpkit.torch.placement.shards import shard_range
from smpkit.torch.tensor_parallel import collectives
from smpkit.torch.tensor_parallel.layers.linear import unshard_features
from smpkit.torch.tensor_parallel.layouts import (
    Layout,
    check_divisible,
    leave_region,
    new_shard_parameter,
)
from smpkit.torch.tensor_parallel.module import DistributedModule, initialize_shard

__all__ = ["DistributedEmbedding", "VocabularyParallelEmbedding"]


class _Embedding(DistributedModule):
    """nn.Embedding's arguments and initialisation, for both ways of dividing the table."""

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None,
        initializer_range: float | None,
        boundary: Layout | None,
    ) -> None:
        super().__init__(boundary=boundary)
        check_sizes(type(self).__name__, num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        # Resolved as torch does it, before rows are compared with the pieces of ranks.
        if padding_idx is not None and padding_idx < 0:
            padding_idx += num_embeddings
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx
        self.initializer_range = initializer_range

    def reset_parameters(self) -> None:
        """Initialise this rank's piece of the table that one process would hold; the padding row is 0."""
        initialize_shard(self.weight, self._initialize)

    def _initialize(self, whole: torch.Tensor) -> None:
        nn.init.normal_(whole, 0.0, 1.0 if self.initializer_range is None else self.initializer_range)
        if self.padding_idx is not None:
            whole[self.padding_idx].zero_()

    def extra_repr(self) -> str:
        """Return what torch's own prints, and the boundary."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, boundary={self.boundary.value}"


class DistributedEmbedding(_Embedding):
    """An embedding that takes the place of `torch.nn.Embedding` (the class of that name in SMP v1).

    The embedding dimension is divided: the local table is (num_embeddings, embedding_dim / tp_size).

    Args:
        num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse: as in torch; the
            three that change gradients or weights by what other ranks hold (`max_norm`, `scale_grad_by_freq` and
            `sparse`) are taken at their defaults only.
        _weight: the whole table to begin with.
        initializer_range: the table is drawn from N(0, initializer_range); None for torch's N(0, 1).
        _skip_allgather: the indices are those of all ranks already.
        _skip_scatter_and_merge: return this rank's dimensions of all ranks' samples.

    Raises:
        ConfigError: the ranks do not divide the embedding dimension.
        UnsupportedError: an argument that cannot be had under tensor parallelism.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: torch.Tensor | None = None,
        initializer_range: float | None = 0.02,
        _skip_allgather: bool = False,
        _skip_scatter_and_merge: bool = False,
        *,
        boundary: Layout | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, initializer_range, boundary)
        _refuse(max_norm=max_norm, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)
        check_divisible("embedding_dim", embedding_dim)
        self.norm_type = norm_type
        self._skip_allgather = _skip_allgather
        self._skip_scatter_and_merge = _skip_scatter_and_merge
        self.weight = new_shard_parameter((num_embeddings, embedding_dim), 1, self.boundary, device=device, dtype=dtype)
        if _weight is None:
            self.reset_parameters()
        else:
            self.load_whole({"weight": _weight})

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """Return (..., embedding_dim) for (...) indices."""
        if not self._skip_allgather:
            indices = gather_indices(indices, self.boundary)
        output = functional.embedding(indices, self.weight, self.padding_idx)
        return output if self._skip_scatter_and_merge else unshard_features(output, self.boundary)


class VocabularyParallelEmbedding(_Embedding):
    """An embedding of which each rank holds some rows; the table may be tied to a head that makes logits.

    Rows need not divide evenly: the last ranks have fewer.

    Args:
        num_embeddings, embedding_dim, padding_idx: as in torch.
        initializer_range: the table is drawn from N(0, initializer_range); None for torch's N(0, 1).
        boundary: what comes in and goes out; under SHARD_SEQUENCE whole sequences of indices come in.

    Raises:
        ConfigError: there are fewer rows than ranks.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        initializer_range: float | None = None,
        boundary: Layout | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, initializer_range, boundary)
        if shard_range(num_embeddings, state.tp_size - 1, state.tp_size)[1] < 1:
            check_divisible("num_embeddings", num_embeddings)
        self.first, self.num_rows = shard_range(num_embeddings, state.tp_rank, state.tp_size)
        self.weight = new_shard_parameter((num_embeddings, embedding_dim), 0, self.boundary, device=device, dtype=dtype)
        self.reset_parameters()

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """Return (..., embedding_dim) for (...) indices.

        Each rank looks up the rows that it has and puts 0 for the others: the sum over the ranks is the embedding.
        """
        if state.tp_size == 1:
            return functional.embedding(indices, self.weight, self.padding_idx)
        local = gather_indices(indices, self.boundary) - self.first
        not_on_this_rank = self._not_on_this_rank(local)
        # Row 0 stands in for the rows of other ranks: its result is masked, and with it its gradient.
        rows = functional.embedding(local.masked_fill(not_on_this_rank, 0), self.weight, self._own_padding_idx)
        return leave_region(rows.masked_fill(not_on_this_rank.unsqueeze(-1), 0), self.boundary)

    def _not_on_this_rank(self, local: torch.Tensor) -> torch.Tensor:
        # The first rank looks negative indices up and the last rank those past the end, so that torch refuses them.
        if state.tp_rank > 0:
            elsewhere = local < 0
        else:
            elsewhere = torch.zeros_like(local, dtype=torch.bool)
        if state.tp_rank < state.tp_size - 1:
            elsewhere = elsewhere | (local >= self.num_rows)
        return elsewhere

    @property
    def _own_padding_idx(self) -> int | None:
        local = -1 if self.padding_idx is None else self.padding_idx - self.first
        return local if 0 <= local < self.num_rows else None


def gather_indices(indices: torch.Tensor, boundary: Layout) -> torch.Tensor:
    """Return the indices (or labels, masks: what has no gradient) of all samples of the group."""
    if boundary is not Layout.SHARD_BATCH:
        return indices
    with torch.no_grad():
        return collectives.gather_to_tp(indices, 0)


def _refuse(*, max_norm: float | None, scale_grad_by_freq: bool, sparse: bool) -> None:
    asked = {"max_norm": max_norm is not None, "scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse}
    if any(asked.values()):
        names = " and ".join(f"`{name}`" for name, is_asked in asked.items() if is_asked)
        raise UnsupportedError(
            f"DistributedEmbedding cannot take {names}: no rank sees the whole rows that it would need",
            hint="leave it out, or keep this embedding out of tensor parallelism",
        )
