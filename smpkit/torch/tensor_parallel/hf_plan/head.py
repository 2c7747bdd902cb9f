"""The word embedding and the head of a model with a plan, divided by the vocabulary.

They lie outside the list of layers: what enters the head is this rank's samples, or the batch that all ranks share.
A model that calls Hugging Face's loss of causal models gets `causal_loss` instead, which reads the logits of this
rank's classes as they are; all logits are gathered only if the script reads them. Other models get gathered logits.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from smpkit.torch.core.runtime import state
from smpkit.torch.placement.shards import shard_range
from smpkit.torch.tensor_parallel import collectives
from smpkit.torch.tensor_parallel.hf_plan.layers import shard_parameter, swap_class
from smpkit.torch.tensor_parallel.hf_plan.stacks import inputs_are_gathered
from smpkit.torch.tensor_parallel.layouts import Layout, default_layout, enter_region, leave_region
from smpkit.torch.tensor_parallel.loss import cross_entropy, gather_logits, with_lazy_logits

__all__ = ["shard_vocabulary"]

_HEAD: Final = ("colwise_gather_output", "colwise_rep")
_EMBEDDING: Final = ("embedding_rowwise",)


def shard_vocabulary(root: nn.Module, styles: Mapping[str, str], excepted: set[str]) -> set[str]:
    """Divide the word embedding and the head of a model, and return their names.

    A table that both share is divided if both are.

    Args:
        excepted: names of modules that stay whole.
    """
    embedding = _name_with_style(root, styles, excepted, "get_input_embeddings", _EMBEDDING)
    head = _name_with_style(root, styles, excepted, "get_output_embeddings", _HEAD)
    if embedding is not None and not _is_plain_embedding(root.get_submodule(embedding)):
        embedding = None
    if head is not None and not _is_plain_linear(root.get_submodule(head)):
        head = None
    if _are_tied(root) and (embedding is None or head is None):
        return set()
    for name in (embedding, head):
        if name is not None:
            _shard_module(root.get_submodule(name))
    if head is not None:
        module = root.get_submodule(head)
        assert isinstance(module, nn.Linear)
        _use_vocabulary_parallel_loss(root.get_submodule(head.rpartition(".")[0]), module.out_features)
    return {name for name in (embedding, head) if name is not None}


def _name_with_style(
    root: nn.Module, styles: Mapping[str, str], excepted: set[str], getter: str, wanted: tuple[str, ...]
) -> str | None:
    """Return the name of the module that `getter` returns, if it is not excepted and its style is one of `wanted`."""
    module = _call_getter(root, getter)
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
    return shard_range(vocabulary, state.tp_size - 1, state.tp_size)[1] == 0


def _are_tied(root: nn.Module) -> bool:
    embedding, head = (_call_getter(root, getter) for getter in ("get_input_embeddings", "get_output_embeddings"))
    table = getattr(embedding, "weight", None)
    return table is not None and table is getattr(head, "weight", None)


def _call_getter(root: nn.Module, getter: str) -> nn.Module | None:
    """Ask a model for its embedding or head; not all have one."""
    try:
        answer: nn.Module | None = getattr(root, getter)()
    except (AttributeError, NotImplementedError):
        return None
    return answer


def _shard_module(module: nn.Module) -> None:
    boundary = default_layout()
    for parameter in module.parameters():
        shard_parameter(parameter, 0, boundary)
    if isinstance(module, nn.Embedding):
        first, rows = shard_range(module.num_embeddings, state.tp_rank, state.tp_size)
        if module.padding_idx is not None:
            local = module.padding_idx - first
            module.padding_idx = local if 0 <= local < rows else None
        vars(module)["tp_rows"] = (first, rows)  # past nn.Module's registration, and copied with the module
    swap_class(module, _VocabularyParallelEmbedding if isinstance(module, nn.Embedding) else _VocabularyParallelHead)


# --- the loss ---------------------------------------------------------------------------------------------------------


def _use_vocabulary_parallel_loss(owner: nn.Module, vocabulary: int) -> None:
    """Replace the loss of a model that calls `self.loss_function` on the logits of its head."""
    loss = getattr(owner, "loss_function", None)
    code = getattr(inspect.unwrap(type(owner).forward), "__code__", None)
    if getattr(loss, "__name__", "") != "ForCausalLMLoss" or code is None or "loss_function" not in code.co_names:
        return
    vars(owner)["_loss_function"] = causal_loss
    owner.register_forward_pre_hook(_begin_forward)
    owner.register_forward_hook(functools.partial(_gather_logits, vocabulary), always_call=True)


def causal_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Compute Hugging Face's loss of causal models, from the logits of this rank's part of the vocabulary."""
    if logits.dtype.itemsize < 4:
        logits = logits.float()
    if shift_labels is None:  # each position is compared with the next token
        shift_labels = functional.pad(labels[..., 1:], (0, 1), value=ignore_index)
    if num_items_in_batch is None:
        return cross_entropy(logits, shift_labels, ignore_index=ignore_index, num_classes=vocab_size)
    total = cross_entropy(logits, shift_labels, ignore_index=ignore_index, reduction="sum", num_classes=vocab_size)
    return total / num_items_in_batch


class _LogitsState(threading.local):
    """Whether this thread is in the forward of a model whose loss reads the divided logits."""

    split = False


_logits_state = _LogitsState()


def _begin_forward(owner: Any, _args: Any) -> None:
    # Not known when the hook was installed: a script may set another loss function at any time.
    _logits_state.split = owner.loss_function is causal_loss


def _gather_logits(vocabulary: int, _owner: nn.Module, _args: Any, output: Any) -> Any:
    """Gather the logits that a model returns, at once or when they are read: a hook after its forward."""
    were_sharded, _logits_state.split = _logits_state.split, False
    if not were_sharded or output is None:
        return output
    if isinstance(output, tuple):
        place = int(output[0].dim() == 0)  # after the loss, if there is one
        return (*output[:place], gather_logits(output[place], vocabulary), *output[place + 1 :])
    if output.loss is not None:
        return with_lazy_logits(output, functools.partial(gather_logits, num_classes=vocabulary))
    output.logits = gather_logits(output.logits, vocabulary)
    return output


# --- the modules ------------------------------------------------------------------------------------------------------


class _VocabularyParallelEmbedding:
    """Looks up the tokens whose rows this rank has; those of other ranks are 0, and the sum over ranks is whole."""

    tp_rows: tuple[int, int]

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        boundary = default_layout()
        if boundary is Layout.REPLICATE:
            return collectives.reduce_from_tp(self._look_up_own_rows(indices))
        if inputs_are_gathered():
            # `copy_to_tp` sums the gradients: each rank's is that of its own samples (_OwnGradient in stacks.py).
            return collectives.copy_to_tp(collectives.reduce_from_tp(self._look_up_own_rows(indices)))
        return leave_region(self._look_up_own_rows(collectives.gather_to_tp(indices, 0)), boundary)

    def _look_up_own_rows(self, indices: torch.Tensor) -> torch.Tensor:
        first, rows = self.tp_rows
        local = indices - first
        not_on_this_rank = (local < 0) | (local >= rows)
        found: torch.Tensor = super().forward(local.masked_fill(not_on_this_rank, 0))  # type: ignore[misc]
        return found.masked_fill(not_on_this_rank.unsqueeze(-1), 0)


class _VocabularyParallelHead:
    """Computes the logits of this rank's classes; outside of a model whose loss reads these, gathers all classes."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    out_features: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = functional.linear(enter_region(x, default_layout()), self.weight, self.bias)
        return logits if _logits_state.split else gather_logits(logits, self.out_features)
