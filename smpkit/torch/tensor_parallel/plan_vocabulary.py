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
from smpkit.torch.tensor_parallel.embedding import look_up_rows, own_row
from smpkit.torch.tensor_parallel.layouts import Layout, default_layout, divide_parameter, enter_region
from smpkit.torch.tensor_parallel.loss import causal_loss, gather_logits, with_lazy_logits


class _InForward(threading.local):
    """The state of the forward that runs in this thread.

    Over a pipeline, each microbatch that is suspended in a forward has a thread of its own.
    """

    gathered_by: nn.Module | None = None
    """The model that has gathered the inputs of all ranks."""
    has_gradients: bool | None = None
    """Whether the model that runs the layers was called with gradients; torch's reentrant checkpoint hides it."""
    loss_reads_divided_logits = False


in_forward: Final = _InForward()


def divide_vocabulary(root: nn.Module, styles: Mapping[nn.Module, str]) -> set[nn.Module]:
    """Divide the word embedding and the head of a model by the styles in its plan; return those that were divided.

    If they share their table, both are divided or neither.
    """
    embedding, head = _embedding_of(root), _head_of(root)
    divides_embedding = styles.get(embedding) == "embedding_rowwise" and _is_plain_embedding(embedding)
    divides_head = styles.get(head) in ("colwise_gather_output", "colwise_rep") and _is_plain_head(head)
    if are_tied(root) and not (divides_embedding and divides_head):
        return set()
    if divides_embedding:
        vars(embedding)["forward"] = functools.partial(_embed, embedding, embedding.num_embeddings)
        embedding.padding_idx = own_row(embedding.padding_idx, embedding.num_embeddings)
    if divides_head:
        vars(head)["forward"] = functools.partial(_logits, head)
        owner = next(module for module in root.modules() if head in module.children())
        _use_loss_of_divided_logits(owner, head.out_features)
    divided = {module for module, divides in ((embedding, divides_embedding), (head, divides_head)) if divides}
    for module in divided:
        for parameter in module.parameters():
            divide_parameter(parameter, 0)
    return divided


def are_tied(root: nn.Module) -> bool:
    """Tell whether a model's embedding and head share their table."""
    table = getattr(_embedding_of(root), "weight", None)
    return table is not None and table is getattr(_head_of(root), "weight", None)


def _answer(root: nn.Module, method: str) -> Any:
    try:
        return getattr(root, method)()
    except (AttributeError, NotImplementedError):  # not all models have an embedding and a head
        return None


_embedding_of: Final = functools.partial(_answer, method="get_input_embeddings")
_head_of: Final = functools.partial(_answer, method="get_output_embeddings")


def _is_plain_embedding(module: Any) -> bool:
    # What is trained beside the table (Inkling's norm, a vector of T5Gemma2) has no rows to divide.
    trained = [name for name, _ in module.named_parameters()] if isinstance(module, nn.Embedding) else []
    is_plain = trained == ["weight"] and module.max_norm is None
    return is_plain and not module.scale_grad_by_freq and not module.sparse and _has_rows_for_all(module.num_embeddings)


def _is_plain_head(module: Any) -> bool:
    is_plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    return is_plain and _has_rows_for_all(module.out_features)


def _has_rows_for_all(vocabulary: int) -> bool:
    return shard_range(vocabulary, state.tp_size - 1, state.tp_size)[1] > 0


def _embed(embedding: nn.Embedding, num_rows: int, indices: torch.Tensor) -> torch.Tensor:
    """Look indices up in an embedding of which this rank has some rows: its forward."""
    boundary = default_layout() if in_forward.gathered_by is None else Layout.REPLICATE
    # Of its class, which may scale rows: the instance's attribute `forward` is this function.
    return look_up_rows(indices, num_rows, boundary, functools.partial(type(embedding).forward, embedding))


def _logits(head: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Return the logits of this rank's classes, gathered unless the loss reads these: the forward of a head."""
    logits = functional.linear(enter_region(x, default_layout()), head.weight, head.bias)
    return logits if in_forward.loss_reads_divided_logits else gather_logits(logits, head.out_features)


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
