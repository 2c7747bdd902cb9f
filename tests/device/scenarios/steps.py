"""Steps of SMP v1's API, `smpkit.fit`, checkpoints in the background: each on one simulated device."""

from __future__ import annotations

import contextlib
import copy
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

import smpkit.torch as smp
from smpkit.torch.checkpoints import save as saving
from smpkit.torch.memory import Fitted, fit
from smpkit.torch.offload import link
from tests.device.scenarios.activations import make, train_step
from tests.device.scenarios.common import WIDTH, add, assert_same, rows
from tests.torch.steps import train_step as smp_step


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
def broken(model: nn.Module, kind: type[nn.Module]) -> Iterator[None]:
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
            with (
                pytest.raises(ZeroDivisionError),
                broken(module, Small) if fails == "backward" else contextlib.nullcontext(),
            ):
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
    with mock.patch.object(link.AcceleratorLink, "min_bytes", 0):
        ours = plain | {"offload_activations": True, "activation_loading_horizon": horizon}
        found = smp_train(ours, strategy, dropout, nested=nested, fails=fails)
    assert_same(found, expected)


for _strategy in ("each", "group_2", "contiguous"):
    add(f"step, {_strategy}", partial(smp_offloaded, _strategy), is_quick=_strategy == "group_2")
    add(f"step, {_strategy}, dropout", partial(smp_offloaded, _strategy, dropout=0.3))
for _horizon in (1, 2, "auto"):
    add(f"step, horizon {_horizon}", partial(smp_offloaded, horizon=_horizon))
add("step, nested", partial(smp_offloaded, nested=True))
add("step, an exception", partial(smp_offloaded, fails="forward"))
add("step, an exception in backward", partial(smp_offloaded, fails="backward"), is_quick=True)
add("step, 4 microbatches, dropout", partial(smp_offloaded, microbatches=4, dropout=0.3))


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
        for _ in range(9):
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


add("fit, most recomputed", partial(fitted, 0.8), is_quick=True)
add("fit, most kept", partial(fitted, 0.95))


def saved_in_the_background() -> None:
    """Write copies of the weights while training goes on, twice; the second save takes the memory of the first."""
    write = saving._write_files

    def write_later(*args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.3)
        return write(*args)

    def train(number: int) -> None:
        optimizer.zero_grad()
        smp_step(model, rows(number))
        optimizer.step()

    def read(folder: Path) -> list[Tensor]:
        found = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
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


add("saved in the background", saved_in_the_background, is_quick=True)
