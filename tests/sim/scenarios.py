"""Small trainings on simulated devices, each compared with the plain model there.

`SCENARIOS` names them. `tests/sim/test_*.py` run them under several orders of the device, and `scripts/sync_mutants`
with one synchronisation of the product left out: then one of them must have a race, a wrong value or an error.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import checkpoint

import smpkit.torch as smp
from smpkit import OffloadModel, OffloadOptimizer
from smpkit.errors import UsageError
from smpkit.testing import simulated_device
from smpkit.torch.checkpoints import save as saving
from smpkit.torch.checkpoints.safetensors import map_tensors
from smpkit.torch.memory import Fitted, fit
from smpkit.torch.offload import accelerator, activations
from smpkit.torch.offload.engine import DEBUG
from smpkit.torch.offload_model import counted_link, kernels
from tests.sim.calibration import measures_what_the_device_does
from tests.torch import small_steps

__all__ = ["SCENARIOS", "Scenario", "run_scenario"]

DEVICE = "sim:0"
WIDTH = 16


# --- what all have in common ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """A training and the comparison of what came out.

    Attributes:
        run: raises AssertionError where a value is wrong.
        ranks: how many processes run it.
        is_quick: whether the default suite runs it.
    """

    run: Callable[[], None]
    ranks: int = 1
    is_quick: bool = False


SCENARIOS: dict[str, Scenario] = {}


_order: tuple[str, int] = ("lazy", 0)
_updates_are_slow = False
"""Whether the threads of an OffloadOptimizer take so long that nobody finds their work done by luck."""


def run_scenario(name: str, order: tuple[str, int]) -> None:
    """Run a scenario on this rank, with what ctypes reads and writes behind torch's back told to the device.

    The device runs work by `order`, a policy and a seed.
    """
    global _order  # noqa: PLW0603 - of this process, which runs one after the other
    _order = order
    simulated_device.set_policy(*order)
    with (
        mock.patch.object(accelerator, "_MEASURED_BYTES", 4096),  # 32 MiB take longer than all the rest
        mock.patch.object(kernels, "one_pass", _told_one_pass),
    ):
        SCENARIOS[name].run()


_one_pass = kernels.one_pass


def _told_one_pass(rule: kernels.Rule, flat_range: kernels.FlatRange) -> None:
    """Apply a rule with the compiled kernel, and say which memory that uses."""
    simulated_device.host_access(flat_range.gradient, writes=False, what="the optimizer's kernel")
    if _updates_are_slow:
        time.sleep(0.03)
    written = [flat_range.master, *flat_range.state]
    if flat_range.weight is not None:
        written.append(flat_range.weight)
    for tensor in written:
        simulated_device.host_access(tensor, writes=True, what="the optimizer's kernel")
    _one_pass(rule, flat_range)


def _add(name: str, run: Callable[[], None], *, ranks: int = 1, is_quick: bool = False) -> None:
    assert name not in SCENARIOS
    SCENARIOS[name] = Scenario(run, ranks, is_quick)


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor], what: str = "") -> None:
    """Raise AssertionError unless all tensors have the same bits."""
    pairs = zip(found, expected, strict=True)
    wrong = [index for index, (one, other) in enumerate(pairs) if not torch.equal(one, other)]
    assert not wrong, f"{len(wrong)} of {len(expected)} tensors are wrong, the first is {wrong[0]} {what}"


# --- activations ------------------------------------------------------------------------------------------------------


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
_add("activations", offloaded, is_quick=True)
_add("activations, nothing checkpointed", partial(offloaded, _UNCHECKPOINTED), is_quick=True)
_add("activations, dropout", partial(offloaded, {"dropout": 0.3}), is_quick=True)
_add("activations, dropout, nothing checkpointed", partial(offloaded, {"dropout": 0.3} | _UNCHECKPOINTED))
_add("activations, reentrant", partial(offloaded, {"use_reentrant": True}))
for _lead in (2, 3, "auto"):
    _add(f"activations, lead {_lead}", partial(offloaded, lead=_lead))
    _add(f"activations, lead {_lead}, nothing checkpointed", partial(offloaded, _UNCHECKPOINTED, lead=_lead))
_add("activations, autocast", partial(offloaded, is_autocast=True), is_quick=True)
_run = partial(offloaded, _UNCHECKPOINTED, is_autocast=True)
_add("activations, autocast, nothing checkpointed", _run, is_quick=True)
_add("activations, large ones only", partial(offloaded, _UNCHECKPOINTED, min_bytes=1500))
_add("activations, checked by the engine", partial(offloaded, _UNCHECKPOINTED, is_checked=True))


def host_memory_exhausted(num_bytes: int) -> None:
    """Let host memory suffice for some of the layers only."""
    offloaded(_UNCHECKPOINTED, host_budget_bytes=num_bytes)


for _kib in (8, 40):
    _add(f"activations, {_kib} KiB of host memory", partial(host_memory_exhausted, _kib << 10), is_quick=_kib == 8)


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
        _add(_name, _run, is_quick=_is_first and _is_checkpointed)


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


_add("activations, graph kept", graph_kept)


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


_add("activations, side streams", partial(on_streams, whole=False), is_quick=True)
_add("activations, side streams, lead 2", partial(on_streams, whole=False, lead=2))
_add("activations, a step on a side stream", partial(on_streams, whole=True))


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


_add("activations, needed on two streams", needed_on_two_streams, is_quick=True)


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


_add("activations, needed where nothing has left", needed_where_nothing_has_left)


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


_add("activations, host memory of another stream", host_memory_of_another_stream, is_quick=True)
_other_sizes = partial(host_memory_of_another_stream, sizes=(8, 24), budget=4096)  # so blocks are joined and cut
_add("activations, host memory of another stream, other sizes", _other_sizes, is_quick=True)


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


_add("activations, a block of two", block_of_two)


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


_add("activations, saved on another stream", saved_elsewhere)


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


_add("activations, allocated on another stream", allocated_elsewhere, is_quick=True)


def measured_beside_work() -> None:
    """Measure the link with memory that queued work still uses."""
    model = nn.Linear(1, 1).to(DEVICE)
    accelerator._speeds.clear()
    torch.ones(accelerator._MEASURED_BYTES // 4, device=DEVICE).mul_(2)  # freed at once
    activations(model).close()


_add("activations, measured beside work", measured_beside_work)


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


_add("activations, an exception in forward", partial(exception_in_forward, is_checkpointed=True), is_quick=True)
_add("activations, an exception in forward, nothing checkpointed", partial(exception_in_forward, is_checkpointed=False))
_add("activations, an exception in backward", exception_in_backward, is_quick=True)


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
    _add(f"activations, views, {_bytes} bytes", partial(views_and_changes, _bytes), is_quick=True)


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


_add("activations, saved meanwhile", saved_meanwhile)


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


_add("activations, closed at once", closed_at_once)


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


_add("activations, dropped at once", dropped_at_once)


# --- activations under the API of SMP v1 ------------------------------------------------------------------------------


class Small(nn.Module):
    """A layer of few operators."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), dropout

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.dropout(functional.gelu(self.linear(x)), self.dropout)


class Stack(nn.Module):
    """Layers that can be checkpointed in groups, or inside of each other."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(Small(dropout), Small(0.0)) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@contextlib.contextmanager
def _broken(model: nn.Module, kind: type[nn.Module]) -> Iterator[None]:
    """Let the backward of the third layer of a kind raise."""

    def broken(_: Tensor) -> Tensor:
        raise ZeroDivisionError

    def break_backward(_: nn.Module, __: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(broken)

    handle = [each for each in model.modules() if isinstance(each, kind)][2].register_forward_hook(break_backward)
    try:
        yield
    finally:
        handle.remove()


@smp.step
def smp_step(model: Any, x: Tensor) -> Tensor:
    """Run one microbatch."""
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


_nothing = contextlib.nullcontext


def smp_train(config: Mapping[str, Any], strategy: str, dropout: float, *, nested: bool, fails: str) -> list[Tensor]:
    """Train and return losses and gradients of all steps."""
    smp.init(dict(config))
    with torch.device("cpu"):
        torch.manual_seed(0)
        module = Stack(dropout)
        x = torch.randn(8, 4, WIDTH)
    smp.set_activation_checkpointing(module.layers, strategy=strategy)
    if nested:
        for pair in module.layers.children():
            smp.set_activation_checkpointing(next(pair.children()))
    model = smp.DistributedModel(module)
    found = []
    for number in range(3):
        torch.manual_seed(number)
        for parameter in model.parameters():
            parameter.grad = None
        if fails and number == 1:
            with pytest.raises(ZeroDivisionError), _broken(module, Small) if fails == "backward" else _nothing():
                (smp_step if fails == "backward" else smp_fails)(model, x.clone())
            for parameter in model.parameters():
                parameter.grad = None
            torch.manual_seed(number)
        passed = x.clone(memory_format=torch.contiguous_format).pin_memory()
        loss = smp_step(model, passed)
        passed.fill_(float("nan"))  # the user's memory is the user's again
        found.append(loss.reduce_mean().detach().cpu())
        found += [each.grad.cpu() for _, each in model.local_named_parameters() if each.grad is not None]
    smp.shutdown()
    return found


@smp.step
def smp_fails(model: Any, x: Tensor) -> Tensor:
    """Raise in the middle of a step."""
    model(x).square().mean()
    raise ZeroDivisionError


def smp_offloaded(
    strategy: str = "each",
    *,
    horizon: int | str = 4,
    dropout: float = 0.0,
    nested: bool = False,
    fails: str = "",
    **config: Any,
) -> None:
    """Compare a training with and without `offload_activations`."""
    plain = {"microbatches": 2} | config
    expected = smp_train(plain, strategy, dropout, nested=nested, fails="")
    with mock.patch.object(accelerator.AcceleratorLink, "min_bytes", 0):
        ours = plain | {"offload_activations": True, "activation_loading_horizon": horizon}
        found = smp_train(ours, strategy, dropout, nested=nested, fails=fails)
    assert_same(found, expected)


for _strategy in ("each", "group_2", "contiguous"):
    _add(f"step, {_strategy}", partial(smp_offloaded, _strategy), is_quick=_strategy == "group_2")
    _add(f"step, {_strategy}, dropout", partial(smp_offloaded, _strategy, dropout=0.3))
for _horizon in (1, 2, "auto"):
    _add(f"step, horizon {_horizon}", partial(smp_offloaded, horizon=_horizon))
_add("step, nested", partial(smp_offloaded, nested=True))
_add("step, an exception", partial(smp_offloaded, fails="forward"), is_quick=True)
_add("step, an exception in backward", partial(smp_offloaded, fails="backward"), is_quick=True)
_add("step, 4 microbatches, dropout", partial(smp_offloaded, microbatches=4, dropout=0.3))


def smp_choose(config: Mapping[str, Any], strategy: str, room: int = 0) -> tuple[list[Tensor], int, dict[str, str]]:
    """Train for seven steps; return losses and gradients of all, the peak of a late one, and what layers do then.

    Args:
        room: bytes for all of it; 0: no bound.
    """
    gc.collect()
    before = torch.accelerator.memory_allocated()  # trainings before this one may have left something
    smp.init({**config, **({"memory_budget_gib": (before + room) / 2**30} if room else {})})
    with torch.device("cpu"):
        torch.manual_seed(0)
        module = Stack(0.3)
        x = torch.randn(8, 32, WIDTH)
    smp.set_activation_checkpointing(module.layers, strategy=strategy)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), foreach=False))
    found = []
    for number in range(7):
        torch.manual_seed(number)
        optimizer.zero_grad()
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        loss = smp_step(model, x.clone())
        found.append(loss.reduce_mean().detach().cpu())
        found += [each.grad.cpu() for _, each in model.local_named_parameters() if each.grad is not None]
        optimizer.step()
    torch.accelerator.synchronize()
    peak, choices = torch.accelerator.max_memory_allocated() - before, model.activation_choices()
    smp.shutdown()
    return found, peak, choices


def smp_chosen(strategy: str, offloads: bool | str, share: float, words: str) -> None:
    """Compare a training whose layers are chosen for with one that recomputes all of them.

    Args:
        share: of the memory between what the smallest choice takes and what all layers kept would take.
        words: each of them must be the choice for a layer.
    """
    plain = {"microbatches": 2}
    expected, least, _ = smp_choose(plain, "each")
    _, most, _ = smp_choose(plain, "auto")
    room = int(least + share * (most - least))
    with mock.patch.object(accelerator.AcceleratorLink, "min_bytes", 0):
        found, peak, choices = smp_choose({**plain, "offload_activations": offloads}, strategy, room)
    assert_same(found, expected)
    assert peak <= room, f"a peak of {peak} within {room}"
    assert set(words.split()) <= set(choices.values()), choices


def smp_chosen_over_ranks(**config: Any) -> None:
    """Compare a training that keeps, recomputes and offloads over two ranks with one that recomputes."""
    plain = {"microbatches": 4} | config
    expected, _, _ = smp_choose(plain, "each")
    with mock.patch.object(accelerator.AcceleratorLink, "min_bytes", 0):
        kept, _, choices = smp_choose({**plain, "offload_activations": "auto"}, "auto")
        none, _, least = smp_choose({**plain, "offload_activations": True, "memory_budget_gib": 1e-6}, "auto")
    assert_same(kept, expected)
    assert_same(none, expected)
    assert (set(choices.values()), set(least.values())) == ({"keep"}, {"offload"})


_add("auto, kept and recomputed", partial(smp_chosen, "auto", False, 0.6, "keep recompute"))
_add("auto, kept and offloaded", partial(smp_chosen, "auto", True, 0.6, "keep offload"))
_add("auto, of all three", partial(smp_chosen, "auto", "auto", 0.6, "keep"), is_quick=True)
_add("offloading auto", partial(smp_chosen, "each", "auto", 0.5, ""))
_add("auto, a pipeline", partial(smp_chosen_over_ranks, pipeline_parallel_degree=2), ranks=2)


def fitted(share: float) -> None:
    """Train a model that `smpkit.fit` keeps within a part of the memory that it would take, and look at its peaks."""
    model, tokens = make(is_checkpointed=False, dropout=0.3)
    tokens = tokens.repeat(2, 4)

    def train(limit: int | None) -> tuple[list[Tensor], int, Fitted | None]:
        with torch.device("cpu"):
            trained = copy.deepcopy(model)
        fitted = None if limit is None else fit(trained, device_gib=limit / 2**30, lead=1, min_bytes=0)
        optimizer = torch.optim.Adam(trained.parameters(), foreach=False)
        steps, peak = [], 0
        for _ in range(6):
            torch.accelerator.reset_peak_memory_stats(0)
            steps += train_step(trained, tokens)
            optimizer.step()
            peak = max(peak, torch.accelerator.max_memory_allocated(0))
        return steps, peak, fitted

    expected, whole, _ = train(None)
    limit = int(share * whole)
    found, peak, fitted = train(limit)
    assert_same(found, expected)
    assert peak <= limit, f"a peak of {peak} within {limit}"
    assert fitted is not None
    report = fitted.report()
    assert report.fits
    assert report.least_seconds > 0, "it has not waited for the step that it measured"
    fitted.remove()


_add("fit, most recomputed", partial(fitted, 0.8), is_quick=True)
_add("fit, most kept", partial(fitted, 0.95))


# --- OffloadModel -----------------------------------------------------------------------------------------------------


def make_chain(*, tied: bool = False, unused: bool = False, frozen: int = 0, normalized: bool = False) -> nn.Sequential:
    """Return layers for an OffloadModel."""
    with torch.device("cpu"):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.GELU()) for _ in range(6)]
    if tied:
        layers[4][0].register_parameter("weight", layers[1][0].get_parameter("weight"))
    if unused:
        layers[3][0].weight.requires_grad_(False)
    if normalized:
        with torch.device("cpu"):
            for layer in layers:
                layer.append(nn.LayerNorm(WIDTH))
    for layer in layers[:frozen]:
        layer.requires_grad_(False)
    return nn.Sequential(*layers)


def inputs_of(step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the batch of a step, on the host: the model copies it."""
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step), device="cpu").to(dtype)


Step = Callable[[Any, Any, int], Tensor]


def plain_step(
    model: Any, optimizer: Any, number: int, *, backwards: int = 1, dtype: torch.dtype | None = None
) -> Tensor:
    """Run one step, and return its loss."""
    optimizer.zero_grad()
    total = torch.zeros((), device=DEVICE)
    for part in range(backwards):
        x = inputs_of(10 * number + part, dtype or torch.float32)
        loss = model(x.to(DEVICE) if not isinstance(model, OffloadModel) else x).float().square().mean()
        x.data.fill_(float("nan"))  # the user's memory is the user's again; `.data`, because the model refuses this
        loss.backward()
        total += loss.detach()
    return total


def weights_of(model: nn.Module) -> list[Tensor]:
    """Return all weights, on the host."""
    return [each.detach().cpu().float().clone() for each in model.parameters()]


def offload_model(
    *,
    overlap: str = "torch",
    rule: type[torch.optim.Optimizer] = torch.optim.AdamW,
    steps: int = 3,
    backwards: int = 1,
    clip: float | None = None,
    dtype: torch.dtype | None = None,
    tied: bool = False,
    unused: bool = False,
    evaluates: bool = False,
    evaluates_late: bool = False,
    reads: bool = False,
    writes: str = "",
    frozen: int = 0,
    normalized: bool = False,
    saves: bool = False,
    fails: bool = False,
    optimizer_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """Compare an OffloadModel with the plain model on the device, whose dropout draws the same numbers."""
    plain = make_chain(tied=tied, unused=unused, frozen=frozen, normalized=normalized)
    source = copy.deepcopy(plain)
    plain.to(DEVICE)
    if tied:  # torch makes parameters anew for devices of plug-ins, so this has undone it
        one, other = (next(plain[index].children()) for index in (1, 4))
        other.register_parameter("weight", one.get_parameter("weight"))
    rates = {"lr": 0.01} | dict(optimizer_options or {})
    is_exact = overlap == "torch" and clip is None and dtype is None and options.get("num_microbatches", 1) == 1
    theirs = rule(plain.parameters(), foreach=False, **rates)  # type: ignore[call-arg]
    model = OffloadModel(source, DEVICE, dtype=dtype, **{"num_slices": 3} | options)
    held = [each for each in model.parameters() if not frozen or not each.requires_grad]
    ours: Any
    if overlap == "torch":
        ours = rule(model.parameters(), foreach=False, **rates)  # type: ignore[call-arg]
    else:
        ours = OffloadOptimizer(model, rule, overlap=overlap, max_grad_norm=clip, num_threads=1, **rates)  # type: ignore[arg-type]
    cast = partial(torch.autocast, "sim", dtype) if dtype is not None else contextlib.nullcontext

    halved = [each for each in plain.parameters() if not frozen or not each.requires_grad] if writes else []
    losses = _train_plain(plain, theirs, cast, steps=steps, backwards=backwards, clip=clip, halved=halved)
    found = []
    for number in range(steps):
        if evaluates:  # a forward whose loads no backward follows
            _evaluate(model, dtype)
        if fails and number == 1:
            with pytest.raises(ZeroDivisionError), _broken(model, nn.GELU):
                plain_step(model, ours, 77, dtype=dtype)
            ours.zero_grad()
        torch.manual_seed(number)
        loss = plain_step(model, ours, number, backwards=backwards, dtype=dtype)
        if frozen and writes:  # after backward, before anybody waits for the device
            _halve(held, writes, model)
        found.append(loss.cpu())
        if overlap == "torch" and clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if evaluates_late:
            _evaluate(model, dtype)
        ours.step()
        _use_between(model, ours, held, reads=reads, writes="" if frozen else writes, saves=saves)
    model.synchronize()
    torch.accelerator.synchronize()
    if is_exact:
        assert_same([*found, *weights_of(model)], [*losses, *weights_of(plain)])
        return
    if options.get("num_microbatches", 1) > 1 or dtype is not None:
        # Dropout draws other numbers for pieces of a batch, and autocast rounds elsewhere. What is early or late is
        # poisoned memory, which is NaN.
        assert all(each.isfinite().all() for each in [*found, *weights_of(model)])
        return
    for left, right in zip([*found, *weights_of(model)], [*losses, *weights_of(plain)], strict=True):
        torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def _evaluate(model: OffloadModel, dtype: torch.dtype | None) -> None:
    model(inputs_of(99, dtype or torch.float32))


def _use_between(
    model: OffloadModel, ours: Any, held: Sequence[nn.Parameter], *, reads: bool, writes: str, saves: bool
) -> None:
    """Use the weights as users do between two steps."""
    if writes:
        _evaluate(model, None)
        _halve(held, writes, model)
    if reads:
        assert all(each.isfinite().all() for each in weights_of(model))
    if saves:
        saved = copy.deepcopy((model.state_dict(), ours.state_dict()))
        model.load_state_dict(saved[0])
        ours.load_state_dict(saved[1])


def _train_plain(
    model: nn.Module,
    optimizer: Any,
    cast: Callable[[], Any],
    *,
    steps: int,
    backwards: int,
    clip: float | None,
    halved: Sequence[nn.Parameter],
) -> list[Tensor]:
    """Return the losses of the plain model."""
    losses = []
    for number in range(steps):
        torch.manual_seed(number)
        with cast():
            losses.append(plain_step(model, optimizer, number, backwards=backwards).cpu())
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        _halve(halved, "in place", model)
    return losses


@torch.no_grad()
def _halve(parameters: Sequence[nn.Parameter], how: str, model: Any) -> None:
    """Write to weights in one of the ways in which users do."""
    if how == "in place, synchronized":
        model.synchronize()
    elif how == "in place, asked for":
        for _ in model.parameters():  # waits for whoever still reads or writes them
            break
    for parameter in parameters:
        if how == "replaced":
            parameter.data = parameter.data * 0.5
        else:
            parameter.mul_(0.5)


for _is_checkpointed in (False, True):
    _kind = "checkpointed" if _is_checkpointed else "graph"
    _options: dict[str, Any] = {"checkpoint_activation": _is_checkpointed}
    for _overlap in ("torch", "forward", "backward"):
        _common = partial(offload_model, overlap=_overlap, **_options)
        _title = f"OffloadModel, {_kind}, {_overlap}"
        _add(_title, _common, is_quick=_is_checkpointed or _overlap != "torch")
        _add(f"{_title}, evaluated between", partial(_common, evaluates=True), is_quick=_title.endswith("ed, forward"))
        _add(f"{_title}, read between", partial(_common, reads=True))
        _add(f"{_title}, saved between", partial(_common, saves=True))
        _add(f"{_title}, tied", partial(_common, tied=True))
        _add(f"{_title}, partly frozen", partial(_common, unused=True))
        _add(f"{_title}, 6 slices", partial(_common, num_slices=6))
        _add(f"{_title}, no prefetch", partial(_common, prefetch=False))
        _add(f"{_title}, little host memory", partial(_common, host_budget_bytes=2048))
        _add(f"{_title}, 4 microbatches", partial(_common, num_microbatches=4))
        _add(f"{_title}, bfloat16", partial(_common, dtype=torch.bfloat16), is_quick=_title.endswith("ed, forward"))
        _add(f"{_title}, bfloat16, normalized", partial(_common, dtype=torch.bfloat16, normalized=True))
        if _overlap != "backward":  # which has updated some slices when others raise
            _add(f"{_title}, an exception", partial(_common, fails=True), is_quick=_overlap == "torch")
            _add(f"{_title}, clipped", partial(_common, clip=0.1))
            _add(f"{_title}, two backwards", partial(_common, backwards=2))
        if _overlap != "torch":
            _sgd = {"lr": 0.1, "momentum": 0.9}
            _add(f"{_title}, momentum", partial(_common, rule=torch.optim.SGD, optimizer_options=_sgd))
        _add(f"{_title}, evaluated before the step", partial(_common, evaluates_late=True))
        _add(f"{_title}, evaluated before the step, tied", partial(_common, evaluates_late=True, tied=True))
        for _how in ("in place, synchronized", "in place, asked for", "replaced"):
            _add(f"{_title}, written {_how}", partial(_common, writes=_how))
    _torch = partial(offload_model, **_options)
    _add(f"OffloadModel, {_kind}, torch, written in place", partial(_torch, writes="in place"))
    _add(f"OffloadModel, {_kind}, torch, frozen and written", partial(_torch, writes="in place", frozen=2))


def updated_model(overlap: str, **options: Any) -> tuple[OffloadModel, Any, list[Any]]:
    """Return a model and its optimizer right after a step, and what its threads still do."""
    model = OffloadModel(make_chain(), DEVICE, num_slices=3, checkpoint_activation=True, **options)
    ours: Any = OffloadOptimizer(model, torch.optim.AdamW, overlap=overlap, num_threads=1, lr=0.01)  # type: ignore[arg-type]
    torch.manual_seed(0)
    plain_step(model, ours, 0, dtype=options.get("dtype"))
    ours.step()
    return model, ours, [each for some in ours._updates for each in some]


def _values(state: Any) -> list[Tensor]:
    return [each.detach().cpu().clone() for each in tree_flatten(state)[0] if isinstance(each, Tensor)]


def copied_in_pieces() -> None:
    """Copy weights and gradients in several pieces each."""
    with mock.patch.object(counted_link, "_CHUNK_BYTES", 200):
        offload_model(overlap="forward", checkpoint_activation=True)


_add("OffloadModel, copied in pieces", copied_in_pieces, is_quick=True)

_READS: dict[str, Callable[[OffloadModel, Any, list[nn.Parameter]], Any]] = {
    "its state dict": lambda model, _, __: model.state_dict(),
    "its parameters": lambda model, _, __: list(model.parameters()),
    "parameters that are held": lambda model, _, held: _synchronized(model, held),
    "a copy": lambda model, _, __: list(copy.deepcopy(model).parameters()),
    "the optimizer's state dict": lambda _, ours, __: ours.state_dict(),
}


def _synchronized(model: OffloadModel, held: list[nn.Parameter]) -> list[nn.Parameter]:
    model.synchronize()
    return held


def read_at_once(how: str, overlap: str) -> None:
    """Read something right after a step; threads still update it."""
    with mock.patch(f"{__name__}._updates_are_slow", new=True):
        model, ours, updates = updated_model(overlap)
        held = [parameter for piece in model._engine.slices for parameter in piece.weights.layout.parameters]
        found = _values(_READS[how](model, ours, held))
        for each in updates:
            each.result()
        assert_same(found, _values(_READS[how](model, ours, held)))


def loaded_at_once() -> None:
    """Load a state of the optimizer right after a step; threads still write it."""
    with mock.patch(f"{__name__}._updates_are_slow", new=True):
        model, ours, updates = updated_model("forward")
        saved = copy.deepcopy(ours.state_dict())
        torch.manual_seed(1)
        plain_step(model, ours, 1)
        ours.step()
        updates = [each for some in ours._updates for each in some]
        ours.load_state_dict(saved)
        for each in updates:
            each.result()
        assert_same(_values(ours.state_dict()), _values(saved))


def replaced_at_once(*, is_dropped: bool) -> None:
    """Make another optimizer right after a step of the first, which may be gone by then."""
    found = []
    for waits in (True, False):
        with mock.patch(f"{__name__}._updates_are_slow", new=True):
            model, ours, updates = updated_model("forward", dtype=torch.bfloat16)
            if waits:
                for each in updates:
                    each.result()
            if is_dropped:
                del ours
            # Not `model.parameters()`, which waits.
            held = [each for piece in model._engine.slices for each in piece.weights.layout.parameters]
            other: Any = OffloadOptimizer(model, torch.optim.AdamW, [{"params": held}], num_threads=1, lr=0.01)
            torch.manual_seed(1)
            plain_step(model, other, 1, dtype=torch.bfloat16)
            other.step()
            found.append(weights_of(model))
    assert_same(found[1], found[0])


for _how in _READS:
    for _overlap in ("forward", "backward"):
        _add(f"OffloadOptimizer, {_overlap}, {_how} read at once", partial(read_at_once, _how, _overlap))
_add("OffloadOptimizer, a state loaded at once", loaded_at_once)
_add("OffloadOptimizer, replaced at once", partial(replaced_at_once, is_dropped=False))
_add("OffloadOptimizer, dropped and replaced at once", partial(replaced_at_once, is_dropped=True))


def freed_between_backwards() -> None:
    """Freeze a layer between two backwards of a step, so that the buffers of gradients become smaller."""
    found = []
    for order in (("eager", 0), _order):
        simulated_device.set_policy(*order)
        model = OffloadModel(make_chain(), DEVICE, num_slices=2, checkpoint_activation=True)
        ours = OffloadOptimizer(model, torch.optim.AdamW, num_threads=1, lr=0.01)
        held = list(model.parameters())
        for number in range(2):
            torch.manual_seed(number)
            for part in range(2):
                for each in held[:6]:
                    each.requires_grad_(not part)
                loss = model(inputs_of(10 * number + part)).square().mean()
                loss.backward()
            ours.step()
        found.append(weights_of(model))
    assert_same(found[1], found[0])


_add("OffloadModel, frozen between backwards", freed_between_backwards)


class Clamped(nn.Linear):
    """Writes to its weight in forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x).tanh()


def written_in_forward(*, recomputes: bool, parts: int = 1) -> None:
    """Train an embedding that scales its rows in forward, and layers that write to their weights."""

    def step(model: Any, optimizer: Any, number: int) -> Tensor:
        optimizer.zero_grad()
        ids = torch.randint(16, (8,), generator=torch.Generator().manual_seed(number), device="cpu")
        loss: Tensor = model(ids if isinstance(model, OffloadModel) else ids.to(DEVICE)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach().cpu()

    with torch.device("cpu"):
        torch.manual_seed(0)
        embedding = nn.Embedding(16, WIDTH, max_norm=0.5)
        plain = nn.Sequential(embedding, Clamped(WIDTH, WIDTH), Clamped(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    source = copy.deepcopy(plain)
    plain.to(DEVICE)
    model = OffloadModel(source, DEVICE, num_slices=3, checkpoint_activation=recomputes, num_microbatches=parts)
    found = []
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5, foreach=False)
        losses = [step(each, optimizer, number) for number in range(3)]
        if isinstance(each, OffloadModel):
            each.synchronize()
        torch.accelerator.synchronize()
        found.append([*losses, *weights_of(each)])
    if parts == 1:
        assert_same(found[1], found[0])
    for left, right in zip(*found, strict=True):  # gradients of microbatches are added up in another order
        torch.testing.assert_close(left, right)


for _recomputes in (False, True):
    _title = f"OffloadModel, written in forward{', recomputed' if _recomputes else ''}"
    _add(_title, partial(written_in_forward, recomputes=_recomputes))
    _add(f"{_title}, microbatches", partial(written_in_forward, recomputes=_recomputes, parts=2))


def gone() -> None:
    """Let go of a model, whose memory is unpinned then."""
    for _ in range(2):
        updated_model("forward")
        gc.collect()
        torch.accelerator.synchronize()  # raises what the device has to say of the memory


_add("OffloadModel, gone", gone)


# --- several ranks ----------------------------------------------------------------------------------------------------


def trained(kind: small_steps.Kind, *, steps: int = 3) -> list[Tensor]:
    """Return the losses of a small training, and its last weights."""
    # Torch refuses to move a parameter to the device of a plug-in by `.data`, as a pipeline does: move them before.
    net = small_steps.Net
    device = "cpu" if kind.marked else DEVICE
    found = []
    with (
        mock.patch.object(small_steps, "Net", lambda **options: net(**options).to(device)),
        small_steps.begin(kind) as training,
    ):
        for number in range(steps):
            torch.manual_seed(number)
            found.append(training.step(small_steps.batch(number)).detach().cpu())
        found += [each.detach().cpu() for _, each in sorted(training.parameters())]
    return found


def trained_from_the_device(kind: small_steps.Kind) -> list[Tensor]:
    """Return the losses of a small training whose batches are results of the device, and on a stream of the user's."""
    net = small_steps.Net
    found = []
    stream = torch.Stream(DEVICE)
    with (
        mock.patch.object(small_steps, "Net", lambda **options: net(**options).to(DEVICE)),
        small_steps.begin(kind) as training,
        stream,
    ):
        for number in range(3):
            torch.manual_seed(number)
            x = small_steps.batch(number).to(DEVICE)
            for _ in range(3):
                x = x * 1.5
            found.append(training.step(x).detach())
        found = [each.cpu() for each in found]
        found += [each.detach().cpu() for _, each in sorted(training.parameters())]
    return found


def trained_offloaded(horizon: int | str) -> list[Tensor]:
    """Return what a small training over a pipeline gives whose activations leave the device."""
    config = {"offload_activations": True, "activation_loading_horizon": horizon}
    kind = replace(small_steps.KINDS["pipeline"], config={**small_steps.KINDS["pipeline"].config, **config})
    with mock.patch.object(accelerator.AcceleratorLink, "min_bytes", 0):
        return trained(replace(kind, checkpointed=True))


def trained_with_a_hook() -> list[Tensor]:
    """Return the weights after a training whose gradients are averaged by a communication hook."""
    smp.init({"ddp": True, "microbatches": 2})
    with torch.device("cpu"):
        torch.manual_seed(3)
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model: Any = smp.DistributedModel(module.to(DEVICE))
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(3):
        optimizer.zero_grad()
        smp_step(model, small_steps.batch(2 * number + smp.dp_rank()))
        optimizer.step()
    found = [each.detach().cpu() for _, each in model.local_named_parameters()]
    smp.shutdown()
    return found


def trained_on_uneven_inputs() -> list[Tensor]:
    """Return the weights after a training in which one rank has more batches than the other."""
    smp.init({"ddp": True, "microbatches": 1})
    with torch.device("cpu"):
        torch.manual_seed(3)
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model: Any = smp.DistributedModel(module.to(DEVICE))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with model.join():
        for number in range(2 + 2 * smp.dp_rank()):
            optimizer.zero_grad()
            smp_step(model, small_steps.batch(number))
            optimizer.step()
            torch.ones(WIDTH, device=DEVICE).add_(1)
    found = [each.detach().cpu() for _, each in model.local_named_parameters()]
    smp.shutdown()
    return found


def trained_after_an_exception() -> list[Tensor]:
    """Return the weights after a training over a pipeline in which a step has failed on both ranks."""
    smp.init(dict(small_steps.KINDS["pipeline"].config))
    with torch.device("cpu"):
        torch.manual_seed(3)
        module = small_steps.Net()
    model: Any = smp.DistributedModel(module.to(DEVICE))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(4):
        if number == 2:
            with pytest.raises(ZeroDivisionError):
                smp_fails(model, small_steps.batch(number))
        torch.manual_seed(number)
        optimizer.zero_grad()
        smp_step(model, small_steps.batch(number))
        optimizer.step()
    found = [each.detach().cpu() for _, each in model.local_named_parameters()]
    smp.shutdown()
    return found


def saved_in_the_background() -> None:
    """Write copies of the weights while training goes on, twice; the second save takes the memory of the first."""
    write = saving._write_files

    def write_later(*args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.3)
        return write(*args)

    def train(number: int) -> None:
        optimizer.zero_grad()
        smp_step(model, small_steps.batch(number))
        optimizer.step()

    def read(folder: Path) -> list[Tensor]:
        found = [map_tensors(path) for path in sorted(folder.glob("*.safetensors"))]
        assert found
        return [each for tensors in found for each in tensors.values()]

    smp.init({"microbatches": 1})
    with torch.device("cpu"):
        torch.manual_seed(3)
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model: Any = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1))
    with tempfile.TemporaryDirectory() as name, mock.patch.object(saving, "_write_files", write_later):
        train(0)
        for number in range(2):
            smp.save_checkpoint(name, f"now_{number}")
            pending = smp.save_checkpoint(name, f"later_{number}", blocking=False)
            train(number + 1)
        assert pending is not None
        pending.wait()
        for number in range(2):
            now, later = (read(Path(name, f"{tag}_{number}_partial")) for tag in ("now", "later"))
            assert_same(later, now, f"of save {number}")
        smp.save_checkpoint(name, "last", user_content={"step": 3}, blocking=False)
        assert smp.resume_from_checkpoint(name) == {"step": 3}, "it resumed from an older save"
    smp.shutdown()


_add("saved in the background", saved_in_the_background, is_quick=True)
_add("calibration", measures_what_the_device_does, is_quick=True)


def same_as_in_order(run: Callable[[], list[Tensor]]) -> None:
    """Compare a training with itself on a device where everything runs at once, so that nothing is late."""
    simulated_device.set_policy("eager")
    expected = run()
    simulated_device.set_policy(*_order)
    assert_same(run(), expected)


_FIND_MOST = ("pipeline", "interleaved", "tensor", "data, sharded state")
"""Of tests/sim_mutants.yaml."""
for _kind, _of_kind in small_steps.KINDS.items():
    if _of_kind.ranks > 1:
        _run = partial(same_as_in_order, partial(trained, _of_kind))
        _add(f"ranks, {_kind}", _run, ranks=_of_kind.ranks, is_quick=_kind in _FIND_MOST)
for _kind in ("pipeline", "interleaved"):
    _trains = partial(trained_from_the_device, small_steps.KINDS[_kind])
    _add(f"ranks, {_kind}, batches of the device, on a stream", partial(same_as_in_order, _trains), ranks=2)
_add("ranks, pipeline, an exception", partial(same_as_in_order, trained_after_an_exception), ranks=2)
for _horizon in (2, "auto"):
    _trains = partial(trained_offloaded, _horizon)
    _run = partial(same_as_in_order, _trains)
    _add(f"ranks, pipeline, offloaded, horizon {_horizon}", _run, ranks=2, is_quick=_horizon == 2)
_add("ranks, data, a hook", partial(same_as_in_order, trained_with_a_hook), ranks=2)
_run = partial(same_as_in_order, trained_on_uneven_inputs)
_add("ranks, data, uneven inputs", _run, ranks=2, is_quick=True)
