"""Loss and logits of a vocabulary that is divided over the tensor-parallel ranks.

Logits are the largest tensors of a language model. Each rank keeps those of its classes, for all samples of the group:
[samples, ..., classes / tp_size].

`cross_entropy` needs no more than that. Each rank reduces its classes to two numbers per sample: the logarithm of its
sum of exponentials, and the logit of the label if that is one of its classes. One exchange of these gives the loss, and
the gradients of the logits need nothing else.

`gather_logits` brings the classes together for whoever wants them all. For Hugging Face models, whose outputs carry
logits beside the loss, `with_lazy_logits` puts that off until `output.logits` (or `output["logits"]`) is read: a
training loop reads the loss only. Reading it is a collective, so all ranks of the group do, or none.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from smpkit.errors import UsageError
from smpkit.torch.core import devices
from smpkit.torch.core.runtime import state
from smpkit.torch.placement.shards import shard_range
from smpkit.torch.tensor_parallel import collectives
from smpkit.torch.tensor_parallel.layouts import Layout, default_layout, gather_indices
from smpkit.torch.tensor_parallel.linear import unshard_features


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    num_classes: int | None = None,
) -> torch.Tensor:
    """Return the cross entropy of this rank's samples, as `torch.nn.functional.cross_entropy` does of whole logits.

    Args:
        logits: (samples, ..., this rank's classes), of the samples of all ranks of the tensor-parallel group: what
            ColumnParallelLinear returns. The classes are the last dimension.
        labels: (samples, ...), of this rank's samples.
        ignore_index: label of samples that count for nothing.
        reduction: `mean` over the samples that count, `sum`, or `none` (the loss of each).
        num_classes: of all ranks; None if each has as many.

    Raises:
        UsageError: shapes do not fit, the reduction is unknown, or (on the CPU) a label is no class.
        RuntimeError: a label is no class, on a GPU; it comes when the host waits for the GPU next.
    """
    if has_torch_function((logits, labels)):  # a StageTensor: the call runs on the pipeline rank that has the values
        options: Any = {"ignore_index": ignore_index, "num_classes": num_classes}
        return handle_torch_function(cross_entropy, (logits, labels), logits, labels, reduction=reduction, **options)
    if reduction not in ("mean", "sum", "none"):
        raise UsageError(f"the reduction `{reduction}` is unknown", hint="use `mean`, `sum` or `none`")
    losses = _losses(logits, labels, ignore_index, num_classes)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (labels != ignore_index).sum()


def causal_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Return Hugging Face's loss of causal models, from the logits of this rank's part of the vocabulary.

    Args:
        logits: (samples, length, this rank's classes).
        labels: (samples, length); each position is compared with the label of the next one.
        vocab_size: classes of all ranks.
        num_items_in_batch: divide the sum by this; None for the mean.
        ignore_index: label of positions that count for nothing.
        shift_labels: labels that are compared as they lie, instead of `labels`.
    """
    if shift_labels is None:  # not the logits: a slice of these would be a copy of the largest tensor there is
        shift_labels = functional.pad(labels[..., 1:], (0, 1), value=ignore_index)
    options: dict[str, Any] = {"ignore_index": ignore_index, "num_classes": vocab_size}
    if num_items_in_batch is None:
        return cross_entropy(logits, shift_labels, **options)
    return cross_entropy(logits, shift_labels, reduction="sum", **options) / num_items_in_batch


def _losses(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int, num_classes: int | None) -> torch.Tensor:
    """Return the loss of each of this rank's samples, 0 where its label is ignored."""
    num_batches = state.tp_size if default_layout() is Layout.SHARD_BATCH else 1
    samples = (labels.shape[0] * num_batches, *labels.shape[1:]) if labels.dim() else ()
    _check_shapes(logits, labels, samples)
    # Logits are those of all samples of the group, labels those of this rank's samples.
    all_labels = gather_indices(labels, default_layout())
    own_labels = _own_labels(all_labels.flatten(), ignore_index, num_classes or logits.shape[-1] * state.tp_size)
    parts: Any = _LocalStatistics.apply(logits.flatten(0, -2), own_labels)  # type: ignore[no-untyped-call]
    # (all samples, 2) -> (my samples, ranks, 2)
    statistics = unshard_features(torch.stack(parts, -1), default_layout()).reshape(-1, state.tp_size, 2)
    losses = statistics[..., 0].logsumexp(-1) - statistics[..., 1].sum(-1)
    return losses.view(labels.shape).masked_fill(labels == ignore_index, 0)


def _check_shapes(logits: torch.Tensor, labels: torch.Tensor, samples: tuple[int, ...]) -> None:
    if not logits.dim() or tuple(logits.shape[:-1]) != samples:
        raise UsageError(
            f"logits of {list(logits.shape)} do not fit labels of {list(labels.shape)} on {state.tp_size}"
            f" tensor-parallel ranks: they should be {[*samples, 'classes of this rank']}"
        )


def _own_labels(labels: torch.Tensor, ignore_index: int, num_classes: int) -> torch.Tensor:
    """Return the labels counted from this rank's first class; -1 for labels of other ranks and ignored ones."""
    first, length = shard_range(num_classes, state.tp_rank, state.tp_size)
    if not collectives.is_dry_run(labels):
        _check_labels(labels, ignore_index, num_classes)
    elsewhere = (labels == ignore_index) | (labels < first) | (labels >= first + length)
    return (labels - first).masked_fill(elsewhere, -1)


def _check_labels(labels: torch.Tensor, ignore_index: int, num_classes: int) -> None:
    """Raise if a label is no class: no rank would have its logit, and the loss would be wrong silently."""
    is_wrong = ((labels < 0) | (labels >= num_classes)) & (labels != ignore_index)
    if devices.is_asynchronous(labels.device):
        # On the GPU, as in torch's own loss: the host would have to wait for the answer. The error is then that of a
        # kernel, and comes when the host waits next.
        message = f"a label is neither one of {num_classes} classes nor ignore_index ({ignore_index})"
        torch._assert_async(~is_wrong.any(), message)
        return
    wrong = labels[is_wrong]
    if len(wrong):
        raise UsageError(f"{int(wrong[0])} is a label, but neither one of {num_classes} classes nor ignore_index")


class _LocalStatistics(torch.autograd.Function):
    """Compute two numbers per sample of logits (samples, classes), in float32 at least.

    Written by hand, because autograd would keep the exponentials too, another tensor as large as the logits.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, own_labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        exact = logits.float() if logits.dtype.itemsize < 4 else logits
        sums = exact.logsumexp(-1)
        label_logits = exact.gather(1, own_labels.clamp(min=0).unsqueeze(1)).squeeze(1).masked_fill(own_labels < 0, 0)
        ctx.save_for_backward(logits, sums, own_labels)
        return sums, label_logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_of_sums: torch.Tensor, grad_of_label_logits: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, sums, own_labels = ctx.saved_tensors
        exact = logits.float() if logits.dtype.itemsize < 4 else logits
        gradient = (exact - sums.unsqueeze(1)).exp_().mul_(grad_of_sums.unsqueeze(1))
        gradient.scatter_add_(
            1, own_labels.clamp(min=0).unsqueeze(1), grad_of_label_logits.masked_fill(own_labels < 0, 0).unsqueeze(1)
        )
        return gradient.to(logits.dtype), None


def gather_logits(logits: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Return all classes of this rank's samples, from this rank's classes of all samples.

    Args:
        logits: (samples, ..., this rank's classes), of all ranks' samples.
        num_classes: of all ranks.
    """
    if has_torch_function((logits,)):
        return handle_torch_function(gather_logits, (logits,), logits, num_classes)
    if state.tp_size == 1:
        return logits
    # The last ranks may have fewer classes, but an exchange takes equal pieces.
    longest = shard_range(num_classes, 0, state.tp_size)[1]
    if logits.shape[-1] < longest:
        logits = functional.pad(logits, (0, longest - logits.shape[-1]))
    return unshard_features(logits, default_layout()).narrow(-1, 0, num_classes)


# --- logits of Hugging Face models, gathered when they are read ------------------------------------------------------


def with_lazy_logits(output: Any, gather: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a `ModelOutput` like `output`; its `logits` become `gather(logits)` when they are first read."""
    kind: Any = type(output)
    lazy = _lazy_class(kind)(**dict(OrderedDict.items(output)))
    vars(lazy)["_smp_gather"] = gather
    return lazy


@functools.cache
def _lazy_class(kind: Any) -> Any:
    return type(kind.__name__, (_LazyLogits, kind), {"__module__": kind.__module__, "_smp_kind": kind})


class _LazyLogits(OrderedDict[str, Any]):
    """Gathers the logits before any way of reading them returns."""

    _smp_kind: Any

    def _smp_gather_now(self) -> None:
        gather = vars(self).pop("_smp_gather", None)
        if gather is not None:
            self["logits"] = gather(vars(self)["logits"])

    def __getattribute__(self, name: str) -> Any:
        if name == "logits":
            self._smp_gather_now()
        return super().__getattribute__(name)

    def __getitem__(self, key: Any) -> Any:
        names = list(self.keys())
        if not isinstance(key, str):
            chosen = names[key]
            return self[chosen] if isinstance(chosen, str) else tuple(self[name] for name in chosen)
        if key == "logits":
            self._smp_gather_now()
        return dict.__getitem__(self, key)  # not Hugging Face's, which looks at every item

    def items(self) -> Any:
        self._smp_gather_now()
        return super().items()

    def values(self) -> Any:
        self._smp_gather_now()
        return super().values()

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self.keys() else default

    def __repr__(self) -> str:
        if "_smp_gather" not in vars(self):
            return super().__repr__()
        # One rank may print by itself: it must not wait for the others.
        shown = [f"{name}={vars(self)[name]!r}" for name in self.keys() if name != "logits"]
        return f"{type(self).__name__}({', '.join([*shown, 'logits=<not gathered>'])})"

    def __reduce__(self) -> Any:
        return self._smp_kind, tuple(getattr(self, name) for name in self._smp_kind.__dataclass_fields__)
