"""Count an operation alike on every device, whichever kernels a device has for it.

Attention, dropout and batch norm are one operation to a model. torch takes another kernel for them on each kind of
device, and asks the GPU which: one that keeps the scores of all pairs of positions, or none of them; a mask of floats,
or of bytes. So a pass on tensors without data would give a laptop another partition than the job gets. Here they cost
what the fused kernels of GPUs cost.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.library import Library

_KEYS: Final = ("AutogradCPU", "AutogradCUDA", "AutogradXPU", "AutogradMeta", "AutogradPrivateUse1")
"""Dispatch keys below autocast, which has then chosen the dtypes, and above the choice of a kernel."""


class FusedKernels:
    """Replaces the kernels of these operations for fake tensors; other tensors, of other threads, get torch's own."""

    def __init__(self) -> None:
        self.flops = 0
        """What attention has computed; torch's counter does not see it."""

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Replace torch's own kernels in this block, in the whole process."""
        library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        try:
            for name, function in (("scaled_dot_product_attention", self._attention), *_FUNCTIONS.items()):
                for key in _KEYS:
                    kernel = _for_fakes(getattr(torch.ops.aten, name).default, function)
                    library.impl(name, kernel, key)  # type: ignore[no-untyped-call]
            yield
        finally:
            # Private, because torch has no public way to take a kernel back; its own tests do it so.
            library._destroy()  # type: ignore[no-untyped-call]

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,  # noqa: ARG002 - torch's arguments; a fused kernel keeps no mask for it
        is_causal: bool = False,  # noqa: ARG002 - counted whole, as torch's counter does
        *,
        scale: float | None = None,  # noqa: ARG002
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        batch = query.shape[:-2]
        if not enable_gqa:
            batch = torch.broadcast_shapes(batch, key.shape[:-2], value.shape[:-2])  # type: ignore[no-untyped-call]
        self.flops += 2 * math.prod(batch) * query.shape[-2] * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        return _Attention.apply(query, key, value, attn_mask, batch)  # type: ignore[no-untyped-call, no-any-return]


def _dropout(value: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    return torch.ops.aten.native_dropout(value, p, train)[0] if train and p else value


def _batch_norm(*args: Any) -> torch.Tensor:
    *needed, _cudnn_enabled = args
    return torch.ops.aten.native_batch_norm(*needed)[0]  # type: ignore[no-any-return]


_FUNCTIONS: Final[dict[str, Callable[..., torch.Tensor]]] = {"dropout": _dropout, "batch_norm": _batch_norm}


def _for_fakes(operation: Any, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def called(*args: Any, **kwargs: Any) -> torch.Tensor:
        has_data = not any(isinstance(argument, FakeTensor) for argument in args)
        return (operation.decompose if has_data else function)(*args, **kwargs)

    return called


class _Attention(torch.autograd.Function):
    """Makes and keeps what a fused kernel does: its arguments, its result, and one number for each row of scores."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        batch: torch.Size,
    ) -> torch.Tensor:
        length, width = query.shape[-2], value.shape[-1]
        if len(batch) < 2:
            output = query.new_empty((*batch, length, width))
        else:  # strides of [.., length, heads, width], as fused kernels return it: the next reshape makes no copy
            output = query.new_empty((*batch[:-1], length, batch[-1], width)).transpose(-2, -3)
        sums = query.new_empty((*batch, length), dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, output, sums)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensors = ctx.saved_tensors[:4]
        needed = ctx.needs_input_grad[:4]
        return (*(torch.empty_like(t) if need else None for t, need in zip(tensors, needed, strict=True)), None)
