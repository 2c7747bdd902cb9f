from __future__ import annotations

from smpkit.torch.core.stream_seeds import Seeds, mix

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


def test_seeds_are_told_from_those_of_a_script_and_keep_saying_whether_their_stream_is_closed() -> None:
    for seeds in (Seeds(), Seeds(OWN)):
        for number in (0, 1, (1 << 64) - 1, mix(5, 6)):
            for seed, lowest in ((seeds.open(number), 0), (seeds.closed(number), 1)):
                assert 0 <= seed < 1 << 63
                assert seed & 1 == lowest == seeds.after(seed, KEY) & 1
                assert Seeds.is_stream_seed(seed)
                assert Seeds.is_stream_seed(seeds.after(seed, KEY))
    assert not any(Seeds.is_stream_seed(seed) for seed in (0, 1, 42, 1234, 2**32 - 1, 2**63 - 1, 2**64 - 1))


def test_no_two_calls_of_a_microbatch_begin_at_one_number() -> None:
    keys = [mix(0, name) for name in range(300)]
    for seeds in (Seeds(), Seeds(OWN)):
        found = set()
        for microbatch in range(100):
            seed = seeds.open(mix(1, microbatch))
            for key in keys:
                # Inside a call of a module there are three more of others, and a fourth of the same name.
                inner = seed
                for other in (*keys[:3], key):
                    found.add(inner & 0xFFFFFFFF)
                    inner = seeds.after(inner, other + 1)
                seed = seeds.after(seed, key)
        # All that a CPU's generator takes of a seed: of as many random ones, one in some 36,000 meets another.
        assert len(found) > 100 * 300 * 4 - 12


def test_a_repeated_call_never_comes_back_to_a_number() -> None:
    for seeds in (Seeds(), Seeds(OWN)):
        assert len(set(row(seeds, seeds.closed(mix(3, 4)), 100_000))) == 100_000
