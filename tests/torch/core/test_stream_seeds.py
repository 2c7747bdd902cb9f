from __future__ import annotations

from smpkit.torch.core.stream_seeds import Seeds, mix

OWN = mix(0, 1) & ((1 << 43) - 2)


def row(seeds: Seeds, first: int, length: int) -> list[int]:
    """Return the numbers of a stream, from the seeds that its generator has one after the other."""
    numbers, seed = [], first
    for _ in range(length):
        numbers.append(seeds.number(seed))
        seed = seeds.after(seed)
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
                assert seed & 1 == lowest == seeds.after(seed) & 1
                assert Seeds.is_stream_seed(seed)
                assert Seeds.is_stream_seed(seeds.after(seed))
    assert not any(Seeds.is_stream_seed(seed) for seed in (0, 1, 42, 1234, 2**32 - 1, 2**63 - 1, 2**64 - 1))


def test_the_seeds_of_a_call_are_those_of_its_number_and_its_key() -> None:
    for seeds in (Seeds(), Seeds(OWN)):
        for seed in [make(mix(number, 1)) for number in range(200) for make in (seeds.open, seeds.closed)]:
            for key in (0, 1, 0xFFFF_FFFF):
                inner = mix(seeds.number(seed), key)
                assert seeds.branch(seed, key, closed=True)[0] == seeds.closed(inner)
                assert seeds.branch(seed, key, closed=False)[0] == seeds.open(inner)
                assert seeds.branch(seed, key, closed=False)[1] == seeds.after(seed)


def test_no_two_calls_of_a_microbatch_draw_from_one_stream() -> None:
    keys = [mix(0, name) for name in range(300)]
    for seeds in (Seeds(), Seeds(OWN)):
        seed, found = seeds.open(mix(1, 2)), set()
        for _ in range(300):
            found |= {seeds.branch(seed, key, closed=True)[0] & 0xFFFFFFFF for key in keys}
            seed = seeds.after(seed)
        # All that a CPU's generator takes of a seed: of as many random ones, one in some 48,000 meets another.
        assert len(found) > 300 * 300 - 10
