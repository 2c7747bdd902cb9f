"""Where a step's random numbers come from: each microbatch of each step of each replica has numbers of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from smpkit.torch.core import devices
from smpkit.torch.pipeline.random_streams import RandomStreams

CPU = torch.device("cpu")


def drawn(seed: int, num_steps: int) -> list[tuple[float, ...]]:
    """Return what two microbatches of each step draw between units and in two units of other names."""
    streams = RandomStreams(seed, CPU)
    found = []
    for _ in range(num_steps):
        with streams.training_step(training=True):
            for microbatch in range(2):
                streams.begin_microbatch(microbatch)
                state = streams.state()
                found.append(tuple(torch.rand(2).tolist()))
                for name in ("layers.0", "layers.1"):
                    streams.restore(state)  # both calls take the same number: only their names differ
                    found.append(tuple(streams.run(name, True, torch.rand, (2,), {}).tolist()))
    return found


def test_no_two_streams_are_alike_and_the_same_step_draws_the_same_again() -> None:
    numbers = drawn(3, 2) + drawn(4, 2)
    assert len(set(numbers)) == len(numbers) == 24
    assert drawn(3, 2) == numbers[:12]


def test_a_call_costs_its_caller_one_number_whoever_runs_it() -> None:
    streams = RandomStreams(3, CPU)
    after = []
    with streams.training_step(training=True):
        for is_home in (True, False):
            streams.begin_microbatch(0)
            if is_home:
                streams.run("layers.0", True, torch.rand, (100,), {})
            else:
                streams.skip()
            after.append(torch.rand(2).tolist())
    assert after[0] == after[1]


def test_an_evaluation_leaves_the_generators_to_the_user() -> None:
    streams = RandomStreams(3, CPU)
    torch.manual_seed(7)
    expected = torch.rand(2).tolist()
    torch.manual_seed(7)
    with streams.training_step(training=False):
        streams.begin_microbatch(0)
        streams.skip()
        assert torch.rand(2).tolist() == expected


class Counting:
    """A device's generator, and which of its methods were called."""

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self.generator, name)


def test_a_device_s_generator_is_led_without_torch_s_detours(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Counting()
    monkeypatch.setattr(devices, "is_asynchronous", lambda _: True)
    monkeypatch.setattr(devices, "default_generator", lambda _: device)
    streams = RandomStreams(3, CPU)
    before = device.generator.get_state()
    with streams.training_step(training=True):
        streams.begin_microbatch(0)
        of_caller = device.generator.get_state()
        device.calls.clear()
        seeds = streams.run("layer", True, lambda: (device.generator.initial_seed(), torch.initial_seed()), (), {})
        assert seeds[0] == seeds[1]
        assert device.calls == ["get_state", "manual_seed", "set_state"]
        assert torch.equal(device.generator.get_state(), of_caller)
    assert torch.equal(device.generator.get_state(), before)
