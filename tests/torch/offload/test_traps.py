"""The ways in which offloading has gone wrong elsewhere, each by its number in our list of them.

7 to 10 (reloading, freeing, cloning and using without order) are in `test_races`, streams of DDP and FSDP (10) and the
cache of autocast (16) in `test_around`, 20 (CUDA graphs) in `tests/gpu`, as is all that needs streams. What
checkpointing itself must do is in `tests/torch/recompute/test_exactness`.
"""

from __future__ import annotations

import functools
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from smpkit.errors import UsageError
from smpkit.torch.offload.emulated import EmulatedLink
from tests.torch.offload.chains import (
    BATCH,
    BOUNDARY_BYTES,
    WIDTH,
    assert_idle,
    assert_same,
    chain,
    engine_on,
    forward,
    gradients,
    inputs,
    slow,
)
from tests.torch.offload.streams import StreamLink


def test_01_views_of_weights_stay() -> None:
    """`Linear` saves `weight.t()`, which is no Parameter."""
    layer, engine = nn.Linear(WIDTH, 4 * WIDTH), engine_on()
    engine.exclude(layer.parameters())
    with engine.offload_saved_tensors("layer"):
        y = layer(inputs() * 1)
    assert engine.stats.bytes_out == BOUNDARY_BYTES  # the input; the weight has 8 times as many
    y.sum().backward()


def test_01_the_address_of_a_weight_that_is_gone_is_anyones() -> None:
    """FSDP gives parameters other storages while a model runs, and what is saved next may lie where one was."""
    weight, engine, others = nn.Parameter(torch.randn(WIDTH)), engine_on(), list[Tensor]()
    engine.exclude([weight])
    address = weight.untyped_storage()._cdata
    weight.data = torch.empty(0)
    x = torch.randn(WIDTH)
    while x.untyped_storage()._cdata != address:
        others.append(x)
        assert len(others) < 10_000
        x = torch.randn(WIDTH)
    with engine.offload_saved_tensors("layer"):
        x.requires_grad_().square()
    assert engine.stats.bytes_out == x.nbytes


def test_02_a_storage_that_is_saved_often_leaves_and_comes_back_once() -> None:
    heads, engine = [nn.Linear(WIDTH, WIDTH) for _ in range(3)], engine_on(EmulatedLink(), lead=1)
    engine.exclude(parameter for head in heads for parameter in head.parameters())
    x = inputs() * 1
    with engine.offload_inputs("layer"):
        ys = [head(x) for head in heads]
    assert engine.stats.bytes_out == BOUNDARY_BYTES
    with engine.offload_inputs("next"):
        (torch.randn(2, requires_grad=True) * 1).square()  # `layer` is not the latest any more, so it is let go
    torch.stack(ys).sum().backward()
    assert engine.stats.bytes_back == BOUNDARY_BYTES


def test_02_what_backward_has_got_stays_whole_when_another_layer_lets_go_of_it() -> None:
    """Autograd hands a tensor without gradient on as it gets it: the very object that the engine knows."""
    engine, mask = engine_on(StreamLink(), lead=1), torch.ones(BATCH, WIDTH)
    first, second = engine.offload_saved_tensors("layers.0"), engine.offload_saved_tensors("layers.1")
    handles = []
    for context in (first, second):
        handles.append(context._pack(mask))
        context.next_layer("next")
    back = second._unpack(handles[1])  # it has not left yet
    for _ in range(3):
        with engine.offload_inputs("later"):  # lets go of what `layers.0` holds
            (torch.randn(2, requires_grad=True) * 1).square()
    assert torch.equal(back, mask)
    assert torch.equal(first._unpack(handles[0]), mask)


VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x,
    lambda x: x.t(),
    lambda x: x[1:],
    lambda x: x[:, 1:],
    lambda x: x[::2],
    lambda x: x.unfold(0, 4, 1),
    lambda x: x.as_strided((5, 5), (3, 2), 4),
    lambda x: x.flatten()[7:],
    lambda x: x.view(4, 4, WIDTH).permute(2, 0, 1),
    lambda x: x[3, 3],
    lambda x: x[:0],
]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64])
def test_03_views_come_back_with_size_stride_and_offset(view: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    engine = engine_on(lead=1)
    base = torch.randn(WIDTH, WIDTH).mul(100).to(dtype)
    context = engine.offload_saved_tensors("layer")
    first, second = context._pack(view(base)), context._pack(base)
    context.next_layer("next")
    other = context._pack(torch.randn(3))
    context.next_layer("last")
    for handle, saved in ((first, view(base)), (second, base)):
        back = context._unpack(handle)
        assert (back.size(), back.dtype) == (saved.size(), saved.dtype)
        assert torch.equal(back, saved)
    del other
    engine.close()


def test_03_a_square_tensor_and_its_transpose_are_told_apart() -> None:
    engine = engine_on(lead=1)
    x = torch.randn(WIDTH, WIDTH, requires_grad=True)
    with engine.offload_inputs("layer"):
        y = (x * 1) @ (x * 1).t() @ (x * 1).t().contiguous().t()
    y.sum().backward()
    plain = x.grad
    x.grad = None
    ((x * 1) @ (x * 1).t() @ (x * 1).t().contiguous().t()).sum().backward()
    assert plain is not None
    assert torch.equal(plain, x.grad)  # type: ignore[arg-type]


def test_04_expanded_tensors_move_what_they_store() -> None:
    engine = engine_on()
    x = torch.randn(WIDTH, 1, requires_grad=True)
    with engine.offload_inputs("layer"):
        y = (x * 1).expand(WIDTH, 1000).square()
    assert engine.stats.bytes_out == 4 * WIDTH
    y.sum().backward()
    torch.testing.assert_close(x.grad, 2000 * x.detach())


@pytest.mark.parametrize("min_bytes", [0, 4096])
def test_05_a_small_view_does_not_keep_a_large_storage(min_bytes: int) -> None:
    engine = engine_on(min_bytes=min_bytes)
    x = torch.randn(512, 512, requires_grad=True)
    whole = x * 1
    dead: list[bool] = []
    watch = weakref.ref(whole.untyped_storage(), lambda _: dead.append(True))
    with engine.offload_inputs("layer"):
        y = whole[0].square()
    del whole
    gc.collect()
    assert dead
    assert engine.stats.bytes_out == (2048 if min_bytes == 0 else 0)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad[0], 2 * x.detach()[0])
    del watch


def test_05_a_small_view_that_is_saved_often_is_taken_once() -> None:
    engine = engine_on(lead=1)
    whole = torch.randn(64, WIDTH)
    context = engine.offload_saved_tensors("layer")
    handles = [context._pack(view) for view in (whole[3], whole[3], whole[4], whole[3].view(torch.int32))]
    context.next_layer("next")
    handles.append(context._pack(whole[3]))
    context.next_layer("last")
    assert engine.stats.bytes_out == 3 * whole[3].nbytes
    for handle, saved in zip(
        handles, (whole[3], whole[3], whole[4], whole[3].view(torch.int32), whole[3]), strict=True
    ):
        assert torch.equal(context._unpack(handle), saved)
    whole.mul_(2)
    handles.append(context._pack(whole[3]))  # what is there now is something else
    context.next_layer("changed")
    assert engine.stats.bytes_out == 4 * whole[3].nbytes
    assert torch.equal(context._unpack(handles[-1]), whole[3])
    del handles, handle
    assert_idle(engine)


@pytest.mark.parametrize("min_bytes", [0, 1 << 20], ids=["offloaded", "kept"])
@pytest.mark.parametrize("link", [EmulatedLink, slow])
def test_06_a_change_in_place_raises_as_without_offloading(min_bytes: int, link: Callable[[], EmulatedLink]) -> None:
    engine = engine_on(link(), min_bytes=min_bytes)
    x = inputs() * 1
    with engine.offload_inputs("layers.2"):
        y = x.square()
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(UsageError, match=r"`layers.2` saved for backward was changed in place"):
        y.sum().backward()
    del x, y
    engine.close()


def test_06_a_storage_that_is_saved_again_after_a_change_is_another_one() -> None:
    engine = engine_on()
    x = inputs()
    with engine.offload_inputs("layer"):
        z = x * 1
        z.square()  # saved, never asked for
        with torch.no_grad():
            z.mul_(3)
        y = z.square()
    y.sum().backward()
    assert torch.equal(x.grad, 6 * x.detach())  # type: ignore[arg-type]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_11_graphs_that_are_alive_together_do_not_mix(order: tuple[int, int]) -> None:
    layers, engine = chain(5), engine_on(slow())
    xs = [inputs(seed) for seed in range(2)]
    plain = [gradients(layers, x, functools.partial(forward, layers, x))[-1] for x in xs]
    ys = [x * 1 for x in (xs[0].detach().requires_grad_(), xs[1].detach().requires_grad_())]
    leaves = [y.grad_fn.next_functions[0][0].variable for y in ys]  # type: ignore[union-attr]
    for number in range(5):  # layer by layer in turn, as the microbatches of a pipeline
        for graph in range(2):
            with engine.offload_inputs(f"layers.{number}"):
                ys[graph] = checkpoint(layers[number], ys[graph], use_reentrant=False)
    for graph in order:
        ys[graph].square().sum().backward()
    assert_same([leaf.grad for leaf in leaves], plain)
    del ys
    assert_idle(engine)
    engine.close()


def test_12_a_graph_that_is_kept_is_walked_again() -> None:
    layers, x, engine = chain(5), inputs(), engine_on(slow())
    plain = gradients(layers, x, lambda: forward(layers, x))
    y = forward(layers, x, engine).square().sum()
    for _ in range(3):
        for leaf in (*layers.parameters(), x):
            leaf.grad = None
        y.backward(retain_graph=True)
        assert_same([leaf.grad for leaf in (*layers.parameters(), x)], plain)
    del y
    assert_idle(engine)
    engine.close()


def test_12_gradients_of_gradients_are_right() -> None:
    layers, x = chain(3), inputs()

    def second(run: Callable[[], Tensor]) -> Tensor:
        (first,) = torch.autograd.grad(run().square().sum(), x, create_graph=True)
        (twice,) = torch.autograd.grad(first.square().sum(), x)
        return twice

    def plainly() -> Tensor:
        y = x * 1
        for layer in layers:
            y = layer(y)
        return y

    def offloaded() -> Tensor:
        with engine.offload_saved_tensors("model"):
            return plainly()

    engine = engine_on(slow())
    engine.exclude(layers.parameters())
    assert torch.equal(second(plainly), second(offloaded))
    assert_idle(engine)
    engine.close()


def test_12_some_gradients_only() -> None:
    layers, x, engine = chain(4), inputs(), engine_on(slow())
    (plain,) = torch.autograd.grad(forward(layers, x).sum(), layers[2].get_parameter("0.weight"))
    (ours,) = torch.autograd.grad(forward(layers, x, engine).sum(), layers[2].get_parameter("0.weight"))
    assert torch.equal(ours, plain)
    assert_idle(engine)
    engine.close()


class Fails(nn.Module):
    """Raises when it is run for the `time`-th time."""

    def __init__(self, time: int) -> None:
        super().__init__()
        self.left = time

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise ZeroDivisionError
        return x * x


@pytest.mark.parametrize("time", [1, 2], ids=["forward", "recomputation in backward"])
def test_13_an_exception_leaves_no_block_and_no_thread(time: int) -> None:
    threads = threading.active_count()
    layers, engine = chain(6), engine_on(slow())
    layers.insert(3, Fails(time))

    def attempt() -> None:
        forward(layers, inputs(), engine).sum().backward()

    with pytest.raises(ZeroDivisionError):
        attempt()
    engine.abandon_step()
    assert_idle(engine)
    x = inputs()
    ours = gradients(layers, x, lambda: forward(layers, x, engine))
    assert_same(ours, gradients(layers, x, lambda: forward(layers, x)))
    assert_idle(engine)
    engine.close()
    assert threading.active_count() <= threads


def test_14_forward_without_backward_leaves_nothing() -> None:
    layers, engine = chain(6), engine_on(slow())
    for _ in range(3):
        y = forward(layers, inputs(), engine)
        with torch.no_grad():
            forward(layers, inputs(), engine)
        del y
        assert_idle(engine)
    engine.close()


def test_15_and_17_recomputation_draws_the_same_numbers_and_counts_once_more_as_torch_does() -> None:
    layers, x, engine = chain(4, dropout=0.3), inputs(), engine_on(slow())
    layers.append(nn.BatchNorm1d(WIDTH))
    plain = gradients(layers, x, lambda: forward(layers, x))
    statistics = {name: value.clone() for name, value in layers.named_buffers()}
    for name, value in layers.named_buffers():
        value.copy_(torch.ones_like(value) if "var" in name else torch.zeros_like(value))
    assert_same(gradients(layers, x, lambda: forward(layers, x, engine)), plain)
    assert_same((value for _, value in layers.named_buffers()), statistics.values())
    engine.close()


def test_16_autocast_keeps_its_types() -> None:
    layers, x, engine = chain(4), inputs(), engine_on(slow())

    def run(with_engine: bool) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return forward(layers, x, engine if with_engine else None).float()

    plain = gradients(layers, x, lambda: run(False))
    assert_same(gradients(layers, x, lambda: run(True)), plain)
    engine.close()


class Tagged(Tensor):
    """A subclass that torch functions keep."""


def test_18_subclasses_stay() -> None:
    engine = engine_on()
    x = torch.randn(BATCH, WIDTH).as_subclass(Tagged).requires_grad_()
    with engine.offload_inputs("layer"):
        y = (x * 1).square()
    assert engine.stats.bytes_out == 0
    y.sum().backward()
    assert torch.equal(x.grad.as_subclass(Tensor), 2 * x.detach().as_subclass(Tensor))  # type: ignore[union-attr]


@pytest.fixture
def alone() -> Iterator[None]:
    """Be a world of one rank."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_18_tensors_of_several_ranks_stay(alone: None) -> None:
    """A DTensor has no storage of its own: what it holds lies inside."""
    engine, base = engine_on(), inputs().detach()
    x = DTensor.from_local(base, init_device_mesh("cpu", (1,))).requires_grad_()
    with engine.offload_inputs("layer"):
        y = (x * 1).square()
    assert engine.stats.bytes_out == 0
    y.sum().to_local().backward()  # type: ignore[attr-defined]
    assert x.grad is not None
    assert torch.equal(x.grad.to_local(), 2 * base)  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch looks at it while it traces
@pytest.mark.parametrize("place", ["inside", "outside"])
def test_19_compiled_layers_and_models_train(place: str) -> None:
    layers, x, engine = chain(3), inputs(), engine_on(slow())
    plain = gradients(layers, x, lambda: forward(layers, x))
    compiled = nn.ModuleList(torch.compile(layer, backend="aot_eager") for layer in layers)  # type: ignore[misc]

    def run() -> Tensor:
        if place == "inside":
            return forward(compiled, x, engine)
        whole = torch.compile(lambda y: compiled[2](compiled[1](compiled[0](y))), backend="aot_eager")
        with engine.offload_saved_tensors("model"):
            return whole(x * 1)

    for ours, theirs in zip(gradients(layers, x, run), plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)  # other kernels, other rounding
    assert engine.stats.bytes_out > 0
    engine.close()


def test_21_frozen_parameters_missing_gradients_and_integer_inputs() -> None:
    table, layers, engine = nn.Embedding(10, WIDTH), chain(3), engine_on(slow())
    layers[1].requires_grad_(False)
    numbers = torch.arange(BATCH) % 10

    def run(with_engine: bool) -> list[Tensor | None]:
        leaves = [*layers.parameters(), *table.parameters()]
        for leaf in leaves:
            leaf.grad = None
        with engine.offload_inputs("table") if with_engine else torch.enable_grad():
            x = checkpoint(table, numbers, use_reentrant=False)
        forward(layers, x, engine if with_engine else None).square().sum().backward()
        return [leaf.grad for leaf in leaves]

    assert_same(run(True), run(False))
    engine.close()


def test_22_tied_parameters() -> None:
    layers, x, engine = chain(4), inputs(), engine_on(slow())
    layers[3].get_submodule("0").weight = layers[0].get_parameter("0.weight")
    plain = gradients(layers, x, lambda: forward(layers, x))
    assert_same(gradients(layers, x, lambda: forward(layers, x, engine)), plain)
    engine.close()


class Mixed(nn.Module):
    """Takes a tensor, a keyword tensor, something else, and one from around it."""

    def __init__(self, outside: list[Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.outside = outside

    def forward(self, x: Tensor, scale: float, *, mask: Tensor | None = None) -> Tensor:
        y = self.linear(x) * scale + self.outside[0]
        return y if mask is None else y * mask


def test_23_inputs_that_are_no_tensors_or_come_by_keyword_or_closure() -> None:
    outside = [inputs(3)]
    module, x, engine = Mixed(outside), inputs(), engine_on(slow())
    mask = torch.rand(BATCH, WIDTH)

    def run(context: Any) -> Tensor:
        with context:
            y: Tensor = checkpoint(module, x * 1, 3.0, mask=mask, use_reentrant=False)
        return y

    layers = nn.ModuleList([module])
    plain = gradients(layers, x, lambda: run(torch.enable_grad()))
    assert_same(gradients(layers, x, lambda: run(engine.offload_inputs("layer"))), plain)
    engine.close()


def test_24_the_output_of_one_layer_is_the_input_of_the_next_and_leaves_once() -> None:
    layers, engine = chain(7), engine_on()
    mask = torch.ones(BATCH, WIDTH)
    x = inputs() * 1
    for number, layer in enumerate(layers):
        with engine.offload_inputs(f"layers.{number}"):
            x = checkpoint(lambda y, m, layer=layer: layer(y) * m, x, mask, use_reentrant=False)
    assert engine.stats.bytes_out == (7 + 1) * BOUNDARY_BYTES  # and the mask, which all of them need, once
    x.sum().backward()


def test_25_spent_host_memory_leaves_the_rest_on_the_device(caplog: pytest.LogCaptureFixture) -> None:
    layers, x, engine = chain(6), inputs(), engine_on(budget_bytes=3 * BOUNDARY_BYTES)
    plain = gradients(layers, x, lambda: forward(layers, x))
    with caplog.at_level(logging.WARNING, "smpkit"):
        for _ in range(3):
            assert_same(gradients(layers, x, lambda: forward(layers, x, engine)), plain)
            gc.collect()
            step = engine.end_step()
            assert step.bytes_out == 3 * BOUNDARY_BYTES
            assert step.kept_bytes == 3 * BOUNDARY_BYTES
    message, *more = [record.getMessage() for record in caplog.records]
    assert not more
    budget = f"({3 * BOUNDARY_BYTES} bytes)"
    assert message.startswith(f"host memory for activations is used up {budget}: those of `layers.3`, and others, stay")


def test_hooks_of_others_keep_their_tensors() -> None:
    """Inside another's hooks (torch's checkpoint has its own) a boundary takes nothing from them."""
    engine, seen = engine_on(), list[Tensor]()

    def note(tensor: Tensor) -> Tensor:
        seen.append(tensor.detach())
        return seen[-1]

    with saved_tensors_hooks(note, lambda tensor: tensor), engine.offload_inputs("layer"):
        (inputs() * 1).square()
    assert seen
    assert engine.stats.bytes_out == 0


def test_25_what_finds_no_room_in_a_group_is_not_counted_as_moved() -> None:
    engine = engine_on(budget_bytes=BOUNDARY_BYTES)
    with engine.offload_saved_tensors("layer"):
        y = (inputs() * 1).square() + (inputs(1) * 1).square()
    assert engine.stats.bytes_out == engine.stats.kept_bytes == BOUNDARY_BYTES
    y.sum().backward()
