"""OffloadModel and its optimizer on a simulated device."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import checkpoint

from smpkit import OffloadModel, OffloadOptimizer
from smpkit.errors import UnsupportedError
from tests.device.scenarios.common import DEVICE, WIDTH, add, assert_same, slow_updates


def make_chain(*, tied: bool = False, frozen: int = 0) -> nn.Sequential:
    """Return layers for an OffloadModel."""
    with torch.device("cpu"):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.GELU()) for _ in range(6)]
    if tied:
        layers[4][0].register_parameter("weight", layers[1][0].get_parameter("weight"))
    for layer in layers[:frozen]:
        layer.requires_grad_(False)
    return nn.Sequential(*layers)


def inputs_of(step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the batch of a step, on the host: the model copies it."""
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step), device="cpu").to(dtype)


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
    backwards: int = 1,
    dtype: torch.dtype | None = None,
    tied: bool = False,
    evaluates: bool = False,
    evaluates_late: bool = False,
    idles: bool = False,
    writes: str = "",
    frozen: int = 0,
    fails: bool = False,
    **options: Any,
) -> None:
    """Compare an OffloadModel with the plain model on the device, whose dropout draws the same numbers."""
    plain = make_chain(tied=tied, frozen=frozen)
    source = copy.deepcopy(plain)
    plain.to(DEVICE)
    if tied:  # torch makes parameters anew for devices of plug-ins, so this has undone it
        one, other = (next(plain[index].children()) for index in (1, 4))
        other.register_parameter("weight", one.get_parameter("weight"))
    theirs = torch.optim.AdamW(plain.parameters(), foreach=False, lr=0.01)
    model = OffloadModel(source, DEVICE, dtype=dtype, **{"num_slices": 3} | options)
    held = [each for each in model.parameters() if not frozen or not each.requires_grad]
    ours: Any
    if overlap == "torch":
        ours = torch.optim.AdamW(model.parameters(), foreach=False, lr=0.01)
    else:
        ours = OffloadOptimizer(model, torch.optim.AdamW, overlap=overlap, num_threads=1, lr=0.01)  # type: ignore[arg-type]
    cast = partial(torch.autocast, "sim", dtype) if dtype is not None else contextlib.nullcontext

    halved = [each for each in plain.parameters() if not frozen or not each.requires_grad] if writes else []
    losses = _train_plain(plain, theirs, cast, backwards=backwards, halved=halved)
    found = []
    for number in range(3):
        if evaluates:  # a forward whose loads no backward follows
            _evaluate(model, dtype)
        if fails and number == 1:
            with pytest.raises(ZeroDivisionError), broken(model):
                plain_step(model, ours, 77, dtype=dtype)
            ours.zero_grad()
        torch.manual_seed(number)
        loss = plain_step(model, ours, number, backwards=backwards, dtype=dtype)
        if frozen and writes:  # after backward, before anybody waits for the device
            _halve(held, writes, model)
        found.append(loss.cpu())
        if evaluates_late:
            _evaluate(model, dtype, with_graph=idles)
        ours.step()
        if writes and not frozen:
            _evaluate(model, None)
            _halve(held, writes, model)
    model.synchronize()
    torch.accelerator.synchronize()
    _compare([*found, *weights_of(model)], [*losses, *weights_of(plain)], overlap if dtype is None else "cast")


def _compare(found: list[Tensor], expected: list[Tensor], how: str) -> None:
    if how == "torch":
        assert_same(found, expected)
    elif how == "cast":
        # Autocast rounds elsewhere. What is early or late is poisoned memory, which is NaN.
        assert all(each.isfinite().all() for each in found)
    else:
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@contextlib.contextmanager
def broken(model: nn.Module) -> Iterator[None]:
    """Let the backward of the third layer raise."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    third = [each for each in model.modules() if isinstance(each, nn.GELU)][2]
    handle = third.register_full_backward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


def _evaluate(model: OffloadModel, dtype: torch.dtype | None, *, with_graph: bool = False) -> None:
    """Run a forward without a backward."""
    with torch.set_grad_enabled(with_graph):
        model(inputs_of(99, dtype or torch.float32))


def _train_plain(
    model: nn.Module, optimizer: Any, cast: Callable[[], Any], *, backwards: int, halved: Sequence[nn.Parameter]
) -> list[Tensor]:
    """Return the losses of the plain model."""
    losses = []
    for number in range(3):
        torch.manual_seed(number)
        with cast():
            losses.append(plain_step(model, optimizer, number, backwards=backwards).cpu())
        optimizer.step()
        _halve(halved, "in place", model)
    return losses


@torch.no_grad()
def _halve(parameters: Sequence[nn.Parameter], how: str, model: Any) -> None:
    """Write to weights in one of the ways in which users do."""
    if how == "in place, asked for":
        for _ in model.parameters():  # waits for whoever still reads or writes them
            break
    for parameter in parameters:
        parameter.mul_(0.5)


_GRAPH, _CHECKPOINTED = {"checkpoint_activation": False}, {"checkpoint_activation": True}
_ROWS: dict[str, dict[str, Any]] = {
    "graph, backward": {**_GRAPH, "overlap": "backward"},
    "checkpointed, backward": {**_CHECKPOINTED, "overlap": "backward"},
    "checkpointed, forward, evaluated between": {"evaluates": True},
    "checkpointed, forward, bfloat16": {"dtype": torch.bfloat16},
    "checkpointed, forward, two backwards": {"backwards": 2},
    "checkpointed, forward, evaluated before the step": {"evaluates_late": True},
    "checkpointed, forward, written in place, asked for": {"writes": "in place, asked for"},
    "checkpointed, torch, an exception": {"overlap": "torch", "fails": True},
    "checkpointed, torch, frozen and written": {"overlap": "torch", "writes": "in place", "frozen": 2},
    "checkpointed, torch, little host memory": {"overlap": "torch", "host_budget_bytes": 2048},
}
"""What the default suite runs: one for each place at which a copy or its user has to wait."""
_MORE: dict[str, dict[str, Any]] = {
    "checkpointed, backward, tied": {"overlap": "backward", "tied": True},
    "checkpointed, torch, written in place": {"overlap": "torch", "writes": "in place"},
    "graph, forward, a forward without a backward before the step": {**_GRAPH, "evaluates_late": True, "idles": True},
}
for _name, _options in (_ROWS | _MORE).items():
    _run = partial(offload_model, **{**_CHECKPOINTED, "overlap": "forward", **_options})
    add(f"OffloadModel, {_name}", _run, is_quick=_name in _ROWS)


def updated_model(**options: Any) -> tuple[OffloadModel, Any, list[Any]]:
    """Return a model and its optimizer right after a step, and what its threads still do."""
    model = OffloadModel(make_chain(), DEVICE, num_slices=3, checkpoint_activation=True, **options)
    ours: Any = OffloadOptimizer(model, torch.optim.AdamW, overlap="forward", num_threads=1, lr=0.01)
    torch.manual_seed(0)
    plain_step(model, ours, 0, dtype=options.get("dtype"))
    ours.step()
    return model, ours, pending(model)


def pending(model: OffloadModel) -> list[Any]:
    """Return what the optimizer's thread still does."""
    return [each for piece in model._engine.slices for each in piece.updates]


def _values(state: Any) -> list[Tensor]:
    return [each.detach().cpu().clone() for each in tree_flatten(state)[0] if isinstance(each, Tensor)]


_READS: dict[str, Callable[[OffloadModel, Any, list[nn.Parameter]], Any]] = {
    "its state dict": lambda model, _, __: model.state_dict(),
    "its parameters": lambda model, _, __: list(model.parameters()),
    "parameters that are held": lambda model, _, held: [model.synchronize(), held],  # type: ignore[func-returns-value]
    "the optimizer's state dict": lambda _, ours, __: ours.state_dict(),
}


def read_at_once(how: str) -> None:
    """Read something right after a step; threads still update it."""
    with slow_updates():
        model, ours, updates = updated_model()
        held = list(model._engine.parameters)
        found = _values(_READS[how](model, ours, held))
        for each in updates:
            each.result()
        assert_same(found, _values(_READS[how](model, ours, held)))


def loaded_at_once() -> None:
    """Load a state of the optimizer right after a step; threads still write it."""
    with slow_updates():
        model, ours, updates = updated_model()
        saved = copy.deepcopy(ours.state_dict())
        torch.manual_seed(1)
        plain_step(model, ours, 1)
        ours.step()
        updates = pending(model)
        ours.load_state_dict(saved)
        for each in updates:
            each.result()
        assert_same(_values(ours.state_dict()), _values(saved))


for _how in _READS:
    add(f"OffloadOptimizer, forward, {_how} read at once", partial(read_at_once, _how))
add("OffloadOptimizer, a state loaded at once", loaded_at_once)


class Blocks(nn.Module):
    """Checkpoints its blocks itself, as models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make_chain())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block.__call__, x, use_reentrant=True)
        return x


def checkpointed_around() -> None:
    """Train a model whose blocks are called under a checkpoint that makes no graph."""
    with torch.device("cpu"):
        plain, source = Blocks(), Blocks()
    found = []
    for model in (plain.to(DEVICE), OffloadModel(source, DEVICE, num_slices=3)):
        ours = torch.optim.AdamW(model.parameters(), foreach=False, lr=0.01)
        losses = []
        for number in range(3):
            torch.manual_seed(number)
            losses.append(plain_step(model, ours, number).cpu())
            ours.step()
        found.append([*losses, *weights_of(model)])
    assert_same(found[1], found[0])


add("OffloadModel, checkpoints around blocks", checkpointed_around, is_quick=True)


class Encoder(nn.Linear):
    """Sets a part of the loss, computed last, as variational autoencoders of tutorials do; may change its input."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        x = x.add_(self.bias) if self.in_place else x + self.bias
        self.divergence = super().forward(x.tanh()).square().mean()
        return x


class Autoencoder(nn.Sequential):
    """Returns a loss, to which it adds what its layers have set."""

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x).square().mean()
        return loss + sum(layer.divergence for layer in self if isinstance(layer, Encoder))


def losses_that_layers_set(*, is_checkpointed: bool) -> None:
    """Begin the backward of layers with other tensors than they return."""
    with torch.device("cpu"):
        torch.manual_seed(0)
        layers = [(nn.Linear(WIDTH, WIDTH), Encoder(in_place=not is_checkpointed)) for _ in range(3)]
        source = Autoencoder(*chain.from_iterable(layers))
    plain = copy.deepcopy(source).to(DEVICE)
    model = OffloadModel(source, DEVICE, num_slices=6, checkpoint_activation=is_checkpointed)
    found = []
    for each in (plain, model):
        each(inputs_of(0).to(DEVICE)).backward()
        found.append([weight.grad.cpu() for weight in each.parameters() if weight.grad is not None])
    assert_same(found[1], found[0])


for _checks in (False, True):
    _name = f"OffloadModel, losses that layers set{', checkpointed' * _checks}"
    add(_name, partial(losses_that_layers_set, is_checkpointed=_checks), is_quick=not _checks)


def penalised() -> None:
    """Refuse a backward that leads to weights on the host, where it runs in another thread: here, behind the slices."""
    model = OffloadModel(make_chain(), DEVICE, num_slices=3)
    penalty = torch.stack([each.abs().sum() for each in model.parameters()]).sum().to(DEVICE)
    with pytest.raises(UnsupportedError, match="directly, as with a penalty on weights"):
        (model(inputs_of(0)).square().mean() + penalty).backward()


add("OffloadModel, a penalty before the forward", penalised, is_quick=True)


def gone() -> None:
    """Let go of a model, whose memory is unpinned then."""
    for _ in range(2):
        updated_model()
        gc.collect()
        torch.accelerator.synchronize()  # raises what the device has to say of the memory


add("OffloadModel, gone", gone, is_quick=True)
