"""Activations that leave a simulated device and come back."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from smpkit.errors import UsageError
from smpkit.torch.offload import accelerator, activations
from smpkit.torch.offload.engine import DEBUG
from tests.device.scenarios.common import DEVICE, WIDTH, add, assert_same


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.grow, self.shrink = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        size, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(size, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        y = (
            functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(size, length, width)
        )
        x = x + self.out(y)
        return x + functional.dropout(self.shrink(functional.gelu(self.grow(x))), self.dropout)


class Decoder(nn.Module):
    """A few of them, each checkpointed or not."""

    def __init__(self, *, dropout: float = 0.0, is_checkpointed: bool = True, use_reentrant: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(4))
        self.is_checkpointed, self.use_reentrant = is_checkpointed, use_reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant) if self.is_checkpointed else layer(x)
        return x @ self.embedding.weight.T


def make(**options: Any) -> tuple[Decoder, Tensor]:
    """Return a model and its input, on the device."""
    with torch.device("cpu"):
        torch.manual_seed(0)
        model, tokens = Decoder(**options), torch.arange(16).view(2, 8) % 32
    return model.to(DEVICE), tokens.to(DEVICE)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the loss of a model that gives logits."""
    return functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


def gradients_of(model: nn.Module) -> list[Tensor]:
    """Return the gradients, on the host."""
    return [each.grad.cpu() for each in model.parameters() if each.grad is not None]


def train_step(
    model: nn.Module, tokens: Tensor, context: contextlib.AbstractContextManager[object] | None = None
) -> list[Tensor]:
    """Run forward in a context and backward after it; return the loss and the gradients."""
    torch.manual_seed(5)
    model.zero_grad(set_to_none=True)
    with context or contextlib.nullcontext():
        loss = loss_of(model, tokens)
    loss.backward()
    return [loss.detach().cpu(), *gradients_of(model)]


def compare(
    run: Callable[[contextlib.AbstractContextManager[object]], list[Tensor]], model: nn.Module, **options: Any
) -> None:
    """Run something without offloading once, and with it three times."""
    expected = run(contextlib.nullcontext())
    offload = activations(model, **{"min_bytes": 0, "lead": 1} | options)
    for number in range(3):
        assert_same(run(offload), expected, f"in step {number}")
    assert offload.report().bytes_out > 0
    offload.close()


def offloaded(
    model_options: Mapping[str, Any] | None = None,
    *,
    is_autocast: bool = False,
    is_checked: bool = False,
    **options: Any,
) -> None:
    """Compare steps with and without offloading."""
    model, tokens = make(**(model_options or {}))
    cast = partial(torch.autocast, "sim", torch.bfloat16) if is_autocast else contextlib.nullcontext

    def run(context: contextlib.AbstractContextManager[object]) -> list[Tensor]:
        with cast():
            return train_step(model, tokens, context)

    with mock.patch.dict(os.environ, {DEBUG: "1"} if is_checked else {}):
        compare(run, model, **options)


_UNCHECKPOINTED = {"is_checkpointed": False}
add("activations", offloaded)
add("activations, nothing checkpointed", partial(offloaded, _UNCHECKPOINTED))
add("activations, dropout", partial(offloaded, {"dropout": 0.3}), is_quick=True)
add("activations, dropout, nothing checkpointed", partial(offloaded, {"dropout": 0.3} | _UNCHECKPOINTED))
add("activations, reentrant", partial(offloaded, {"use_reentrant": True}))
for _lead in (2, 3, "auto"):
    add(f"activations, lead {_lead}", partial(offloaded, lead=_lead))
    add(f"activations, lead {_lead}, nothing checkpointed", partial(offloaded, _UNCHECKPOINTED, lead=_lead))
add("activations, autocast", partial(offloaded, is_autocast=True))
_run = partial(offloaded, _UNCHECKPOINTED, is_autocast=True)
add("activations, autocast, nothing checkpointed", _run, is_quick=True)
add("activations, large ones only", partial(offloaded, _UNCHECKPOINTED, min_bytes=1500))
add("activations, checked by the engine", partial(offloaded, _UNCHECKPOINTED, is_checked=True))


def host_memory_exhausted(num_bytes: int) -> None:
    """Let host memory suffice for some of the layers only."""
    offloaded(_UNCHECKPOINTED, host_budget_bytes=num_bytes)


for _kib in (8, 40):
    add(f"activations, {_kib} KiB of host memory", partial(host_memory_exhausted, _kib << 10), is_quick=_kib == 8)


def two_graphs(*, later_first: bool, is_checkpointed: bool) -> None:
    """Run backward of two graphs that live at the same time."""
    model, tokens = make(is_checkpointed=is_checkpointed)

    def run(context: contextlib.AbstractContextManager[object]) -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        losses = []
        for number in range(2):
            with context:
                losses.append(loss_of(model, (tokens + number) % 32))
        for loss in reversed(losses) if later_first else losses:
            loss.backward()
        return gradients_of(model)

    compare(run, model)


for _is_first in (True, False):
    for _is_checkpointed in (True, False):
        _name = f"activations, two graphs, {'later' if _is_first else 'earlier'} first" + (
            "" if _is_checkpointed else ", nothing checkpointed"
        )
        _run = partial(two_graphs, later_first=_is_first, is_checkpointed=_is_checkpointed)
        add(_name, _run)


def graph_kept() -> None:
    """Run one backward twice, and drop a graph that no backward has used."""
    model, tokens = make(is_checkpointed=False)

    def run(context: contextlib.AbstractContextManager[object]) -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        with context:
            loss, unused = loss_of(model, tokens), loss_of(model, tokens)
        del unused
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients_of(model)

    compare(run, model, lead=2)


add("activations, graph kept", graph_kept)


class OnStreams(nn.Module):
    """Runs each second layer on a stream of its own, as libraries do that overlap branches."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers
        self.streams = [torch.Stream(DEVICE) for _ in range(2)]

    def forward(self, x: Tensor) -> Tensor:
        main = torch.accelerator.current_stream(DEVICE)
        for number, layer in enumerate(self.layers):
            if number % 2:
                side = self.streams[number // 2 % 2]
                side.wait_stream(main)
                x.record_stream(side)
                with side:
                    x = layer(x)
                main.wait_stream(side)
                x.record_stream(main)
            else:
                x = layer(x)
        return x


def on_streams(*, whole: bool, lead: int = 1) -> None:
    """Offload layers that run on several streams."""
    inner, _ = make(is_checkpointed=False)
    model = OnStreams(inner.layers)
    x = torch.randn(2, 8, WIDTH, device=DEVICE)
    torch.accelerator.synchronize()
    step_stream = torch.Stream(DEVICE)
    steps = count()

    def step(context: contextlib.AbstractContextManager[object]) -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        given = x.clone().requires_grad_()
        with context:
            loss = model(given).square().sum()
        loss.backward()
        assert given.grad is not None
        return [given.grad.cpu(), *gradients_of(model)]

    def run(context: contextlib.AbstractContextManager[object]) -> list[Tensor]:
        if not whole:
            return step(context)
        # Of the user's, forward and backward: the same model on another stream than in the step before.
        step_stream.wait_stream(torch.accelerator.current_stream())
        with step_stream if next(steps) % 2 else contextlib.nullcontext():
            found = step(context)
        torch.accelerator.current_stream().wait_stream(step_stream)
        return found

    compare(run, model, lead=lead)


add("activations, side streams", partial(on_streams, whole=False))
add("activations, side streams, lead 2", partial(on_streams, whole=False, lead=2))
add("activations, a step on a side stream", partial(on_streams, whole=True))


class Shared(torch.autograd.Function):
    """Saves a tensor that another stream's operators need as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x


def needed_on_two_streams() -> None:
    """Save one storage on two streams, and run backward first on the one that has not seen it leave."""
    side = torch.Stream(DEVICE)
    model = nn.Linear(WIDTH, WIDTH).to(DEVICE)
    main = torch.accelerator.current_stream(DEVICE)
    x = torch.randn(8, WIDTH, device=DEVICE)
    torch.accelerator.synchronize()

    def run(context: contextlib.AbstractContextManager[object]) -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        with context:
            z = model(x) * 2
            first = Shared.apply(z).sum()
        side.wait_stream(main)
        z.record_stream(side)
        with side:
            second = z
            for _ in range(4):
                with context:
                    second = Shared.apply(second)
            loss = second.sum()
        del z, second
        with side:
            (of_second,) = torch.autograd.grad(loss, [model.bias], retain_graph=True)
        main.wait_stream(side)
        of_second.record_stream(main)
        first.backward()
        with side:  # which may use memory again as soon as it is free
            torch.zeros(8, WIDTH, device=DEVICE).add_(1)
        return [of_second.cpu(), *gradients_of(model)]

    compare(run, model)


add("activations, needed on two streams", needed_on_two_streams, is_quick=True)


def needed_where_nothing_has_left() -> None:
    """Load a storage on a stream that has not waited for any copy to the host."""
    side = torch.Stream(DEVICE)
    main = torch.accelerator.current_stream(DEVICE)
    x = torch.randn(8, WIDTH, device=DEVICE)
    torch.accelerator.synchronize()

    def run(context: contextlib.AbstractContextManager[object]) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        z = leaf * 2
        with context:
            first = Shared.apply(z).sum()
        side.wait_stream(main)
        z.record_stream(side)
        with side, context:
            second = Shared.apply(z).sum()
        del z
        later = leaf
        for _ in range(4):  # so that the memory of `z` is given back, after a wait of this stream alone
            with context:
                later = Shared.apply(later * 2)
        with side:
            (of_second,) = torch.autograd.grad(second, [leaf], retain_graph=True)
        main.wait_stream(side)
        of_second.record_stream(main)
        (of_others,) = torch.autograd.grad(first + later.sum(), [leaf])
        return [of_second.cpu(), of_others.cpu()]

    compare(run, nn.Linear(1, 1).to(DEVICE))


add("activations, needed where nothing has left", needed_where_nothing_has_left)


def host_memory_of_another_stream(*, sizes: tuple[int, int] = (8, 8), budget: int | None = None) -> None:
    """Run steps on streams that do not wait for each other, and whose activations use the same host memory in turns."""
    streams = [torch.Stream(DEVICE) for _ in range(2)]
    model = nn.Linear(WIDTH, WIDTH).to(DEVICE)
    given = []
    for stream, size in zip(streams, sizes, strict=True):
        with stream:
            given.append(torch.randn(size, WIDTH, device=DEVICE))
    torch.accelerator.synchronize()

    def run(x: Tensor, context: contextlib.AbstractContextManager[object]) -> Tensor:
        leaf = x.clone().requires_grad_()
        y = leaf
        for _ in range(4):
            with context:
                y = Shared.apply(y * 2)
        return torch.autograd.grad(y.sum(), leaf)[0]

    expected = []
    for stream, x in zip(streams, given, strict=True):
        with stream:
            expected.append(run(x, contextlib.nullcontext()))
    offload = activations(model, min_bytes=0, lead=1, host_budget_bytes=budget)
    found = []
    for number in range(6):
        with streams[number % 2]:
            found.append(run(given[number % 2], offload))
    torch.accelerator.synchronize()
    assert_same(found, expected * 3)
    offload.close()


add("activations, host memory of another stream", host_memory_of_another_stream, is_quick=True)
_other_sizes = partial(host_memory_of_another_stream, sizes=(8, 24), budget=4096)  # so blocks are joined and cut
add("activations, host memory of another stream, other sizes", _other_sizes, is_quick=True)


def block_of_two() -> None:
    """Use two storages that left together at different times, on streams that do not wait for each other."""
    streams = [torch.Stream(DEVICE) for _ in range(2)]
    given = []
    for stream in streams:
        with stream:
            given.append(torch.randn(8, WIDTH, device=DEVICE))
    torch.accelerator.synchronize()

    def run(x: Tensor, context: contextlib.AbstractContextManager[object]) -> Tensor:
        leaf = x.clone().requires_grad_()
        with context:  # in one block, and the second is needed by the next layer as well
            y = Shared.apply(leaf * 2)
            again = y * 2
            z = Shared.apply(again)
        with context:
            z = Shared.apply(again) + z
        del again
        for _ in range(3):
            with context:
                z = Shared.apply(z * 2)
        return torch.autograd.grad(z.sum(), leaf)[0]

    expected = []
    for stream, x in zip(streams, given, strict=True):
        with stream:
            expected.append(run(x, contextlib.nullcontext()))
    offload = activations(nn.Linear(1, 1).to(DEVICE), min_bytes=0, lead=1)
    found = []
    for number in range(6):
        with streams[number % 2]:
            found.append(run(given[number % 2], offload))
    torch.accelerator.synchronize()
    assert_same(found, expected * 3)
    offload.close()


add("activations, a block of two", block_of_two)


def saved_elsewhere() -> None:
    """Save a tensor on another stream, and give its memory back from this one, for which that stream does not wait."""
    side = torch.Stream(DEVICE)
    main = torch.accelerator.current_stream(DEVICE)
    x = torch.randn(8, WIDTH, device=DEVICE)
    torch.accelerator.synchronize()

    def run(context: contextlib.AbstractContextManager[object]) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        side.wait_stream(main)
        with side, context:
            first = Shared.apply(leaf * 2).sum()
        later = leaf
        for _ in range(4):
            with context:
                later = Shared.apply(later * 2)
        with side:
            torch.zeros(8, WIDTH, device=DEVICE).add_(1)
        main.wait_stream(side)
        first.record_stream(main)
        return [each.cpu() for each in torch.autograd.grad(first + later.sum(), [leaf])]

    compare(run, nn.Linear(1, 1).to(DEVICE))


add("activations, saved on another stream", saved_elsewhere)


def allocated_elsewhere() -> None:
    """Save a tensor whose memory belongs to another stream, and let that stream go on."""
    side = torch.Stream(DEVICE)
    model = nn.Linear(WIDTH, WIDTH).to(DEVICE)
    main = torch.accelerator.current_stream(DEVICE)

    def run(context: contextlib.AbstractContextManager[object]) -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        side.wait_stream(main)
        with side:
            x = torch.arange(8.0 * WIDTH, device=DEVICE).view(8, WIDTH)
        main.wait_stream(side)
        # No `record_stream`: without offloading the graph keeps `x` until backward.
        with context:
            loss = Shared.apply(model(x)).sum()
        del x
        for _ in range(4):  # layers that come later: the engine lets go of the earlier ones' memory
            with context:
                loss = loss + Shared.apply(model(torch.ones(8, WIDTH, device=DEVICE))).sum()
        with side:
            torch.zeros(8, WIDTH, device=DEVICE).add_(1)
        loss.backward()
        return gradients_of(model)

    compare(run, model)


add("activations, allocated on another stream", allocated_elsewhere, is_quick=True)


def measured_beside_work() -> None:
    """Measure the link with memory that queued work still uses."""
    model = nn.Linear(1, 1).to(DEVICE)
    accelerator._speeds.clear()
    torch.ones(accelerator._MEASURED_BYTES // 4, device=DEVICE).mul_(2)  # freed at once
    activations(model).close()


add("activations, measured beside work", measured_beside_work)


class Fails(nn.Module):
    """A layer that raises when it is told to."""

    is_broken = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_broken:
            raise ZeroDivisionError
        return x * 2


def exception_in_forward(*, is_checkpointed: bool) -> None:
    """Raise in the middle of a step, whose copies are on their way, and go on with another step."""
    model, tokens = make(is_checkpointed=is_checkpointed)
    fails = Fails()
    model.layers.insert(3, fails)

    def run(context: contextlib.AbstractContextManager[object]) -> list[Tensor]:
        fails.is_broken = True
        with pytest.raises(ZeroDivisionError):
            train_step(model, tokens, context)
        fails.is_broken = False
        return train_step(model, tokens, context)

    compare(run, model)


def exception_in_backward() -> None:
    """Raise in the middle of backward, whose copies are on their way back."""
    model, tokens = make(is_checkpointed=False)

    def broken(_: Tensor) -> Tensor:
        raise ZeroDivisionError

    def run(context: contextlib.AbstractContextManager[object]) -> list[Tensor]:
        handle = model.layers[2].register_forward_hook(lambda _, __, output: output.register_hook(broken) and None)
        with pytest.raises(ZeroDivisionError):
            train_step(model, tokens, context)
        handle.remove()
        return train_step(model, tokens, context)

    compare(run, model, lead=2)


add("activations, an exception in forward", partial(exception_in_forward, is_checkpointed=True), is_quick=True)
add("activations, an exception in forward, nothing checkpointed", partial(exception_in_forward, is_checkpointed=False))
add("activations, an exception in backward", exception_in_backward)


def views_and_changes(min_bytes: int) -> None:
    """Save small parts of storages, twice, and what must stay; then change what was saved, which is an error."""
    model = nn.Linear(WIDTH, WIDTH).to(DEVICE)
    x = torch.randn(64, WIDTH, device=DEVICE)

    def run(context: contextlib.AbstractContextManager[object]) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        with context:
            y = leaf * 2
            part = y[3:4]
            z = Shared.apply(part) + Shared.apply(part) + Shared.apply(model.weight)[:1]
            z = z + Shared.apply(y)[:1] + Shared.apply(y.t()).t()[1:2]
        found = torch.autograd.grad(z.sum(), [leaf, model.weight])
        for number in range(2):
            with context:
                y = leaf * 2
                loss = Shared.apply(model.weight if number else y).sum()
            torch.accelerator.synchronize()  # the change would race with the copy to the host, as well
            with torch.no_grad():
                (model.weight if number else y).add_(0)
            with pytest.raises((RuntimeError, UsageError), match=r"changed in place|modified by an inplace"):
                loss.backward()
        return [each.cpu() for each in found]

    compare(run, model, min_bytes=min_bytes)


for _bytes in (0, 100):  # a part of 64 bytes leaves, or stays
    add(f"activations, views, {_bytes} bytes", partial(views_and_changes, _bytes), is_quick=True)


def saved_meanwhile() -> None:
    """Write the weights to the host while copies of activations are on their way, and train on."""
    model, tokens = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    before = copy.deepcopy(model.state_dict())
    for _ in range(3):
        train_step(model, tokens)
        optimizer.step()
        expected.append([each.cpu() for each in model.state_dict().values()])
    model.load_state_dict(before)
    offload = activations(model, min_bytes=0, lead=1)
    for number in range(3):
        torch.manual_seed(5)
        model.zero_grad(set_to_none=True)
        with offload:
            loss = loss_of(model, tokens)
        saved = [each.cpu() for each in model.state_dict().values()]
        if number:
            assert_same(saved, expected[number - 1], f"in the middle of step {number}")
        loss.backward()
        optimizer.step()
    assert_same([each.cpu() for each in model.state_dict().values()], expected[-1])
    offload.close()


add("activations, saved meanwhile", saved_meanwhile)


def closed_at_once() -> None:
    """Give memory back while its copies are on their way, and take it anew."""
    model, tokens = make(is_checkpointed=False)
    expected = train_step(model, tokens)
    for number in range(2):
        offload = activations(model, min_bytes=0, lead=1)
        with offload:
            loss = loss_of(model, tokens)
        del loss
        assert_same(train_step(model, tokens, offload), expected, f"in round {number}")
        with offload:
            loss = loss_of(model, tokens)
        offload.close()
        del loss, offload


add("activations, closed at once", closed_at_once)


def dropped_at_once() -> None:
    """Let go of everything while copies are on their way, without closing it."""
    model, tokens = make(is_checkpointed=False)
    expected = train_step(model, tokens)
    for number in range(2):
        offload = activations(model, min_bytes=0, lead=1)
        assert_same(train_step(model, tokens, offload), expected, f"in round {number}")
        with offload:
            loss = loss_of(model, tokens)
        del loss, offload


add("activations, dropped at once", dropped_at_once)
