"""The word embedding and the head of a model with a plan, divided by the vocabulary.

They lie outside the list of layers: what enters the head is this rank's samples, or the batch that all share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from smpkit.torch.state import state
from smpkit.torch.tensor_parallel import collectives
from smpkit.torch.tensor_parallel.boundary import Boundary, enter, leave, outer_boundary
from smpkit.torch.tensor_parallel.linear import leave_features
from smpkit.torch.tensor_parallel.plan_layers import become, split_parameter
from smpkit.torch.tensor_parallel.plan_stacks import inputs_are_gathered
from smpkit.torch.tensor_parallel.shards import piece_of

__all__ = ["split_head"]

_HEAD: Final = ("colwise_gather_output", "colwise_rep")
_EMBEDDING: Final = ("embedding_rowwise",)


def split_head(root: nn.Module, styles: Mapping[str, str], excepted: set[str]) -> set[str]:
    """Divide the word embedding and the head of a model, and return their names.

    A table that both share is divided if both are.

    Args:
        excepted: names of modules that stay whole.
    """
    embedding = _named(root, styles, excepted, "get_input_embeddings", _EMBEDDING)
    head = _named(root, styles, excepted, "get_output_embeddings", _HEAD)
    if embedding is not None and not _is_plain_embedding(root.get_submodule(embedding)):
        embedding = None
    if head is not None and not _is_plain_linear(root.get_submodule(head)):
        head = None
    if _are_tied(root) and (embedding is None or head is None):
        return set()
    for name in (embedding, head):
        if name is not None:
            _split(root.get_submodule(name))
    return {name for name in (embedding, head) if name is not None}


def _named(
    root: nn.Module, styles: Mapping[str, str], excepted: set[str], getter: str, wanted: tuple[str, ...]
) -> str | None:
    """Return the name of the module that `getter` answers, if the plan gives it a style that is wanted."""
    module = _answer(root, getter)
    for name, each in root.named_modules():
        if each is module:
            return name if styles.get(name) in wanted and name not in excepted else None
    return None


def _is_plain_embedding(module: nn.Module) -> bool:
    if not isinstance(module, nn.Embedding) or _is_too_small(module.num_embeddings):
        return False
    return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse


def _is_plain_linear(module: nn.Module) -> bool:
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and not _is_too_small(module.out_features)
    )


def _is_too_small(vocabulary: int) -> bool:
    return piece_of(vocabulary, state.tp_size - 1, state.tp_size)[1] == 0


def _are_tied(root: nn.Module) -> bool:
    embedding, head = (_answer(root, getter) for getter in ("get_input_embeddings", "get_output_embeddings"))
    table = getattr(embedding, "weight", None)
    return table is not None and table is getattr(head, "weight", None)


def _answer(root: nn.Module, getter: str) -> nn.Module | None:
    """Ask a model for its embedding or head; not all have one."""
    try:
        answer: nn.Module | None = getattr(root, getter)()
    except (AttributeError, NotImplementedError):
        return None
    return answer


def _split(module: nn.Module) -> None:
    boundary = outer_boundary()
    for parameter in module.parameters():
        split_parameter(parameter, 0, boundary)
    if isinstance(module, nn.Embedding):
        first, rows = piece_of(module.num_embeddings, state.tp_rank, state.tp_size)
        if module.padding_idx is not None:
            local = module.padding_idx - first
            module.padding_idx = local if 0 <= local < rows else None
        vars(module)["tp_rows"] = (first, rows)
    become(module, _Rows if isinstance(module, nn.Embedding) else _Head)


class _Rows:
    """Looks up the tokens whose rows this rank has; the others' are 0, and the ranks' are added."""

    tp_rows: tuple[int, int]

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        boundary = outer_boundary()
        if boundary is Boundary.REPLICATE:
            return collectives.reduce(self._rows_of(indices))
        if inputs_are_gathered():
            # Each rank's gradient is that of its own samples: they add up too.
            return collectives.copy(collectives.reduce(self._rows_of(indices)))
        return leave(self._rows_of(collectives.gather(indices, 0)), boundary)

    def _rows_of(self, indices: torch.Tensor) -> torch.Tensor:
        first, rows = self.tp_rows
        local = indices - first
        elsewhere = (local < 0) | (local >= rows)
        found: torch.Tensor = super().forward(local.masked_fill(elsewhere, 0))  # type: ignore[misc]
        return found.masked_fill(elsewhere.unsqueeze(-1), 0)


class _Head:
    """Makes the logits of this rank's part of the vocabulary, and returns all ranks'."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    out_features: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        boundary = outer_boundary()
        logits = functional.linear(enter(x, boundary), self.weight, self.bias)
        longest = -(-self.out_features // state.tp_size)
        padded: Any = functional.pad(logits, (0, longest - logits.shape[-1]))
        return leave_features(padded, boundary).narrow(-1, 0, self.out_features)
