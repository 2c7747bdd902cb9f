"""torch.compile: what is traced, and that it changes nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from smpkit import OffloadModel, OffloadOptimizer
from tests.models import Does

CPU = torch.device("cpu")


class Traced:
    """A backend of torch.compile that runs what it is given, and keeps what that calls."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __call__(self, graph: fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
        self.called += [str(node.target) for node in graph.graph.nodes if node.op.startswith("call")]
        return graph.forward


def dropping(own: Any, value: Tensor) -> Tensor:
    return own.dropout(own.linear(value)).tanh()


def make_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Does(dropping, linear=nn.Linear(6, 6), dropout=nn.Dropout(0.2)) for _ in range(4)])


def train(network: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = network(torch.randn(5, 6)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(network(torch.randn(5, 6)).sum().item())
    return losses


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("ours", [False, True], ids=["torch", "ours"])
def test_a_compiled_model_runs_untraced(checkpoint: bool, ours: bool) -> None:
    torch._dynamo.reset()
    found = []
    traced = Traced()
    for compiled in (False, True):
        model = OffloadModel(make_layers(), CPU, CPU, 3, checkpoint, 2)
        optimizer = OffloadOptimizer(model, lr=0.1) if ours else torch.optim.AdamW(model.parameters(), lr=0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of what torch.compile cannot trace
            found.append(train(torch.compile(model, backend=traced) if compiled else model, optimizer))
    assert found[0] == found[1]
    assert not traced.called


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile's own, which it hides from others
@pytest.mark.usefixtures("place")
def test_compiled_layers_are_traced(checkpoint: bool) -> None:
    torch._dynamo.reset()
    plain, layers, traced = make_layers(), make_layers(), Traced()
    for layer in layers:
        layer.compile(backend=traced)
    model = OffloadModel(layers, CPU, CPU, 3, checkpoint, 1)
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=0.1))
    assert train(model, torch.optim.AdamW(model.parameters(), lr=0.1)) == expected
    assert {name.strip("<>").split(" at ")[0].split()[-1] for name in traced.called} == {"linear", "dropout", "tanh"}


@pytest.mark.usefixtures("place")
def test_what_runs_around_a_compiled_layer_is_not_traced() -> None:
    """torch.compile leaves a Sequential's own code alone, but not the Python that is called from there."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])
    for layer in layers:
        layer.compile(backend=Traced())
    model = OffloadModel(layers, CPU)
    model(torch.randn(5, 6)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not torch._dynamo.utils.counters["frames"]
