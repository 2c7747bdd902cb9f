"""`offload_activations: true` under the SMP v1 API, on one rank and over pipelines."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit.errors import UsageError
from smpkit.torch.pipeline.message_order import P2PTransfer
from smpkit.torch.pipeline.transport import Transport
from tests.ranks import run_ranks

WIDTH, BATCH = 16, 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dropout(torch.nn.functional.gelu(self.linear(x)))
        return y


class Model(nn.Module):
    def __init__(self, num_layers: int = 6) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@smp.step
def train_step(model: smp.DistributedModel, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def train(
    config: dict[str, Any], *, checkpoints: bool = True, steps: int = 3
) -> tuple[list[float], list[Tensor], smp.StepOutput | None]:
    """Train, and return losses, gradients of the parameters that this rank holds, and the report."""
    smp.init(config)
    model = smp.DistributedModel(Model())
    if checkpoints:
        for layer in model.get_module().layers:  # type: ignore[union-attr]
            smp.set_activation_checkpointing(layer)
    torch.manual_seed(5)
    x = torch.randn(BATCH, WIDTH)
    losses = []
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = None
        losses.append(train_step(model, x).reduce_mean().item())
    found = [parameter.grad for _, parameter in model.local_named_parameters()]
    gradients = [grad.clone() for grad in found if grad is not None]
    report = smp.offload_report() if config.get("offload_activations") else None
    smp.shutdown()
    return losses, gradients, report  # type: ignore[return-value]


def config_of(degree: int, microbatches: int, horizon: Any) -> dict[str, Any]:
    return {
        "pipeline_parallel_degree": degree,
        "microbatches": microbatches,
        "offload_activations": True,
        "activation_loading_horizon": horizon,
    }


def compare(degree: int, grid: list[tuple[int, Any]]) -> list[Any]:
    """Train with and without offloading; return the last report and the engine's threads that are left."""
    for microbatches, horizon in grid:
        config = config_of(degree, microbatches, horizon)
        plain = train({key: value for key, value in config.items() if "activation" not in key})
        ours = train(config)
        assert ours[0] == plain[0]
        assert all(torch.equal(left, right) for left, right in zip(ours[1], plain[1], strict=True))
    return [ours[2], [thread.name for thread in threading.enumerate() if thread.name.startswith("offload")]]


@pytest.mark.parametrize("debug", ["0", "1"])
@pytest.mark.parametrize("degree", [1, 2])
def test_offloading_changes_no_bit(degree: int, debug: str) -> None:
    grid: list[tuple[int, Any]] = [(1, "auto"), (4, 2)]
    for report, threads in run_ranks(compare, degree, degree, grid, timeout=150, env={"SMPKIT_OFFLOAD_DEBUG": debug}):
        assert report.num_steps == 3
        boundary_bytes = 4 * WIDTH * BATCH // 4
        assert all(step.bytes_out <= 4 * 6 // degree * boundary_bytes for step in report.steps)
        assert report.steps[-1].bytes_out >= 4 * (6 // degree - 2) * boundary_bytes
        assert report.bytes_back > 0
        assert threads == []


def test_the_report_tells_of_one_boundary_per_layer(world: None) -> None:
    report = train({"offload_activations": True, "microbatches": 2})[2]
    boundary_bytes = 4 * WIDTH * BATCH // 2
    assert [step.bytes_out for step in report.steps] == [2 * 6 * boundary_bytes] * 3  # type: ignore[union-attr]
    assert report.peak_device_bytes <= 3 * boundary_bytes  # type: ignore[union-attr]
    assert "3 steps" in str(report)


def test_without_checkpointed_layers_it_says_so_once(world: None) -> None:
    with pytest.warns(UserWarning, match=r"offload_activations has no effect: no layer is checkpointed") as caught:
        train({"offload_activations": True}, checkpoints=False)
    assert len(caught) == 1


def no_effect(degree: int, checkpoints: bool) -> list[str]:
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(config_of(degree, 2, 4), checkpoints=checkpoints)
    return [str(warning.message) for warning in caught if "no effect" in str(warning.message)]


def test_over_a_pipeline_one_rank_says_so() -> None:
    assert [len(said) for said in run_ranks(no_effect, 2, 2, False)] == [1, 0]
    assert run_ranks(no_effect, 2, 2, True) == [[], []]


def test_a_report_needs_offloading(world: None) -> None:
    smp.init({})
    smp.DistributedModel(Model())
    with pytest.raises(UsageError, match="nothing is offloaded here"):
        smp.offload_report()


def test_an_exception_in_a_step_leaves_nothing_and_training_goes_on(world: None) -> None:
    smp.init({"offload_activations": True, "microbatches": 2})
    model = smp.DistributedModel(Model())
    for layer in model.get_module().layers:  # type: ignore[union-attr]
        smp.set_activation_checkpointing(layer)

    @smp.step
    def fails(model: smp.DistributedModel, x: Tensor) -> None:
        model(x)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails(model, torch.randn(BATCH, WIDTH))
    train_step(model, torch.randn(BATCH, WIDTH))
    engine = model.offloading._engine  # type: ignore[union-attr]
    assert engine.arena.num_blocks == 0
    assert engine.stats.report().num_steps == 1


def test_events_tell_what_moved(world: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMPKIT_EVENTS_DIR", str(tmp_path))
    report = train({"offload_activations": True, "microbatches": 2}, steps=1)[2]
    events = [json.loads(line) for line in (tmp_path / "events_0.jsonl").read_text().splitlines()]
    counters = {event["name"]: event["value"] for event in events if event["type"] == "counter"}
    assert counters["offload out, bytes"] == report.bytes_out  # type: ignore[union-attr]
    assert counters["offload back, bytes"] == report.bytes_back  # type: ignore[union-attr]


def segments(microbatches: int, pipeline: str) -> list[int]:
    """Return how often host memory was taken before ranks were connected, and after each of four steps."""
    # Without a limit a schedule by measured times may hold one microbatch more; memory for it is taken before it runs.
    smp.init(config_of(2, microbatches, "auto") | {"pipeline": pipeline, "active_microbatches": 2})
    counts = list[int]()
    connect = Transport.connect

    def counted(transport: Transport, transfers: Iterable[P2PTransfer]) -> None:
        counts.append(model.offloading._engine.arena.num_slabs)  # type: ignore[union-attr]
        connect(transport, transfers)

    model = smp.DistributedModel(Model())
    for layer in model.get_module().layers:  # type: ignore[union-attr]
        smp.set_activation_checkpointing(layer)
    with mock.patch.object(Transport, "connect", counted):
        for _ in range(4):
            train_step(model, torch.randn(512 * BATCH, WIDTH))  # each boundary takes several pages
            counts.append(model.offloading._engine.arena.num_slabs)  # type: ignore[union-attr]
    smp.shutdown()
    return counts


@pytest.mark.parametrize("pipeline", ["simple", "interleaved"])
def test_host_memory_for_all_microbatches_is_there_before_ranks_are_connected(pipeline: str) -> None:
    """To pin it in the middle of a step can wait for the device, and two ranks then for each other."""
    for connected, *steps in run_ranks(segments, 2, 8, pipeline, timeout=150):
        assert connected > 0
        assert steps == [connected] * 4


def test_another_default_device_is_none_of_the_hosts_business(world: None) -> None:
    smp.init({"offload_activations": True, "microbatches": 2})
    model = smp.DistributedModel(Model())
    for layer in model.get_module().layers:  # type: ignore[union-attr]
        smp.set_activation_checkpointing(layer)
    x = torch.randn(BATCH, WIDTH)
    with torch.device("meta"):
        for _ in range(2):
            train_step(model, x)
    assert smp.offload_report().bytes_back > 0
