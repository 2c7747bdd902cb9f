"""`offload_activations: true` under the SMP v1 API, on one rank and over pipelines: what is said and reported of it.

That no bit changes is in `tests/transparency/test_checkpointing.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import smpkit.torch as smp
from smpkit.errors import UsageError
from smpkit.observe.events import Counter, WorkSpan, read_events
from smpkit.torch.core import offloader
from smpkit.torch.offload import arena as arenas
from smpkit.torch.offload import engine as engines
from smpkit.torch.offload.link import Link
from smpkit.torch.pipeline.messages import P2PTransfer
from smpkit.torch.pipeline.transport import Transport
from tests.models import DROPOUT, WIDTH, Dropping
from tests.ranks import run_ranks
from tests.torch.offload.chains import ClockLink
from tests.train import Way, checkpoint_layers, train, training

LAYERS, SAMPLES = 6, 8
BOUNDARY_BYTES = 8 * WIDTH * SAMPLES
CASE = replace(DROPOUT, build=partial(Dropping, LAYERS))
OFFLOADED = Way(microbatches=2, config={"offload_activations": True}, prepare=checkpoint_layers)


def report(way: Way) -> Any:
    with training(CASE, way) as trained:
        for number in range(len(way.batches)):
            trained.run(number)
        return smp.offload_report()


@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize(("microbatches", "horizon"), [(1, "auto"), (4, 2)])
def test_the_report_tells_of_one_boundary_per_layer(pipeline: int, microbatches: int, horizon: object) -> None:
    config = {"offload_activations": True, "activation_loading_horizon": horizon}
    for found in run_ranks(
        report, pipeline, replace(OFFLOADED, pipeline=pipeline, microbatches=microbatches, config=config)
    ):
        assert (found.num_steps, "3 steps" in str(found)) == (3, True)
        # The first layer's input is a part of the batch, which is there anyway, where there are microbatches.
        assert all(step.bytes_out <= LAYERS // pipeline * BOUNDARY_BYTES for step in found.steps)
        assert found.steps[-1].bytes_out >= (LAYERS // pipeline - 2) * BOUNDARY_BYTES
        assert found.bytes_back > 0
        assert found.peak_device_bytes < found.peak_host_bytes


def no_effect(prepare: Callable[[Any], object] | None) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(CASE, replace(OFFLOADED, pipeline=2, prepare=prepare))
    assert offloader.current() is offloader.KEEPING
    return [str(warning.message) for warning in caught if "no effect" in str(warning.message)]


def test_a_report_needs_offloading_and_offloading_checkpointed_layers(world: None) -> None:
    smp.init({})
    smp.DistributedModel(Dropping())
    with pytest.raises(UsageError, match="nothing is offloaded here"):
        smp.offload_report()
    (message,), nothing = run_ranks(no_effect, 2, None)
    assert message.startswith("offload_activations has no effect: no layer is checkpointed")
    assert nothing == []
    assert run_ranks(no_effect, 2, checkpoint_layers) == [[], []]


class Nanoseconds(ClockLink):
    """Stamps in whole nanoseconds, as events have them; only loads take time, so each of them is waited for."""

    send = Link.send

    def stamp(self) -> int:
        return round(1e9 * self.seconds)

    seconds_between = Link.seconds_between  # type: ignore[assignment]


def test_events_tell_what_moved_and_how_long_layers_waited(
    world: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMPKIT_EVENTS_DIR", str(tmp_path))
    monkeypatch.setattr(engines, "link_for", lambda *_: Nanoseconds(bytes_per_second=1e6))
    found = report(OFFLOADED)
    events = read_events(tmp_path / "events_0.jsonl").events
    totals = dict[str, int]()
    for event in events:
        if isinstance(event, Counter):
            totals[event.name] = totals.get(event.name, 0) + event.value
    assert totals["offload out, bytes"] == found.bytes_out
    assert totals["offload back, bytes"] == found.bytes_back
    stalls = [stall for step in found.steps for stall in step.stalls]
    assert stalls
    assert {name for name in totals if "stall" in name} == {f"offload stall of {each.layer}, ns" for each in stalls}
    works = {event.name for event in events if isinstance(event, WorkSpan)}
    waits = {name for name in works if "wait for the activation of" in name}
    assert waits == {f"wait for the activation of `{each.layer}` (microbatch {each.microbatch})" for each in stalls}


def mapped(pipeline: str) -> list[int]:
    """Return how much host memory was there before ranks were connected, and after each of four steps."""
    config = {"offload_activations": True, "pipeline": pipeline, "active_microbatches": 2}
    way = replace(OFFLOADED, pipeline=2, microbatches=8, batches=(4096,) * 4, traced=True, config=config)  # pages
    counts, connect = list[int](), Transport.connect

    def counted(transport: Transport, transfers: Iterable[P2PTransfer]) -> None:
        counts.append(offloader.current().use().mapped)
        connect(transport, transfers)

    with (
        mock.patch.object(Transport, "connect", counted),
        mock.patch.object(arenas, "_SLAB", 4096),
        training(CASE, way) as trained,
    ):
        for number in range(4):
            trained.run(number)
            counts.append(offloader.current().use().mapped)
    return counts


@pytest.mark.parametrize("pipeline", ["simple", "interleaved"])
def test_host_memory_for_all_microbatches_is_there_before_ranks_are_connected(pipeline: str) -> None:
    """To pin it in the middle of a step can wait for the device, and two ranks then for each other."""
    _, last = run_ranks(mapped, 2, pipeline)
    assert last[0] > 0
    assert last == last[:1] * 5
