"""A backward starts without torch's own checks only where they would find nothing, and from what nobody has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from smpkit.torch.core.microbatches import root_gradient
from smpkit.torch.core.tensor_spec import spec_of
from smpkit.torch.pipeline.backward import BackwardWork
from smpkit.torch.pipeline.message_order import P2PTransfer


def started(root: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Run the backward of a segment that starts at `root` and receives nothing."""
    work = BackwardWork(None, 0)  # type: ignore[arg-type]
    work.add_root(root, gradient, 0)
    work.run(0, split=False)


def test_a_gradient_of_another_shape_is_refused() -> None:
    # The engine itself would add up what it can expand.
    root = torch.ones(3, requires_grad=True) * 2
    with pytest.raises(RuntimeError, match="Mismatch in shape"):
        started(root, torch.ones(2, 3))


def test_a_complex_gradient_of_a_real_root_is_refused() -> None:
    root = torch.ones(3, requires_grad=True) * 2
    with pytest.raises(RuntimeError, match="same dtype"):
        started(root, torch.ones(3, dtype=torch.complex64))


def test_a_root_without_a_gradient_must_be_a_scalar() -> None:
    leaf = torch.ones(3, requires_grad=True)
    started((leaf * 2).sum(), None)
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError, match="scalar outputs"):
        started(leaf * 2, None)


def test_a_subclass_is_asked_how_its_backward_goes() -> None:
    asked = []

    class Asking(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(getattr(func, "__name__", ""))
            return super().__torch_function__(func, types, args, kwargs or {})

    leaf = torch.ones(3, requires_grad=True)
    root = (leaf * 2).as_subclass(Asking)
    started(root, torch.ones(3))
    assert "backward" in asked
    assert leaf.grad is not None


def test_each_segment_runs_what_it_has_left_and_no_more() -> None:
    work = BackwardWork(None, 0)  # type: ignore[arg-type]
    first, second = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    made = first * 3
    used = work.cut(made, 0, 1) * second
    work.add_root(used, torch.ones(2), 1)
    work.run(1, split=False)
    before = first.grad
    work.run(0, split=False)
    work.run(2, split=False)  # has nothing
    assert before is None
    assert work.done == {0, 1, 2}
    assert first.grad is not None
    assert first.grad.tolist() == [3, 3]
    assert second.grad is not None
    assert second.grad.tolist() == [3, 3]


def test_what_arrives_keeps_its_steps_in_memory() -> None:
    # T5's biases, of one element in the first dimension, came back from a layer with another step there: refused.
    value = torch.randn(50).as_strided((1, 2, 5, 5), (2, 1, 10, 2)).detach()
    work, transfer = BackwardWork(None, 0), P2PTransfer(0, 0, 1, 0, 0, spec_of(value))  # type: ignore[arg-type]
    assert work.add_receive(value, transfer, 0).stride() == (2, 1, 10, 2)


def test_what_arrives_can_be_changed_in_place_and_who_has_kept_it_finds_out() -> None:
    work, transfer = BackwardWork(None, 0), P2PTransfer(0, 0, 1, 0, 0, spec_of(torch.ones(3)))  # type: ignore[arg-type]
    leaf = torch.ones(3)
    value = work.add_receive(leaf, transfer, 0)
    kept = value.square()
    value.mul_(3).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [3, 3, 3]
    assert value.data_ptr() == leaf.data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()


class GivesNoGradient(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(_ctx: Any, _gradient: torch.Tensor) -> None:
        return None


def test_a_cut_makes_no_gradient_where_there_is_none() -> None:
    work, weight, other = BackwardWork(None, 0), torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)  # type: ignore[arg-type]
    work.add_root(GivesNoGradient.apply(work.cut(weight * 3, 0, 1)) * other, torch.ones(2), 1)
    work.run(1, split=False)
    work.run(0, split=False)
    assert other.grad is not None
    assert weight.grad is None


def test_backward_starts_with_one_times_the_scale() -> None:
    leaf = torch.ones((), requires_grad=True)
    assert root_gradient(leaf * 2, None, 0.25) == 0.25
    assert root_gradient(leaf * 2, torch.tensor(3.0), 0.5) == 1.5
    assert root_gradient((leaf * 3).double(), None, 0.5).dtype is torch.float64  # type: ignore[union-attr]
    assert root_gradient(leaf.reshape(1), None, 0.5).shape == (1,)  # type: ignore[union-attr]
    assert root_gradient(torch.ones(2), None, 1.0) is None
