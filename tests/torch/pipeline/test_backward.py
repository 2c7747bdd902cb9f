"""A backward starts without torch's own checks only where they would find nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from smpkit.torch.pipeline.backward import BackwardWork


def started(root: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Run the backward of a segment that starts at `root` and receives nothing."""
    work = BackwardWork(None, 0)  # type: ignore[arg-type]
    work.starts(root, gradient, 0)
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
    work.starts(used, torch.ones(2), 1)
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
