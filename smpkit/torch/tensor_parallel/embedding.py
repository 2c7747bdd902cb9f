"""Embeddings whose table lies on several ranks: divided by embedding dimensions, or by the vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from smpkit.errors import UnsupportedError
from smpkit.torch.core.arguments import check_sizes
from smpkit.torch.core.runtime import state
from smpkit.torch.placement.shards import shard_range
from smpkit.torch.tensor_parallel.layouts import (
    Layout,
    check_divisible,
    gather_indices,
    leave_region,
    new_shard_parameter,
)
from smpkit.torch.tensor_parallel.linear import unshard_features
from smpkit.torch.tensor_parallel.module import DistributedModule, initialize_shard


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
        # As torch does it: which rank has the row is decided by its number from the beginning.
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
        num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse: as in torch. No
            rank sees whole rows: `max_norm`, `scale_grad_by_freq` and `sparse` are taken at their defaults only.
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
        asked = {"max_norm": max_norm is not None, "scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse}
        if any(asked.values()):
            names = " and ".join(f"`{name}`" for name, is_asked in asked.items() if is_asked)
            raise UnsupportedError(
                f"DistributedEmbedding cannot take {names}: no rank sees the whole rows that it would need",
                hint="leave it out, or keep this embedding out of tensor parallelism",
            )
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
        self.weight = new_shard_parameter((num_embeddings, embedding_dim), 0, self.boundary, device=device, dtype=dtype)
        self.reset_parameters()

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """Return (..., embedding_dim) for (...) indices."""
        padding = own_row(self.padding_idx, self.num_embeddings)
        return look_up_rows(
            indices, self.num_embeddings, self.boundary, lambda rows: functional.embedding(rows, self.weight, padding)
        )


def look_up_rows(
    indices: torch.Tensor, num_rows: int, boundary: Layout, look_up: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return the embeddings of indices, from a table of `num_rows` of which each rank holds some.

    `look_up` returns (..., embedding_dim) for the numbers that rows have on this rank.
    """
    if state.tp_size == 1:
        return look_up(indices)
    first, own_rows = shard_range(num_rows, state.tp_rank, state.tp_size)
    local = gather_indices(indices, boundary) - first
    # The first rank looks negative indices up and the last rank those past the end, so that torch refuses them.
    is_elsewhere = (local < 0) & (state.tp_rank > 0) | (local >= own_rows) & (state.tp_rank < state.tp_size - 1)
    # Row 0 stands in for the rows of other ranks: its result is masked, and with it its gradient.
    rows = look_up(local.masked_fill(is_elsewhere, 0))
    return leave_region(rows.masked_fill(is_elsewhere.unsqueeze(-1), 0), boundary)


def own_row(index: int | None, num_rows: int) -> int | None:
    """Return the number that a row of the whole table has on this rank; None if another rank holds it."""
    first, own_rows = shard_range(num_rows, state.tp_rank, state.tp_size)
    return index - first if index is not None and first <= index < first + own_rows else None
