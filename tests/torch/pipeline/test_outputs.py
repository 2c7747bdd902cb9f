"""What an operation returns is inferred as the operation would return it: shapes, strides, dtypes, aliases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from smpkit.torch.core.tensor_spec import TensorSpec, map_tensors, spec_of
from smpkit.torch.pipeline.outputs import MISSING, infer_output, with_strides_of
from smpkit.torch.pipeline.stage_tensor import StageTensor, make_stage_tensor

CPU = torch.device("cpu")
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(4, 5, 6, generator=GENERATOR).requires_grad_()
FLAT = torch.randn(7, 6, generator=GENERATOR).requires_grad_()
MASK = torch.rand(4, 5, generator=GENERATOR) < 0.5
TARGETS = torch.randint(6, (7,), generator=GENERATOR)
METHODS: Any = Tensor


def known(tensor: Tensor) -> TensorSpec | None:
    return tensor.spec if isinstance(tensor, StageTensor) else None


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (METHODS.__getitem__, (X, MASK), {}),
        (METHODS.__getitem__, (X, (slice(1, 3), MASK[0])), {}),
        (METHODS.__getitem__, (X.detach(), (0, ..., None)), {}),
        (METHODS.masked_select, (X, MASK[..., None]), {}),
        (METHODS.repeat_interleave, (FLAT, torch.arange(7)), {"dim": 0}),
        (METHODS.transpose, (X, 1, 2), {}),
        (METHODS.contiguous, (X,), {}),
        (METHODS.contiguous, (X.mT,), {}),
        (METHODS.reshape, (X.mT, -1, 5), {}),
        (METHODS.chunk, (X, 2), {}),
        (METHODS.max, (X, 1), {}),
        (METHODS.to, (X, torch.float64), {}),
        (METHODS.to, (X,), {"device": "cpu"}),
        (METHODS.argmax, (X, -1), {}),
        (METHODS.mul, (X.mT, 2.5), {}),
        (METHODS.add, (FLAT, torch.ones(6)), {"alpha": 3}),
        (METHODS.masked_fill, (X, MASK[..., None], 0.0), {}),
        (torch.cat, ([FLAT, FLAT],), {"dim": 1}),
        (functional.cross_entropy, (FLAT, TARGETS), {}),
        (functional.cross_entropy, (FLAT, TARGETS), {"reduction": "none", "label_smoothing": 0.1}),
        (functional.dropout, (FLAT, 0.5), {}),
        (functional.gelu, (FLAT,), {}),
        (functional.linear, (FLAT, torch.ones(3, 6)), {}),
        (functional.scaled_dot_product_attention, (X, X, X), {"is_causal": True}),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
@pytest.mark.parametrize("autocast", [False, True])
def test_an_inferred_output_is_the_real_one(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], autocast: bool
) -> None:
    def hidden(tensor: Tensor) -> Tensor:
        return make_stage_tensor(spec_of(tensor), CPU, 1) if tensor.is_floating_point() else tensor

    saved: list[Tensor] = []
    kept = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch._C.DisableTorchFunction():
        given = map_tensors(hidden, (args, kwargs))
        with saved_tensors_hooks(saved.append, lambda packed: packed):
            found = infer_output(function, given[0], given[1], known, CPU)
        assert torch.equal(torch.get_rng_state(), kept)
        output = function(*args, **kwargs)
    assert saved == []
    assert found == map_tensors(spec_of, output)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (METHODS.nonzero, (X,)),
        (METHODS.__getitem__, (X, make_stage_tensor(spec_of(MASK), CPU, 1))),
        (METHODS.add_, (X.detach(), 1)),
        (METHODS.view, (X, -1, 7)),
        (functional.batch_norm, (FLAT, torch.zeros(6), torch.ones(6), None, None, True)),
        (functional.instance_norm, (X, torch.zeros(5), torch.ones(5))),
    ],
    ids=["values", "mask of one rank", "in place", "wrong", "batch norm", "instance norm"],
)
def test_what_specs_do_not_tell_is_not_inferred(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    first = make_stage_tensor(spec_of(args[0]), CPU, 1)
    with torch._C.DisableTorchFunction():
        assert infer_output(function, (first, *args[1:]), {}, known, CPU) is MISSING


def test_a_result_gets_the_strides_that_were_inferred_and_keeps_its_graph() -> None:
    spec = spec_of(torch.empty(4, 6, 5).mT)
    result = with_strides_of(spec, X)
    assert result.stride() == spec.stride != X.stride()
    assert torch.equal(result, X)
    (gradient,) = torch.autograd.grad(result.sum(), X)
    assert torch.equal(gradient, torch.ones_like(X))
    assert with_strides_of(spec_of(X), X) is X
    assert with_strides_of(spec_of(X), (X, X)) == (X, X)  # more than was inferred: the caller says so
