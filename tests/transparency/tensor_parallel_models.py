"""Gradients of tensor-parallel ranks, joined."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from smpkit.torch.tensor_parallel.state_dict import join_state


def whole_gradients(model: Any) -> dict[str, Tensor | None]:
    """Return the gradients of what this rank holds, joined over its tensor-parallel group."""
    named = {name: None if p.grad is None else p.grad.clone() for name, p in model.local_named_parameters()}
    trained = {name: gradient for name, gradient in named.items() if gradient is not None}
    return {**named, **join_state(model.get_module(), trained)}
