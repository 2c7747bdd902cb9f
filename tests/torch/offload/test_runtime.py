"""`offload_activations: true` under the SMP v1 API, on one rank and over pipelines."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit.errors import UsageError
from smpkit.torch.core import offloader
from smpkit.torch.offload import arena as arenas
from smpkit.torch.offload import engine as engines
from smpkit.torch.pipeline.message_order import P2PTransfer
from smpkit.torch.pipeline.transport import Transport
from tests.ranks import run_ranks
from tests.torch.offload.chains import BATCH, BOUNDARY_BYTES, WIDTH, assert_same, slow

LAYERS = 6
OFFLOADED = {"offload_activations": True, "microbatches": 2}


def wrap(config: dict[str, Any], *, checkpoints: bool = True) -> smp.DistributedModel:
    smp.init(config)
    torch.manual_seed(4)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(LAYERS)]
    model = smp.DistributedModel(nn.Sequential(*layers))
    if checkpoints:
        smp.set_activation_checkpointing(model.get_module())
    return model


@smp.step
def train_step(model: smp.DistributedModel, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def train(config: dict[str, Any], *, checkpoints: bool = True, steps: int = 3) -> tuple[list[Any], Any]:
    """Return losses and this rank's last gradients, and the report."""
    model = wrap(config, checkpoints=checkpoints)
    torch.manual_seed(5)
    x, losses = torch.randn(BATCH, WIDTH), []
    for _ in range(steps):
        model.zero_grad()
        losses.append(train_step(model, x).reduce_mean())
    gradients = [parameter.grad for _, parameter in model.local_named_parameters()]
    report = smp.offload_report() if config.get("offload_activations") else None
    smp.shutdown()
    assert offloader.current() is offloader.KEEPING
    return [*losses, *gradients], report


def compare(degree: int) -> list[Any]:
    reports = []
    for microbatches, horizon in ((1, "auto"), (4, 2)):
        config = {"pipeline_parallel_degree": degree, "microbatches": microbatches}
        offloaded = {"offload_activations": True, "activation_loading_horizon": horizon}
        plain, (ours, report) = train(config)[0], train(config | offloaded)
        assert_same(ours, plain)
        reports.append(report)
    return reports


@pytest.mark.parametrize("degree", [1, 2])
def test_offloading_changes_no_bit_and_the_report_tells_of_one_boundary_per_layer(degree: int) -> None:
    for whole, parts in run_ranks(compare, degree, degree, timeout=150):
        assert (whole.num_steps, parts.num_steps) == (3, 3)
        assert "3 steps" in str(parts)
        # The first layer's input is a part of the batch, which is there anyway, where there are microbatches.
        assert all(step.bytes_out <= LAYERS // degree * BOUNDARY_BYTES for step in (*whole.steps, *parts.steps))
        assert parts.steps[-1].bytes_out >= (LAYERS // degree - 2) * BOUNDARY_BYTES
        assert parts.bytes_back > 0
        assert parts.peak_device_bytes < parts.peak_host_bytes


def no_effect(degree: int, checkpoints: bool) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(OFFLOADED | {"pipeline_parallel_degree": degree}, checkpoints=checkpoints)
    return [str(warning.message) for warning in caught if "no effect" in str(warning.message)]


def test_a_report_needs_offloading_and_offloading_checkpointed_layers(world: None) -> None:
    wrap({})
    with pytest.raises(UsageError, match="nothing is offloaded here"):
        smp.offload_report()
    (message,), nothing = run_ranks(no_effect, 2, 2, False)
    assert message.startswith("offload_activations has no effect: no layer is checkpointed")
    assert nothing == []
    assert run_ranks(no_effect, 2, 2, True) == [[], []]


def test_events_tell_what_moved_and_how_long_layers_waited(
    world: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMPKIT_EVENTS_DIR", str(tmp_path))
    monkeypatch.setattr(engines, "link_for", lambda *_: slow())
    report = train(OFFLOADED, steps=2)[1]
    events = [json.loads(line) for line in (tmp_path / "events_0.jsonl").read_text().splitlines()]
    totals = dict[str, int]()
    for event in events:
        if event["type"] == "counter":
            totals[event["name"]] = totals.get(event["name"], 0) + event["value"]
    assert totals["offload out, bytes"] == report.bytes_out
    assert totals["offload back, bytes"] == report.bytes_back
    stalls = [stall for step in report.steps for stall in step.stalls]
    assert stalls
    assert {name for name in totals if "stall" in name} == {f"offload stall of {each.layer}, ns" for each in stalls}
    waits = {event["name"] for event in events if "wait for the activation of" in event.get("name", "")}
    assert waits == {f"wait for the activation of `{each.layer}` (microbatch {each.microbatch})" for each in stalls}


def mapped(microbatches: int, pipeline: str) -> list[int]:
    """Return how much host memory was there before ranks were connected, and after each of four steps."""
    # Without a limit a schedule by measured times may hold one microbatch more; memory for it is taken before it runs.
    config = {"pipeline_parallel_degree": 2, "pipeline": pipeline, "active_microbatches": 2}
    counts, connect = list[int](), Transport.connect

    def counted(transport: Transport, transfers: Iterable[P2PTransfer]) -> None:
        counts.append(offloader.current().use().mapped)
        connect(transport, transfers)

    with mock.patch.object(Transport, "connect", counted), mock.patch.object(arenas, "_SLAB", 4096):
        model = wrap(OFFLOADED | config | {"microbatches": microbatches})
        for _ in range(4):
            train_step(model, torch.randn(512 * BATCH, WIDTH))  # each boundary takes several pages
            counts.append(offloader.current().use().mapped)
    smp.shutdown()
    return counts


@pytest.mark.parametrize("pipeline", ["simple", "interleaved"])
def test_host_memory_for_all_microbatches_is_there_before_ranks_are_connected(pipeline: str) -> None:
    """To pin it in the middle of a step can wait for the device, and two ranks then for each other."""
    first, last = run_ranks(mapped, 2, 8, pipeline, timeout=150)
    assert first == [0] * 5  # its only input is a slice of the batch, which stays
    assert last[0] > 0
    assert last == last[:1] * 5
