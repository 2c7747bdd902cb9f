"""What leaves and what stays, and what comes back: where offloading has gone wrong in other libraries.

Wrappers are the subject of `test_around`, real streams that of tests/device. What checkpointing itself must do is in
`tests/torch/recompute/test_exactness`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from smpkit.errors import UsageError
from smpkit.torch.core import devices
from tests.torch.offload.chains import (
    BATCH,
    BOUNDARY_BYTES,
    WIDTH,
    assert_idle,
    assert_same,
    call,
    engine_on,
    evict,
    inputs,
)

# --- what leaves, how often, and what comes back ----------------------------------------------------------------------

VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.t(),
    lambda x: x[1:, 1:],
    lambda x: x.unfold(0, 12, 1),
    lambda x: x.as_strided((10, 15), (16, 1), 4),
    lambda x: x.flatten()[7:],
    lambda x: x.view(4, 4, WIDTH).permute(2, 0, 1),
    lambda x: x.expand(3, WIDTH, WIDTH),
]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64])
def test_views_come_back_with_size_stride_offset_and_gradient(
    view: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    engine, base = engine_on(lead=1), torch.randn(WIDTH, WIDTH).mul(100).to(dtype)
    base.requires_grad_(dtype.is_floating_point)
    tensors = [view(base.detach()), base, base.detach()]
    parked = engine.park("layer", tensors)
    assert engine.stats.bytes_out == len({each.untyped_storage()._cdata for each in tensors}) * base.nbytes
    evict(engine)
    for back, tensor in zip(parked.take(), tensors, strict=True):
        assert torch.equal(back, tensor)
        assert (back.stride(), back.storage_offset()) == (tensor.stride(), tensor.storage_offset())
        assert (back.dtype, back.requires_grad, back.is_leaf) == (dtype, tensor.requires_grad, True)
        assert back.untyped_storage()._cdata != base.untyped_storage()._cdata


def test_what_several_calls_keep_leaves_and_comes_back_once() -> None:
    engine, mask = engine_on(lead=1), torch.rand(BATCH, 10)
    parked = [engine.park(f"layers.{number}", [mask, inputs(number)]) for number in range(7)]
    assert engine.stats.bytes_out == 7 * BOUNDARY_BYTES + mask.nbytes
    evict(engine)
    for number in reversed(range(7)):
        assert_same(parked.pop().take(), [mask, inputs(number)])
    assert engine.stats.bytes_back == 7 * BOUNDARY_BYTES + mask.nbytes
    assert_idle(engine)


@pytest.mark.parametrize("min_bytes", [0, 1 << 20], ids=["offloaded", "kept"])
def test_memory_that_was_changed_and_parked_again_is_another(min_bytes: int) -> None:
    engine, z = engine_on(lead=1, min_bytes=min_bytes), inputs().detach()
    first, then = engine.park("first", [z]), z.clone()
    evict(engine)
    z.mul_(3)
    second = engine.park("second", [z])
    assert engine.stats.bytes_out == (0 if min_bytes else 2 * BOUNDARY_BYTES + 3 * 4)
    assert torch.equal(second.take()[0], 3 * then)
    with pytest.raises(UsageError, match="`first` saved for backward was changed in place"):
        first.take()


def test_the_address_of_memory_that_is_gone_is_anyones() -> None:
    engine, x, others = engine_on(lead=1), torch.ones(WIDTH), list[Tensor]()
    address, first = x.untyped_storage()._cdata, engine.park("first", [x])
    del x
    evict(engine)
    while (y := torch.zeros(WIDTH)).untyped_storage()._cdata != address:
        others.append(y)
        assert len(others) < 10_000
    second = engine.park("second", [y])
    assert [float(parked.take()[0].sum()) for parked in (second, first)] == [0, WIDTH]


# --- what stays -------------------------------------------------------------------------------------------------------


class Tagged(Tensor):
    """A subclass that torch functions keep."""


def view_of_subclass() -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return Tensor._make_subclass(Tagged, torch.randn(BATCH, WIDTH)).t()


def inference() -> Tensor:
    with torch.inference_mode():
        return torch.randn(BATCH, WIDTH)


WEIGHT = nn.Parameter(torch.randn(BATCH, WIDTH))
STAYS: dict[str, Callable[[], Tensor]] = {
    "a weight": lambda: WEIGHT,
    "a view of a weight": WEIGHT.t,
    "a subclass": lambda: torch.randn(BATCH, WIDTH).as_subclass(Tagged),
    "a view of a subclass": view_of_subclass,
    "a small one": lambda: torch.randn(2),
    "a small part of a large one": lambda: torch.randn(2 * BATCH, WIDTH)[:BATCH],
    "nothing": lambda: torch.randn(0, WIDTH),
    "one of an inference": inference,
    "one on another device": lambda: torch.randn(BATCH, WIDTH, device="meta"),
    "a sparse one": lambda: torch.eye(WIDTH).to_sparse(),
    "a conjugate": lambda: torch.randn(BATCH, WIDTH, dtype=torch.complex64).conj(),
    "a negated one": lambda: torch._neg_view(torch.randn(BATCH, WIDTH)),
}


@pytest.mark.parametrize("tensor", STAYS.values(), ids=STAYS)
def test_weights_views_of_others_and_small_tensors_stay(tensor: Callable[[], Tensor]) -> None:
    engine, x = engine_on(lead=1, min_bytes=16), tensor()
    parked = engine.park("layer", [x])
    evict(engine)
    assert engine.stats.bytes_out == 0
    assert parked.take()[0] is x


def test_what_a_transform_sees_stays_and_what_a_graph_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_on(lead=1)
    torch.vmap(lambda x: engine.park("layer", [x]).take()[0])(torch.randn(BATCH, WIDTH))
    monkeypatch.setattr(devices, "is_capturing", lambda _: True)
    engine.park("layer", [inputs()])
    assert engine.stats.bytes_out == 0


def test_hooks_of_others_keep_their_tensors() -> None:
    """Inside another's hooks (a checkpoint has its own) a call takes nothing from them."""
    engine, x = engine_on(), inputs() * 1
    with saved_tensors_hooks(lambda _: "theirs", lambda _: x.detach()):
        y = call(torch.square, x, engine=engine)
    y.sum().backward()
    assert engine.stats.bytes_out == 0
