"""What people do around `activations`: data-parallel wrappers, transforms, hooks and tensors of other kinds."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from smpkit.torch.offload import activations
from tests.torch.offload.chains import BATCH, BOUNDARY_BYTES, WIDTH, assert_idle, assert_same, slow

_NOTHING = contextlib.nullcontext()

Loss = Callable[[nn.Module], Tensor]


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)])


def gradients(model: nn.Module, loss: Loss, context: AbstractContextManager[object]) -> list[Tensor | None]:
    model.zero_grad()
    torch.manual_seed(1)
    with context:
        value = loss(model)
    value.backward()
    found = [parameter.grad for parameter in model.parameters()]
    return [each.to_local() if isinstance(each, DTensor) else each for each in found]


def assert_trains_as_plain(model: nn.Module, loss: Loss) -> int:
    """Compare two steps with plain ones, in place and over a slow link; return the bytes that left in one."""
    plain = gradients(copy.deepcopy(model), loss, _NOTHING)
    for link in (None, slow()):
        offload = activations(model, lead=2, link=link)
        for _ in range(2):
            assert_same(gradients(model, loss, offload), plain)
        assert_idle(offload._engine)
        num_bytes = offload.report().steps[1].bytes_out
        offload.close()
    return num_bytes


# --- wrappers ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def alone() -> Iterator[None]:
    """Be a world of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def test_10_fsdp_may_free_the_weights_that_it_gathered(alone: None) -> None:
    """Their storage is resized to nothing when a layer's forward is over: to copy from it then would read anything."""
    plain, model, mesh = blocks(), blocks(), init_device_mesh("cpu", (1,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def loss(model: nn.Module) -> Tensor:
        result: Tensor = model(torch.randn(BATCH, WIDTH)).square().sum()
        return result

    expected = gradients(plain, loss, _NOTHING)
    for link in (None, slow()):
        offload = activations(model, lead=2, link=link)
        for _ in range(2):
            assert_same(gradients(model, loss, offload), expected)
        gc.collect()
        assert offload.report().steps[1].bytes_out <= 9 * BOUNDARY_BYTES  # and no weight
        offload.close()


@pytest.mark.parametrize(
    "options", [{"gradient_as_bucket_view": True}, {"static_graph": True}], ids=lambda each: next(iter(each))
)
def test_10_ddp_reduces_while_activations_come_back(alone: None, options: dict[str, bool]) -> None:
    plain, model = blocks(), DistributedDataParallel(blocks(), bucket_cap_mb=1, **options)  # type: ignore[arg-type]
    x = torch.randn(BATCH, WIDTH)
    expected = gradients(plain, lambda model: model(x).square().sum(), _NOTHING)
    offload = activations(model, lead=2, link=slow())
    for _ in range(3):
        assert_same(gradients(model, lambda model: model(x).square().sum(), offload), expected)
    assert_idle(offload._engine)
    offload.close()


# --- autocast ---------------------------------------------------------------------------------------------------------


class Again(nn.Module):
    """Uses one weight several times under one autocast, which casts it once and forgets the cast at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(3):
                x = self.linear(x).tanh()
            with torch.autocast("cpu", enabled=False):
                x = self.linear(x.float())
            return self.linear(x).float()


def test_16_a_weight_that_autocast_casts_stays_and_outlives_its_cache() -> None:
    model = Again()
    num_bytes = assert_trains_as_plain(model, lambda model: model(torch.randn(BATCH, WIDTH)).square().sum())
    half = BOUNDARY_BYTES // 2
    # Four inputs in bfloat16, of which three are what `tanh` keeps, and one float; the result. Not the cast weight.
    assert num_bytes == 5 * half + 2 * BOUNDARY_BYTES


@pytest.mark.parametrize("is_converted", [False, True])
def test_16_a_frozen_weight_that_autocast_casts_leaves_and_one_of_the_narrow_type_stays(is_converted: bool) -> None:
    """Autocast makes a new cast of it in each call and keeps none, so only the graph holds that on the device."""
    model = Again()
    for parameter in model.linear.parameters():
        parameter.requires_grad_(False)
    if is_converted:
        model.linear.to(torch.bfloat16)

    def loss(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = torch.randn(BATCH, WIDTH, requires_grad=True)
            for _ in range(3):
                x = model.get_submodule("linear")(x).tanh()
        return x.float().square().sum()

    num_bytes = assert_trains_as_plain(model, loss)
    cast_bytes = 0 if is_converted else 3 * 2 * WIDTH * WIDTH
    # What `tanh` keeps, the result as a float, and each call's own cast of the weight.
    assert num_bytes == 3 * BOUNDARY_BYTES // 2 + BOUNDARY_BYTES + cast_bytes


# --- transforms and modes ---------------------------------------------------------------------------------------------


def per_sample(model: nn.Module) -> Tensor:
    weights: dict[str, Tensor] = dict(model.named_parameters())

    def one(x: Tensor) -> Tensor:
        result: Tensor = torch.func.functional_call(model, weights, (x,)).square().sum()
        return result

    return torch.func.vmap(one)(torch.randn(BATCH, WIDTH)).sum()


def directional(model: nn.Module) -> Tensor:
    x = torch.randn(BATCH, WIDTH)
    value, slope, *_ = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    result: Tensor = value.sum() + slope.square().sum()
    return result


def dual(model: nn.Module) -> Tensor:
    x = torch.randn(BATCH, WIDTH)
    with forward_ad.dual_level():
        value, slope = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x))))
        assert slope is not None
        return value.sum() + slope.square().sum()


def penalised(model: nn.Module) -> Tensor:
    x = torch.randn(BATCH, WIDTH, requires_grad=True)
    y = model(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.mean() + (slope.norm(dim=1) - 1).square().mean()


@pytest.mark.filterwarnings("ignore:.torch.jit")  # the first `jvp` of a process scripts some functions of torch
@pytest.mark.parametrize("loss", [per_sample, directional, dual, penalised])
def test_derivatives_of_other_kinds(loss: Loss) -> None:
    assert_trains_as_plain(blocks(), loss)


def test_where_hooks_are_forbidden_entering_fails_and_later_it_does_not() -> None:
    model = blocks()
    offload = activations(model)
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"),
        pytest.raises(RuntimeError, match="no hooks here"),
    ):
        offload.__enter__()
    assert not any(module._forward_pre_hooks for module in model.modules())
    with offload:
        loss = model(torch.randn(BATCH, WIDTH)).sum()
    loss.backward()
    assert offload.report().bytes_out > 0


# --- tensors of other kinds -------------------------------------------------------------------------------------------


def ragged(model: nn.Module) -> Tensor:
    rows = [torch.randn(2, WIDTH), torch.randn(3, WIDTH)]
    result: Tensor = model(torch.nested.nested_tensor(rows)).to_padded_tensor(0.0).sum()
    return result


def jagged(model: nn.Module) -> Tensor:
    rows = [torch.randn(2, WIDTH), torch.randn(3, WIDTH)]
    result: Tensor = model(torch.nested.nested_tensor(rows, layout=torch.jagged)).values().square().sum()
    return result


def shapes_only(model: nn.Module) -> Tensor:
    (torch.ones(3, device="meta", requires_grad=True) * 1).square().sum().backward()
    result: Tensor = model(torch.randn(BATCH, WIDTH)).sum()
    return result


def sparse(model: nn.Module) -> Tensor:
    eye = torch.eye(WIDTH)
    x = torch.sparse.mm(eye.to_sparse(), torch.sparse.mm(eye.to_sparse_csr(), torch.randn(WIDTH, WIDTH)))
    result: Tensor = torch.sparse.mm(eye.to_sparse(), model(x)).square().sum()
    return result


def conjugate(model: nn.Module) -> Tensor:
    z = torch.fft.fft(model(torch.randn(BATCH, WIDTH)))
    return (z.conj() * z.conj() * z).abs().sum() + (z.conj().imag * z.real).sum()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse .* is in beta")
@pytest.mark.parametrize("loss", [ragged, jagged, shapes_only, sparse, conjugate])
def test_tensors_of_other_kinds(loss: Loss) -> None:
    assert_trains_as_plain(blocks(), loss)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, WIDTH, sparse=True)
        self.recurrent = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.1)

    def forward(self, numbers: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.table(numbers), [5, 3], batch_first=True)
        result: Tensor = self.recurrent(packed)[0].data
        return result


def test_sparse_gradients_and_packed_sequences() -> None:
    def dense(model: nn.Module) -> Tensor:
        result: Tensor = model(torch.arange(10).view(2, 5)).square().sum()
        return result

    model = Table()
    plain = [grad for grad in gradients(copy.deepcopy(model), dense, _NOTHING) if grad is not None]
    offload = activations(model, link=slow())
    for _ in range(2):
        ours = [grad for grad in gradients(model, dense, offload) if grad is not None]
        assert_same([grad.to_dense() for grad in ours], [grad.to_dense() for grad in plain])
    offload.close()


def test_layers_that_change_in_place_and_images_with_channels_last() -> None:
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3), nn.Dropout(0.2, inplace=True)
    ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last)
        return nn.functional.silu(model(x)).square().sum()

    assert_trains_as_plain(model, loss)


class Twice(torch.autograd.Function):
    """Keeps inputs, output and nothing at all, and asks for them twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        y = (x * scale).exp()
        ctx.save_for_backward(x, scale, y, None)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, scale, _, nothing = ctx.saved_tensors
        y = ctx.saved_tensors[2]
        assert nothing is None
        return grads[0] * y * scale, grads[0] * y * x


def test_functions_of_the_users_own() -> None:
    assert_trains_as_plain(
        blocks(), lambda m: Twice.apply(m(torch.randn(BATCH, WIDTH)), torch.rand(1, WIDTH).expand(BATCH, WIDTH)).sum()
    )


def test_an_interruption_in_backward_leaves_nothing() -> None:
    class Interrupted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise KeyboardInterrupt

    model, x = blocks(), torch.randn(BATCH, WIDTH)
    offload = activations(model, lead=1, link=slow())
    for _ in range(2):
        with offload:
            loss = model[2:](Interrupted.apply(model[:2](x))).square().sum()
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
        del loss
        assert_idle(offload._engine)
    offload.close()
