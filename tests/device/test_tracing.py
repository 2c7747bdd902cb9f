"""What only a GPU can show of partitioning, timing and random numbers: two ranks share the GPU, over gloo."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit.observe.events import ActionSpan, StepSpan, read_events
from smpkit.torch.core.runtime import state
from smpkit.torch.recording import recorder
from tests.device.device import CPU_ONLY, gpu, in_device_time, rng_state, sleep, synchronize, waits_of
from tests.device.ranks import run_on_gpu
from tests.ranks import run_ranks
from tests.torch import steps
from tests.torch.placement.test_trace import CASES, Checkpointed, Language, costs_of, tokens
from tests.torch.tensor_parallel import test_dropout as dropouts

SLEEP_SECONDS = 0.2


# --- partitioning----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_costs_on_the_gpu_are_those_on_the_cpu(case: str) -> None:
    make, argument = CASES[case]
    model, value = make(), argument().to(gpu())
    before = torch.get_rng_state(), rng_state()
    found = costs_of(model, value)
    assert all(map(torch.equal, before, (torch.get_rng_state(), rng_state())))
    assert found == costs_of(make(), argument())
    assert costs_of(make(), argument().to(gpu())) == found


def test_autocast_counts_half_the_bytes() -> None:
    model = Language()

    def body(x: Tensor) -> Tensor:
        with torch.autocast(gpu().type, dtype=torch.bfloat16):
            return model(x)

    half, full = costs_of(model, tokens().to(gpu()), body), costs_of(Language(), tokens())
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
        train_step(model, tokens())
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
    on_gpu = run_on_gpu(placed, *arguments, env={"PYTORCH_NVML_BASED_CUDA_CHECK": "1"})
    on_cpu = run_ranks(placed, 2, *arguments, env={**CPU_ONLY, "SMPKIT_CUDA_ON_CPU": "1"})
    assert (on_gpu[0][1], on_cpu[0][1]) == (gpu().type, "cpu")
    assert on_gpu[0][0] == on_cpu[0][0]
    assert on_gpu[0][2] == []


def test_the_tracing_pass_works_under_autocast() -> None:
    for _, _, warnings in run_on_gpu(placed, "Language", True, {}):
        assert warnings == []


# --- times-----------------------------------------------------------------------------------------------------------


class _Sleep(torch.autograd.Function):
    """Keeps the GPU busy in forward, and twice as long in backward; the host goes on at once."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, cycles: int) -> Tensor:
        ctx.cycles = cycles
        sleep(cycles)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        sleep(2 * ctx.cycles)
        return gradients[0], None


class Sleeper(nn.Module):
    def __init__(self, cycles: int) -> None:
        super().__init__()
        self.linear, self.cycles = nn.Linear(8, 8), cycles

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = _Sleep.apply(self.linear(x), self.cycles)
        return value.square().mean()


def cycles_of(seconds: float) -> int:
    """Return how many cycles the GPU sleeps in these seconds, measured."""
    start, end = torch.Event(gpu(), enable_timing=True), torch.Event(gpu(), enable_timing=True)
    sleep(1_000_000)
    start.record()
    sleep(50_000_000)
    end.record()
    synchronize()
    return round(50_000_000 * seconds / (start.elapsed_time(end) / 1e3))


@in_device_time()
def sleep_in_steps(folder: str) -> None:
    smp.init({"microbatches": 2})
    model = smp.DistributedModel(Sleeper(cycles_of(SLEEP_SECONDS)))
    for _ in range(2):
        train_step(model, torch.ones(4, 8))
    smp.shutdown()


def test_a_forward_takes_as_long_as_the_gpu_works_on_it(tmp_path: Path) -> None:
    run_on_gpu(sleep_in_steps, str(tmp_path), size=1, env={recorder.EVENTS_DIR: str(tmp_path)})
    events = read_events(tmp_path / "events_0.jsonl").events
    spans = [event for event in events if isinstance(event, ActionSpan) and event.step == 1]
    (whole,) = [event for event in events if isinstance(event, StepSpan) and event.number == 1]
    assert [span.kind for span in spans] == ["F", "B"] * 2
    for span in spans:
        expected = SLEEP_SECONDS * (1 if span.kind == "F" else 2)
        assert (span.end_ns - span.start_ns) / 1e9 == pytest.approx(expected, rel=0.1)
    assert whole.start_ns <= spans[0].start_ns
    assert spans[-1].end_ns <= whole.end_ns


# --- dropout between tensor-parallel ranks---------------------------------------------------------------------------


def forward_without_waits(in_step: bool) -> dict[str, int]:
    """Return how often torch warns of a wait for the GPU in a step without dropout, and in one with it."""
    found = {}
    for p in (0.0, 0.25):
        model = dropouts.wrapped(p, "smp", prescaled_batch=True)
        x = dropouts.batch(prescaled=True).to(gpu())
        step = steps.train_step if in_step else dropouts.plain_step
        for _ in range(2):
            step(model, x)
        found[str(p)] = len(waits_of(functools.partial(step, model, x), lambda _frames, what: what))
        smp.shutdown()
    return found


@pytest.mark.parametrize("in_step", [True, False])
def test_dropout_between_ranks_does_not_wait_for_the_gpu(in_step: bool) -> None:
    for found in run_on_gpu(forward_without_waits, in_step):
        assert found["0.25"] == found["0.0"]


@pytest.mark.parametrize("in_step", [True, False])
def test_masks_on_the_gpu_are_equal_on_equal_values_and_recomputation_repeats_them(in_step: bool) -> None:
    first, second = run_on_gpu(dropouts.masks, in_step, True, "speed", "")
    for name, ours in first["masks"].items():
        assert (ours == second["masks"][name]) is first["equal"][name], name
    for recompute in ("smp", "torch"):
        again = run_on_gpu(dropouts.masks, in_step, True, "speed", recompute)
        assert again[0]["masks"].keys() == first["masks"].keys()
        for name, values in again[0]["gradients"].items():
            assert torch.allclose(torch.tensor(values), torch.tensor(first["gradients"][name]), rtol=1e-4, atol=1e-5)
