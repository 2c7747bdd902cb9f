"""Where a step's random numbers come from: each microbatch of each step of each replica has numbers of its own."""

from __future__ import annotations

import pytest
import torch

from smpkit.torch.core.stream_seeds import Seeds, mix
from smpkit.torch.pipeline.random_streams import RandomStreams

CPU = torch.device("cpu")


def drawn(seed: int, num_steps: int) -> list[tuple[float, ...]]:
    """Return what two microbatches of each step draw between units, in two units, and after each."""
    streams = RandomStreams(seed, CPU)
    found = []
    for _ in range(num_steps):
        with streams.training_step(training=True):
            for microbatch in range(2):
                streams.begin_microbatch(microbatch)
                found.append(tuple(torch.rand(2).tolist()))
                state = streams.state()
                for name in ("layers.0", "layers.1"):
                    streams.restore(state)
                    streams.run(name, True, torch.rand, (2,), {})
                    # Both calls began where one number was: what comes after them depends on their names.
                    found.append(tuple(torch.rand(2).tolist()))
                found.append(tuple(streams.run("layers.0", True, torch.rand, (2,), {}).tolist()))
    return found


def test_no_two_streams_are_alike_and_the_same_step_draws_the_same_again() -> None:
    numbers = drawn(3, 2) + drawn(4, 2)
    assert len(set(numbers)) == len(numbers) == 32
    assert drawn(3, 2) == numbers[:16]


def test_a_call_costs_its_caller_one_number_whoever_runs_it() -> None:
    streams = RandomStreams(3, CPU)
    after = []
    with streams.training_step(training=True):
        for is_home in (True, False):
            streams.begin_microbatch(0)
            if is_home:
                streams.run("layers.0", True, torch.rand, (100,), {})
            else:
                streams.skip("layers.0")
            after.append(torch.rand(2).tolist())
    assert after[0] == after[1]


def test_calls_inside_a_unit_never_draw_what_it_has_drawn_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a rank with its own samples, whose units begin with a seed of their own."""
    monkeypatch.setattr(Seeds, "for_this_rank", lambda: Seeds(mix(0, 1) & ((1 << 43) - 2)))
    streams = RandomStreams(3, CPU)

    def unit() -> list[float]:
        before = torch.rand(1)
        return [*before.tolist(), *streams.run("drop", True, torch.rand, (1,), {}).tolist(), *torch.rand(1).tolist()]

    with streams.training_step(training=True):
        streams.begin_microbatch(0)
        found = [*streams.run("layers.0", True, unit, (), {}), *streams.run("layers.0", True, unit, (), {})]
    assert len(set(found)) == 6


def test_operations_in_a_unit_draw_from_its_stream_where_a_device_is_set_around_it() -> None:
    """Its mode lies above that of the streams; recomputation in backward will have neither."""
    streams, ones = RandomStreams(3, CPU), torch.ones(64)

    def step() -> torch.Tensor:
        with torch.device("cpu"):
            return streams.run("layers.0", True, torch.dropout, (ones, 0.5, True), {})

    with streams.training_step(training=True):
        streams.begin_microbatch(0)
        state = streams.state()
        found = streams.call_between_units(step)
        streams.restore(state)
        assert torch.equal(torch.dropout(ones, 0.5, True), found)
    assert streams.num_closed == 0


OWN = mix(0, 1) & ((1 << 43) - 2)
KEY = mix(0, 7)


def row(seeds: Seeds, first: int, length: int) -> list[int]:
    """Return the numbers of a stream, from the seeds that its generator has one after the other."""
    numbers, seed = [], first
    for _ in range(length):
        numbers.append(seeds.number(seed))
        seed = seeds.after(seed, KEY)
    return numbers


def test_ranks_have_the_same_numbers_and_closed_streams_of_their_own() -> None:
    first, second = Seeds(), Seeds(OWN)
    number = mix(3, 4)
    assert first.open(number) == second.open(number)
    assert first.closed(number) != second.closed(number)
    assert first.closed(number) & 0xFFFFFFFF != second.closed(number) & 0xFFFFFFFF  # all that a CPU's generator takes
    rows = [row(seeds, seed, 100) for seeds in (first, second) for seed in (seeds.open(number), seeds.closed(number))]
    assert all(each == rows[0] for each in rows)
    assert len(set(rows[0])) == 100


def test_seeds_tell_whether_they_are_of_a_stream_and_whether_it_is_closed() -> None:
    for seeds in (Seeds(), Seeds(OWN)):
        for number in (0, 1, (1 << 64) - 1, mix(5, 6)):
            for seed, lowest in ((seeds.open(number), 0), (seeds.closed(number), 1)):
                assert 0 <= seed < 1 << 63
                assert seed & 1 == lowest == seeds.after(seed, KEY) & 1
                assert Seeds.is_stream_seed(seed)
                assert Seeds.is_stream_seed(seeds.after(seed, KEY))
    assert not any(Seeds.is_stream_seed(seed) for seed in (0, 1, 42, 1234, 2**32 - 1, 2**63 - 1, 2**64 - 1))
