"""What only a GPU can show of partitioning; two ranks share the GPU, over gloo."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

import smpkit.torch as smp
from smpkit.torch.core.runtime import state
from tests.device.device import CPU_ONLY, gpu
from tests.device.ranks import run_on_gpu
from tests.ranks import run_ranks
from tests.torch.placement.test_trace import CASES, TOKENS, Checkpointed, Language, costs_of


@pytest.mark.parametrize("case", CASES)
def test_costs_on_the_gpu_are_those_on_the_cpu(case: str) -> None:
    make, argument = CASES[case]
    model, value = make(), argument.to(gpu())
    generators = (torch, torch.get_device_module(gpu()))
    before = [each.get_rng_state() for each in generators]
    found = costs_of(model, value)
    assert all(map(torch.equal, before, [each.get_rng_state() for each in generators]))
    assert found == costs_of(make(), argument)
    assert costs_of(make(), argument.to(gpu())) == found


def test_autocast_counts_half_the_bytes() -> None:
    model = Language()

    def body(x: Tensor) -> Tensor:
        with torch.autocast(gpu().type, dtype=torch.bfloat16):
            return model(x)

    half, full = costs_of(model, TOKENS.to(gpu()), body), costs_of(Language(), TOKENS)
    assert half[1].flops == full[1].flops
    assert half[1].activation_bytes < full[1].activation_bytes


@smp.step
def train_step(model: Any, x: Tensor) -> Tensor:
    loss = model(x)
    model.backward(loss)
    return loss.detach()


def placed(kind: str, half: bool, options: dict[str, Any]) -> tuple[str, str, list[str]]:
    """Return where units lie, the device, and what was said at the level of a warning or above."""
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("smpkit").addHandler(handler)
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True, **options})
    torch.manual_seed(0)
    model = smp.DistributedModel({"Language": Language, "Checkpointed": Checkpointed}[kind]())
    with torch.autocast(state.device.type, torch.bfloat16, enabled=half):
        train_step(model, TOKENS)
    assert model.pipeline is not None
    assert model.pipeline.assignment is not None
    warnings = [each for each in records if "traced" in each or "tracing" in each]
    return model.pipeline.assignment.to_json(), state.device.type, warnings


@pytest.mark.parametrize(
    ("kind", "options"),
    [("Language", {}), ("Language", {"memory_weight": 1.0, "optimize": "memory"}), ("Checkpointed", {})],
    ids=["language", "for memory", "checkpointed"],
)
def test_a_pipeline_on_the_gpu_is_cut_as_one_on_the_cpu(kind: str, options: dict[str, Any]) -> None:
    arguments = (kind, False, options)
    on_gpu = run_on_gpu(placed, *arguments)
    on_cpu = run_ranks(placed, 2, *arguments, env={**CPU_ONLY, "SMPKIT_CUDA_ON_CPU": "1"})
    assert (on_gpu[0][1], on_cpu[0][1]) == (gpu().type, "cpu")
    assert on_gpu[0][0] == on_cpu[0][0]
    assert on_gpu[0][2] == []


def test_the_tracing_pass_works_under_autocast() -> None:
    for _, _, warnings in run_on_gpu(placed, "Language", True, {}):
        assert warnings == []
