"""The word embedding and the head of a model with a plan, divided by the vocabulary.

They lie outside the list of layers: what enters the head is this rank's samples, or the batch that all ranks share.
A model that calls Hugging Face's loss of causal models gets `causal_loss` instead, which reads the logits of this
rank's classes as they are; all logits are gathered only if the script reads them. Other models get gathered logits.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Collection, Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from smpkit.torch.core.runtime import state
from smpkit.torch.placement.shards import shard_range
from smpkit.torch.tensor_parallel import collectives
from smpkit.torch.tensor_parallel.layouts import default_layout, divide_parameter, enter_region, leave_region
from smpkit.torch.tensor_parallel.loss import cross_entropy, gather_logits, with_lazy_logits

__all__ = ["are_tied", "divide_vocabulary", "in_forward"]

_HEAD: Final = ("colwise_gather_output", "colwise_rep")
_EMBEDDING: Final = ("embedding_rowwise",)


class _InForward(threading.local):
    """What is so in the forward that this thread is in.

    By thread: over a pipeline, microbatches that are suspended in a forward each have a thread of their own.
    """

    gathered_by: nn.Module | None = None
    """The model that has gathered the inputs of all ranks."""
    loss_reads_divided_logits = False


in_forward: Final = _InForward()


def divide_vocabulary(root: nn.Module, styles: Mapping[str, str], excepted: Collection[str]) -> set[str]:
    """Divide the word embedding and the head of a model, and return their names.

    A table that both share is divided if both are.

    Args:
        styles: of the plan, by name.
        excepted: names of modules that stay whole.
    """
    embedding = _find(root, styles, excepted, "get_input_embeddings", _EMBEDDING, _is_plain_embedding)
    head = _find(root, styles, excepted, "get_output_embeddings", _HEAD, _is_plain_linear)
    if are_tied(root) and (embedding is None or head is None):
        return set()
    for name in filter(None, (embedding, head)):
        module: Any = root.get_submodule(name)
        for parameter in module.parameters():
            divide_parameter(parameter, 0)
        vars(module)["forward"] = (_DividedEmbedding if isinstance(module, nn.Embedding) else _DividedHead)(module)
    if head is not None:
        vocabulary: Any = root.get_submodule(head).out_features
        _use_loss_of_divided_logits(root.get_submodule(head.rpartition(".")[0]), vocabulary)
    return {name for name in (embedding, head) if name is not None}


def are_tied(root: nn.Module) -> bool:
    """Tell whether a model's embedding and head share their table."""
    embedding, head = (_call_getter(root, getter) for getter in ("get_input_embeddings", "get_output_embeddings"))
    table = getattr(embedding, "weight", None)
    return table is not None and table is getattr(head, "weight", None)


def _find(
    root: nn.Module, styles: Mapping[str, str], excepted: Collection[str], getter: str, wanted: Any, is_plain: Any
) -> str | None:
    """Return the name of the module that `getter` returns, if it can be divided and its style is one of `wanted`."""
    module = _call_getter(root, getter)
    name = next((name for name, each in root.named_modules() if each is module), None)
    is_divisible = name is not None and styles.get(name) in wanted and name not in excepted and is_plain(module)
    return name if is_divisible else None


def _call_getter(root: nn.Module, getter: str) -> nn.Module | None:
    """Ask a model for its embedding or head; not all have one."""
    try:
        answer: nn.Module | None = getattr(root, getter)()
    except (AttributeError, NotImplementedError):
        return None
    return answer


def _is_plain_embedding(module: nn.Module) -> bool:
    if not isinstance(module, nn.Embedding) or not _has_rows_for_all(module.num_embeddings):
        return False
    return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse


def _is_plain_linear(module: nn.Module) -> bool:
    is_plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    return is_plain and _has_rows_for_all(module.out_features)  # type: ignore[arg-type]


def _has_rows_for_all(vocabulary: int) -> bool:
    return shard_range(vocabulary, state.tp_size - 1, state.tp_size)[1] > 0


# --- the modules ------------------------------------------------------------------------------------------------------


class _DividedEmbedding:
    """The forward of an embedding of which this rank has some rows: the sum over the ranks is the embedding."""

    def __init__(self, embedding: nn.Module) -> None:
        assert isinstance(embedding, nn.Embedding)
        self._embedding = embedding
        self._first, self._rows = shard_range(embedding.num_embeddings, state.tp_rank, state.tp_size)
        if embedding.padding_idx is not None:
            local = embedding.padding_idx - self._first
            embedding.padding_idx = local if 0 <= local < self._rows else None

    def __call__(self, indices: torch.Tensor) -> torch.Tensor:
        if state.cfg.prescaled_batch or in_forward.gathered_by is not None:
            return collectives.reduce_from_tp(self._look_up(indices))
        return leave_region(self._look_up(collectives.gather_to_tp(indices, 0)), default_layout())

    def _look_up(self, indices: torch.Tensor) -> torch.Tensor:
        local = indices - self._first
        is_elsewhere = (local < 0) | (local >= self._rows)
        # Of its class, which may scale rows: the instance's attribute `forward` is this object.
        rows = type(self._embedding).forward(self._embedding, local.masked_fill(is_elsewhere, 0))
        return rows.masked_fill(is_elsewhere.unsqueeze(-1), 0)


class _DividedHead:
    """The forward of a head: the logits of this rank's classes, gathered unless the loss reads these."""

    def __init__(self, head: nn.Module) -> None:
        assert isinstance(head, nn.Linear)
        self._head = head

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        logits = functional.linear(enter_region(x, default_layout()), self._head.weight, self._head.bias)
        return logits if in_forward.loss_reads_divided_logits else gather_logits(logits, self._head.out_features)


# --- the loss ---------------------------------------------------------------------------------------------------------


def _use_loss_of_divided_logits(owner: nn.Module, vocabulary: int) -> None:
    """Replace the loss of a model that calls `self.loss_function` on the logits of its head."""
    loss = getattr(owner, "loss_function", None)
    code = getattr(inspect.unwrap(type(owner).forward), "__code__", None)
    if getattr(loss, "__name__", "") != "ForCausalLMLoss" or code is None or "loss_function" not in code.co_names:
        return
    vars(owner)["_loss_function"] = causal_loss
    owner.register_forward_pre_hook(_begin_forward)
    owner.register_forward_hook(functools.partial(_gather_logits, vocabulary), always_call=True)


def _begin_forward(owner: Any, _args: Any) -> None:
    # Not known when the hook was installed: a script may set another loss function at any time.
    in_forward.loss_reads_divided_logits = owner.loss_function is causal_loss


def _gather_logits(vocabulary: int, _owner: nn.Module, _args: Any, output: Any) -> Any:
    """Gather the logits that a model returns, at once or when they are read: a hook after its forward."""
    are_divided, in_forward.loss_reads_divided_logits = in_forward.loss_reads_divided_logits, False
    if not are_divided or output is None:
        return output
    if isinstance(output, tuple):
        place = int(output[0].dim() == 0)  # after the loss, if there is one
        return (*output[:place], gather_logits(output[place], vocabulary), *output[place + 1 :])
    if output.loss is not None:
        return with_lazy_logits(output, functools.partial(gather_logits, num_classes=vocabulary))
    output.logits = gather_logits(output.logits, vocabulary)
    return output


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
