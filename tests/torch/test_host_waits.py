"""How often a step makes the host wait for the device: exactly so often, and where nothing needs it, never."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import smpkit.torch as smp
from tests.host_waits import counted_waits, pretended_device
from tests.models import CASES, DROPOUT, WIDTH
from tests.ranks import run_ranks
from tests.train import KINDS, TrainingInSlices, batch, training

_WARM = 6  # steps; the second of a pipeline is measured, and those after it try another schedule

Counts = dict[str, int]

_WAITS: dict[str, list[Counts]] = {
    # Whether a gradient has overflowed decides whether the optimizer steps: the one read of fp16.
    "fp16": [{"read @ master_weights": 1}],
    # Those of the link that stands for a GPU's on a CPU: four boundaries of each microbatch.
    "activations offloaded": [{"copy to the host @ link": 8}],
    # Whether any replica has a gradient for what this one left out: one read for all buckets.
    "data, one parameter unused": [{"read @ reducer": 1}] * 2,
}
"""Of each kind of step and rank; what is not here never waits."""


def counts(name: str, on_host: bool) -> tuple[Counts, Counts]:
    """Return the waits and the queued copies of a step, with its optimizer's; its batch lies on the host or not."""
    case, way = KINDS[name]
    on_device = batch(case, _WARM, 8)
    with pretended_device(), counted_waits() as waits, training(case, way) as trained:
        for number in range(_WARM):
            trained.step(*(batch(case, number, 8) if on_host else on_device))
        on_host_now = batch(case, _WARM, 8)
        waits.clear()
        trained.step(*(on_host_now if on_host else on_device))
        return dict(waits.waits), dict(waits.queued)


@pytest.mark.parametrize(
    ("name", "on_host"), [*[(name, False) for name in KINDS], *[(name, True) for name in ("plain", "pipeline")]]
)
def test_a_step_waits_for_the_device_only_where_it_must(name: str, on_host: bool) -> None:
    ranks = KINDS[name][1].ranks
    found = run_ranks(counts, ranks, name, on_host)
    expected = _WAITS.get(name, [{}] * ranks)
    is_pipeline = KINDS[name][1].pipeline > 1
    if is_pipeline:
        # Other ranks need what the last one returns, and a batch that lies on the device of the first: a rank waits for
        # that to have been copied at the latest when it waits for another rank. (Each batch counts as such here.)
        expected = [{"wait @ transport": 1}] * 2
    assert [waits for waits, _ in found] == expected
    queued: list[Counts] = [{"copy to the device @ microbatches": 2} if on_host else {} for _ in range(ranks)]
    if is_pipeline:
        results = {"copy to the host @ messages": 1}, {"copy to the device @ output_broadcast": 1}
        inputs: Counts = {f"copy to the {'device' if on_host else 'host'} @ batch_broadcast": 2}
        queued = [{**inputs, **results[1]}, {"copy to the device @ batch_broadcast": 2, **results[0]}]
    assert [copies for _, copies in found] == queued


def clipped(name: str) -> Counts:
    """Return the waits of clipping by the norm of the whole model's gradient."""
    case, way = KINDS[name]
    x = batch(case, 0, 8)
    with pretended_device(), counted_waits() as waits, training(case, way) as trained:
        trained.step(*x)
        waits.clear()
        smp.clip_grad_norm_([parameter for _, parameter in trained.parameters()], 0.1)
        return dict(waits.waits)


@pytest.mark.parametrize("name", ["plain", "pipeline", "tensor"])
def test_clipping_does_not_wait_for_the_device(name: str) -> None:
    ranks = KINDS[name][1].ranks
    assert run_ranks(clipped, ranks, name) == [{}] * ranks


def sliced(checkpoint: bool) -> tuple[Counts, Counter[str]]:
    """Return the waits of an OffloadModel's forward and backward, and of its optimizer's step."""
    case = CASES["Sequential"]
    with pretended_device(), counted_waits() as waits:
        trained = TrainingInSlices(case, num_slices=4, checkpoint_activation=checkpoint)
        for number in range(3):
            trained.step(*batch(case, number, 8))
        x = torch.randn(8, WIDTH, dtype=torch.float64)
        waits.clear()
        trained.step(x, x)
        return dict(waits.waits), waits.queued


@pytest.mark.parametrize("checkpoint", [False, True])
def test_an_offload_model_s_pass_does_not_wait_for_the_device(checkpoint: bool) -> None:
    assert run_ranks(sliced, 1, checkpoint) == [({}, Counter())]


def asks_for_a_value() -> Counts:
    """Return what is counted, by kind, of a step that does what a step should not."""
    x, _ = batch(DROPOUT, 0, 8)
    with pretended_device(), counted_waits() as waits, training(*KINDS["plain"]):

        @smp.step
        def step(model: Any, x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = model(x).square().mean()
            assert loss.item() >= 0
            assert loss > -1
            loss.cpu()
            loss.detach().tolist()
            torch.tensor([1.0], device=x.device)
            torch.zeros(3, device="cpu").copy_(x[0, :3].detach())
            torch.zeros(3, device="cpu").sum().item()
            torch.cuda.synchronize()
            model.backward(loss)
            return loss

        step(smp.state.model, x)
        kinds: Counter[str] = Counter()
        for what, count in waits.waits.items():
            kinds[what.partition(" @ ")[0]] += count
        return dict(kinds)


def test_all_kinds_of_waits_are_counted() -> None:
    (found,) = run_ranks(asks_for_a_value, 1)
    assert found == {"read": 6, "copy to the host": 4, "copy to the device": 2, "wait": 2}  # twice, in two microbatches
