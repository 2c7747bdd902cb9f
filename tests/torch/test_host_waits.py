"""How often a step makes the host wait for the device: exactly so often, and where nothing needs it, never."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import smpkit.torch as smp
from tests.host_waits import counted_waits, pretended_device
from tests.ranks import run_ranks
from tests.torch.small_steps import KINDS, batch, begin, begin_offload_model

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
    on_device = batch(_WARM)
    with pretended_device(), counted_waits() as waits, begin(KINDS[name]) as trained:
        for number in range(_WARM):
            trained.step(batch(number) if on_host else on_device)
        waits.clear()
        trained.step(batch(_WARM) if on_host else on_device)
        return dict(waits.waits), dict(waits.queued)


@pytest.mark.parametrize("on_host", [False, True], ids=["batch on the device", "batch on the host"])
@pytest.mark.parametrize("name", KINDS)
def test_a_step_waits_for_the_device_only_where_it_must(name: str, on_host: bool) -> None:
    ranks = KINDS[name].ranks
    found = run_ranks(counts, ranks, name, on_host)
    expected = _WAITS.get(name, [{}] * ranks)
    if "pipeline_parallel_degree" in KINDS[name].config:
        # Other ranks need what the last one returns, and a batch that lies on the device of the first: a rank waits for
        # that to have been copied at the latest when it waits for another rank. (Each batch counts as such here.)
        expected = [{"wait @ transport": 1}] * 2
    assert [waits for waits, _ in found] == expected
    queued: list[Counts] = [{"copy to the device @ microbatches": 1} if on_host else {} for _ in range(ranks)]
    if "pipeline_parallel_degree" in KINDS[name].config:
        results = {"copy to the host @ messages": 1}, {"copy to the device @ output_broadcast": 1}
        inputs: Counts = {f"copy to the {'device' if on_host else 'host'} @ batch_broadcast": 1}
        queued = [{**inputs, **results[1]}, {"copy to the device @ batch_broadcast": 1, **results[0]}]
    assert [copies for _, copies in found] == queued


def clipped(name: str) -> Counts:
    """Return the waits of clipping by the norm of the whole model's gradient."""
    x = batch(0)
    with pretended_device(), counted_waits() as waits, begin(KINDS[name]) as trained:
        trained.step(x)
        waits.clear()
        smp.clip_grad_norm_([parameter for _, parameter in trained.parameters()], 0.1)
        return dict(waits.waits)


@pytest.mark.parametrize("name", ["plain", "pipeline", "tensor"])
def test_clipping_does_not_wait_for_the_device(name: str) -> None:
    assert run_ranks(clipped, KINDS[name].ranks, name) == [{}] * KINDS[name].ranks


def sliced(checkpoint: bool) -> tuple[Counts, Counter[str]]:
    """Return the waits of an OffloadModel's forward and backward, and of its optimizer's step."""
    with pretended_device(), counted_waits() as waits:
        trained = begin_offload_model(checkpoint=checkpoint)
        for number in range(3):
            trained.step(batch(number))
        waits.clear()
        trained.step(torch.randn(16, 16))
        return dict(waits.waits), waits.queued


@pytest.mark.parametrize("checkpoint", [False, True])
def test_an_offload_model_s_pass_does_not_wait_for_the_device(checkpoint: bool) -> None:
    assert run_ranks(sliced, 1, checkpoint) == [({}, Counter())]


def asks_for_a_value() -> Counts:
    """Return what is counted, by kind, of a step that does what a step should not."""
    x = batch(0)
    with pretended_device(), counted_waits() as waits, begin(KINDS["plain"]):

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
