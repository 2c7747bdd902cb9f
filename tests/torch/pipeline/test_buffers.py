"""Memory of received messages is used again, and never while a tensor still lies in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from smpkit.torch.core.tensor_spec import TensorSpec
from smpkit.torch.pipeline.host_link import HostBuffers

SIDE = 512


def spec(dtype: torch.dtype = torch.float32, rows: int = SIDE) -> TensorSpec:
    return TensorSpec((rows, SIDE), (SIDE, 1), dtype, False)


def test_memory_is_used_again_when_the_tensor_is_gone() -> None:
    buffers = HostBuffers()
    first = buffers.take(spec())
    address = first.data_ptr()
    del first
    assert buffers.take(spec()).data_ptr() == address


def keep_in_graph(value: torch.Tensor) -> torch.Tensor:
    return value * torch.ones(1, requires_grad=True)


KEEPERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a view": lambda value: value[3:, 1],
    "a graph": keep_in_graph,
    "numpy": lambda value: value.numpy(),
    "another tensor": lambda value: value.requires_grad_().detach(),
}


@pytest.mark.parametrize("keeper", KEEPERS)
def test_memory_is_not_used_again_while_anything_lies_in_it(keeper: str) -> None:
    buffers = HostBuffers()
    first = buffers.take(spec()).fill_(2.0)
    address = first.data_ptr()
    kept = KEEPERS[keeper](first)
    del first
    second = buffers.take(spec())
    assert second.data_ptr() != address
    second.fill_(7.0)
    if keeper == "a graph":
        (gradient,) = torch.autograd.grad(kept.sum(), kept.grad_fn.next_functions[1][0].variable)
        assert gradient.item() == 2.0 * SIDE * SIDE
    else:
        assert float(kept.min()) == float(kept.max()) == 2.0
    del kept
    assert buffers.take(spec()).data_ptr() == address


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.complex64, torch.int64])
def test_tensors_have_the_shape_and_dtype_that_was_asked_for(dtype: torch.dtype) -> None:
    made = HostBuffers().take(spec(dtype))
    assert (made.shape, made.dtype, made.is_contiguous()) == (torch.Size((SIDE, SIDE)), dtype, True)
    assert made.data_ptr() % 16 == 0
    assert made.requires_grad is False


def test_a_size_that_a_step_did_not_need_is_given_up_but_not_under_a_tensor() -> None:
    buffers = HostBuffers()
    kept = buffers.take(spec()).fill_(3.0)
    del kept
    small = buffers.take(spec(rows=SIDE // 2)).fill_(5.0)
    buffers.trim()
    buffers.trim()
    assert buffers._free == {}
    buffers.take(spec(rows=SIDE // 2)).fill_(1.0)
    assert float(small.min()) == 5.0
