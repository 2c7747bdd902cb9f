"""What takes the place of torch's own checkpoint does all that torch's does.

That its inputs leave, and that models train, is in `tests/transparency/test_checkpointed_layers.py`.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from smpkit.errors import UsageError
from smpkit.torch.recompute.torch_checkpoint import _module_and_name, patch_torch_checkpoint

pytestmark = pytest.mark.usefixtures("patched")
WIDTH, BATCH = 8, 4


@pytest.fixture
def patched() -> None:
    patch_torch_checkpoint()


class Earlier(torch_checkpoint.CheckpointFunction):
    """Somebody else's reentrant checkpoint, perhaps of before ours took the place of torch's."""


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


@pytest.mark.parametrize(
    ("check", "error", "message"),
    [
        ("default", UsageError, "it computed something else"),
        ("none", RuntimeError, "size of tensor"),  # torch's own, where the shapes meet
        ("all", ValueError, "determinism_check should be one of"),
    ],
)
def test_other_shapes_are_an_error_unless_nobody_shall_compare(
    check: str, error: type[Exception], message: str
) -> None:
    rows, x = iter([BATCH, BATCH - 1]), torch.randn(BATCH, WIDTH, requires_grad=True)
    with pytest.raises(error, match=message):
        checkpoint(lambda x: x[: next(rows)].sin(), x, use_reentrant=False, determinism_check=check).sum().backward()


def test_debug_says_that_it_does_nothing() -> None:
    with pytest.warns(UserWarning, match=r"debug=True of torch.utils.checkpoint has no effect"):
        checkpoint(torch.sin, torch.randn(BATCH, requires_grad=True), use_reentrant=False, debug=True).sum().backward()


def in_segments(layers: nn.Sequential, x: Tensor) -> Tensor:
    return checkpoint_sequential(layers, 2, x, use_reentrant=False)


def in_a_closure(layers: nn.Sequential, x: Tensor) -> Tensor:
    """As torchvision's DenseNet and the ResNets of OpenMMLab do."""

    def closure(x: Tensor) -> Tensor:
        return layers(x)

    return checkpoint(closure, x, use_reentrant=True)


def with_a_default(layers: nn.Sequential, x: Tensor) -> Tensor:
    return checkpoint(lambda x, layers=layers: layers(x), x, use_reentrant=False)


@pytest.mark.parametrize("call", [in_segments, in_a_closure, with_a_default])
def test_norms_that_a_function_calls_count_a_batch_once(call: Any) -> None:
    found = []
    for run in (nn.Sequential.__call__, call):
        torch.manual_seed(0)
        layers = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(3)])
        for _ in range(2):
            run(layers, torch.randn(BATCH, WIDTH, requires_grad=True)).square().sum().backward()
        found.append([*layers.buffers(), *[each.grad for each in layers.parameters()]])
    assert all(map(torch.equal, *found))


LAYER = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (LAYER, "Linear"),
        (LAYER.forward, "Linear"),
        (functools.partial(LAYER.forward, torch.ones(2)), "Linear"),
        (functools.partial(functools.partial(nn.Linear.forward, LAYER), x=None), "Linear"),
        (patch_torch_checkpoint, "patch_torch_checkpoint"),
    ],
)
def test_names_tell_the_module_that_is_called(function: Any, name: str) -> None:
    assert _module_and_name(function)[1] == name
