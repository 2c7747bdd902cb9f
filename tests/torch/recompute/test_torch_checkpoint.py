"""Torch's own checkpoint in a model that offloads: its inputs leave as those of `smp.checkpoint` do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import smpkit.torch as smp
from smpkit.errors import UsageError
from smpkit.torch.recompute.torch_checkpoint import _name_of, patch_torch_checkpoint
from tests.ranks import run_ranks

WIDTH, BATCH, LAYERS = 8, 4, 6


class Model(nn.Module):
    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)) for _ in range(LAYERS))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.call(layer, x).relu()
        return x


def plainly(layer: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = layer(x)
    return y


def theirs(layer: nn.Module, x: Tensor, *, use_reentrant: bool = False) -> Any:
    return checkpoint(layer, x, use_reentrant=use_reentrant)


def nested(layer: nn.Module, x: Tensor) -> Any:
    return checkpoint(lambda y: theirs(layer, y), x, use_reentrant=False)


@smp.step
def train_step(model: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def train(call: Callable[..., Tensor], config: dict[str, Any]) -> tuple[float, list[Tensor | None], Any]:
    smp.init(config)
    model = smp.DistributedModel(Model(call))
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(5), requires_grad=True)
    for _ in range(3):
        model.zero_grad()
        loss = train_step(model, x).reduce_mean().item()
    gradients = [parameter.grad for _, parameter in model.local_named_parameters()]
    report = smp.offload_report() if config.get("offload_activations") else None
    smp.shutdown()
    return loss, gradients, report


OFFLOADING = {"offload_activations": True, "microbatches": 2}


@pytest.mark.parametrize("call", [theirs, functools.partial(theirs, use_reentrant=True), nested])
def test_inputs_leave_once_each_and_no_bit_changes(world: None, call: Callable[..., Tensor]) -> None:
    loss, gradients, _ = train(plainly, {"microbatches": 2})
    found, ours, report = train(call, OFFLOADING)
    assert found == loss
    assert all(torch.equal(left, right) for left, right in zip(ours, gradients, strict=True))  # type: ignore[arg-type]
    boundary_bytes = 4 * WIDTH * BATCH // 2
    # The first layer's input is half of the batch, which requires a gradient here: all of its memory leaves.
    assert [step.bytes_out for step in report.steps] == [2 * (LAYERS - 1 + 2) * boundary_bytes] * 3
    assert report.bytes_back > 0
    assert report.peak_device_bytes < LAYERS * boundary_bytes


def train_over_ranks(call: Callable[..., Tensor]) -> list[int]:
    _, _, report = train(call, {**OFFLOADING, "pipeline_parallel_degree": 2, "activation_loading_horizon": 1})
    return [step.bytes_out for step in report.steps]


@pytest.mark.parametrize("call", [theirs, functools.partial(theirs, use_reentrant=True), nested])
def test_around_calls_that_the_pipeline_places_inputs_leave_too(call: Callable[..., Tensor]) -> None:
    expected = run_ranks(train_over_ranks, 2, smp.checkpoint)
    assert sum(expected[0]) > 0
    assert run_ranks(train_over_ranks, 2, call) == expected


@pytest.fixture
def patched() -> None:
    patch_torch_checkpoint()


class Earlier(torch_checkpoint.CheckpointFunction):
    """Somebody else's reentrant checkpoint, perhaps of before ours took the place of torch's."""


@pytest.mark.usefixtures("patched")
def test_classes_that_derive_from_torchs_reentrant_checkpoint_work() -> None:
    class Later(torch_checkpoint.CheckpointFunction):
        pass

    x, layer = torch.randn(BATCH, WIDTH, requires_grad=True), nn.Linear(WIDTH, WIDTH)
    gradients = list[Any]()
    for apply in (Earlier.apply, Later.apply, torch_checkpoint.CheckpointFunction.apply, lambda _, __, x: layer(x)):
        x.grad = None
        apply(layer, True, x).square().sum().backward()
        gradients.append(x.grad)
    assert all(torch.equal(gradient, gradients[-1]) for gradient in gradients)
    assert callable(torch_checkpoint.CheckpointFunction.forward)


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize(("argument", "setting", "ends"), [(True, None, 1), (False, None, 2), (True, False, 2)])
def test_a_recomputation_ends_early_unless_it_shall_not(argument: bool, setting: bool | None, ends: int) -> None:
    runs = list[bool]()

    def run(x: Tensor) -> Tensor:
        y = x.sin()
        runs.append(True)
        return y

    with torch_checkpoint.set_checkpoint_early_stop(setting):  # type: ignore[arg-type] # None is its default
        y = checkpoint(run, torch.randn(BATCH, requires_grad=True), use_reentrant=False, early_stop=argument)
    y.sum().backward()
    assert len(runs) == ends


@pytest.mark.usefixtures("patched")
def test_other_shapes_are_an_error_unless_nobody_shall_compare() -> None:
    def train(check: str) -> None:
        rows, x = iter([BATCH, BATCH - 1]), torch.randn(BATCH, WIDTH, requires_grad=True)
        y = checkpoint(lambda x: x[: next(rows)].sin(), x, use_reentrant=False, determinism_check=check)
        y.sum().backward()

    with pytest.raises(UsageError, match="it computed something else"):
        train("default")
    with pytest.raises(RuntimeError, match="size of tensor"):  # torch's own, where the shapes meet
        train("none")
    with pytest.raises(ValueError, match="determinism_check should be one of"):
        train("all")


@pytest.mark.usefixtures("patched")
def test_debug_says_that_it_does_nothing() -> None:
    with pytest.warns(UserWarning, match=r"debug=True of torch.utils.checkpoint has no effect"):
        checkpoint(torch.sin, torch.randn(BATCH, requires_grad=True), use_reentrant=False, debug=True).sum().backward()


def test_names_tell_the_module_that_is_called() -> None:
    layer = nn.Linear(2, 2)
    assert _name_of(layer) == "Linear"
    assert _name_of(layer.forward) == "Linear"
    assert _name_of(functools.partial(layer.forward, torch.ones(2))) == "Linear"
    assert _name_of(functools.partial(nn.Linear.forward, layer)) == "Linear"
    assert _name_of(functools.partial(functools.partial(nn.Linear.forward, layer), x=None)) == "Linear"
    assert _name_of(plainly) == "plainly"
