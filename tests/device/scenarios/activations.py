"""What checkpointed layers keep leaves a simulated device and comes back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch.nn import functional

import smpkit
from smpkit.torch.offload.order import Lead
from tests.device.scenarios.common import DEVICE, WIDTH, add, assert_same

checkpoint = partial(torch_checkpoint.checkpoint, use_reentrant=False)
"""As torch.utils.checkpoint calls it: smpkit replaces what is behind it."""


class Decoder(nn.Module):
    """A few layers of a transformer, each checkpointed or not."""

    def __init__(self, *, dropout: float = 0.0, is_checkpointed: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout, batch_first=True) for _ in range(4)
        )
        self.is_checkpointed = is_checkpointed

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x) if self.is_checkpointed else layer(x)
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


def train_step(model: nn.Module, tokens: Tensor) -> list[Tensor]:
    """Return the loss and the gradients of a step."""
    torch.manual_seed(5)
    model.zero_grad(set_to_none=True)
    loss = loss_of(model, tokens)
    loss.backward()
    return [loss.detach().cpu(), *gradients_of(model)]


def compare(step: Callable[[], list[Tensor]], model: nn.Module, **options: Any) -> None:
    """Run a step without offloading once, and three times with it; something must leave."""
    expected = step()
    with smpkit.offload_activations(model, **{"min_bytes": 0, "lead": 1} | options) as offload:
        for number in range(3):
            assert_same(step(), expected, f"in step {number}")
        assert offload.report().bytes_out > 0


def offloaded(*, is_autocast: bool = False, lead: Lead = 1, budget: int | None = None, **options: Any) -> None:
    """Compare steps with and without offloading."""
    model, tokens = make(**options)

    def step() -> list[Tensor]:
        with torch.autocast("sim", torch.bfloat16, enabled=is_autocast):
            return train_step(model, tokens)

    compare(step, model, lead=lead, host_budget_bytes=budget)


add("activations, dropout", partial(offloaded, dropout=0.3), is_quick=True)
add("activations, autocast, lead auto", partial(offloaded, is_autocast=True, lead="auto"), is_quick=True)
add("activations, host memory for two layers", partial(offloaded, budget=2048), is_quick=True)


# --- streams ----------------------------------------------------------------------------------------------------------


class Scale(nn.Module):
    """Needs its input in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x) * self.weight


class Chain(nn.ModuleList):
    """Checkpointed layers, one after the other."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(layers or [Scale() for _ in range(4)])
        self.to(DEVICE)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        for layer in self:
            x = checkpoint(layer, x)
        return x


def compare_gradients(model: nn.Module, x: Tensor) -> None:
    """Compare the gradients of steps, those of the input, too."""

    def step() -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        leaf = x.clone().requires_grad_()
        model(leaf).square().sum().backward()
        assert leaf.grad is not None
        return [leaf.grad.cpu(), *gradients_of(model)]

    compare(step, model)


def rows_on_device(number: int = 8) -> Tensor:
    """Return an input, which any stream may read."""
    x = torch.randn(number, WIDTH, device=DEVICE)
    torch.accelerator.synchronize()
    return x


class Branches(Chain):
    """Two branches from one tensor, the second on another stream and with as many layers as it is told."""

    def __init__(self, on_side: int, on_main: int) -> None:
        super().__init__()
        self.on_side, self.on_main, self.side = on_side, on_main, torch.Stream(DEVICE)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        main = torch.accelerator.current_stream(DEVICE)
        z = x * 2
        first = checkpoint(self[0], z)
        self.side.wait_stream(main)
        with self.side:  # no `record_stream`: without offloading the graph keeps `z` until backward
            second = z
            for layer in list(self)[: self.on_side]:
                second = checkpoint(layer, second)
            second = second.sum()
        del z
        for layer in list(self)[: self.on_main]:  # so that the memory of `z` is given back, for which this stream waits
            first = checkpoint(layer, first)
        return first.sum(), second


def branches(on_side: int, on_main: int) -> None:
    """Keep one storage on two streams, and run backward first on the one that has waited for no copy."""
    model, x = Branches(on_side, on_main), rows_on_device()

    def step() -> list[Tensor]:
        main, leaf = torch.accelerator.current_stream(DEVICE), x.clone().requires_grad_()
        first, second = model(leaf)
        with model.side:
            (of_second,) = torch.autograd.grad(second, [leaf], retain_graph=True)
        main.wait_stream(model.side)
        of_second.record_stream(main)
        (of_first,) = torch.autograd.grad(first, [leaf])
        with model.side:  # which may use memory again as soon as it is free
            torch.zeros(8, WIDTH, device=DEVICE).add_(1)
        return [of_first.cpu(), of_second.cpu()]

    compare(step, model)


add("activations, needed on two streams", partial(branches, 4, 0), is_quick=True)
add("activations, needed where nothing has left", partial(branches, 1, 4), is_quick=True)


def host_memory_of_another_stream(order: tuple[int, int]) -> None:
    """Run steps on streams that do not wait for each other, and then one that takes the host memory of both."""
    model, streams = Chain(), [torch.Stream(DEVICE) for _ in range(2)]
    small, large = rows_on_device(8), rows_on_device(16)  # eight layers of the one, or four of the other, fill a slab

    def forward(number: int, x: Tensor) -> tuple[Tensor, Tensor]:
        with streams[number]:
            leaf = x.clone().requires_grad_()
            return leaf, model(leaf).sum()

    def backward(number: int, leaf: Tensor, loss: Tensor) -> tuple[Tensor, ...]:
        with streams[number]:
            return torch.autograd.grad(loss, [leaf])  # those of weights would make one stream wait for the other

    def step() -> list[Tensor]:
        graphs = [forward(number, small) for number in range(2)]
        found = [each for number in order for each in backward(number, *graphs[number])]
        del graphs
        found += backward(order[0], *forward(order[0], large))
        torch.accelerator.synchronize()
        return [each.cpu() for each in found]

    compare(step, model)


for _order in ((0, 1), (1, 0)):  # so that of two ranges which are joined the one or the other has been read last
    _name = f"activations, host memory of another stream, {_order[0]} first"
    add(_name, partial(host_memory_of_another_stream, _order), is_quick=True)


class Waiting(Scale):
    """Waits for the device before it computes, as a layer does that reads a value."""

    def forward(self, x: Tensor) -> Tensor:
        torch.accelerator.synchronize()
        return super().forward(x)


class Elsewhere(Chain):
    """The input of the first layer is allocated on another stream."""

    def __init__(self) -> None:
        super().__init__(Waiting(), Scale(), Scale(), Scale())  # so the copy ends before the first layer's work begins
        self.side = torch.Stream(DEVICE)

    def forward(self, x: Tensor) -> Tensor:
        main = torch.accelerator.current_stream(DEVICE)
        self.side.wait_stream(main)
        with self.side:
            y = x * 2
        main.wait_stream(self.side)
        y = checkpoint(self[0], y).sum()  # no `record_stream`: without offloading the graph keeps it until backward
        later = x
        for layer in list(self)[1:]:  # the engine lets go of the earlier one's memory
            later = checkpoint(layer, later * 2)
        with self.side:
            torch.zeros(8, WIDTH, device=DEVICE).add_(1)
        return y + later.sum()


add(
    "activations, allocated on another stream, waiting",
    lambda: compare_gradients(Elsewhere(), rows_on_device()),
    is_quick=True,
)


# --- the unexpected ---------------------------------------------------------------------------------------------------


class Parts(Chain):
    """Layers that keep a small part of a large tensor twice, all of it, and a view of that."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        part = y[3:4]
        z = checkpoint(self[0], part) + checkpoint(self[1], part) + checkpoint(self[2], y)[:1]
        return z + checkpoint(self[3], y.view(2, 32, WIDTH))[1, :1]


add("activations, views", lambda: compare_gradients(Parts(), rows_on_device(64)), is_quick=True)


def dropped_at_once() -> None:
    """Let go of everything while copies are on their way, without closing it, and take memory anew."""
    model, tokens = make()
    expected = train_step(model, tokens)
    for number in range(2):
        offload = smpkit.offload_activations(model, min_bytes=0, lead=1)
        assert_same(train_step(model, tokens), expected, f"in round {number}")
        loss = loss_of(model, tokens)
        for hook in offload._hooks:  # the model holds them
            hook.remove()
        del loss, offload


add("activations, dropped at once", dropped_at_once, is_quick=True)
