from __future__ import annotations

from dataclasses import replace

import pytest

from smpkit.config.words import duration
from smpkit.observe.summary import Gain, KindBytes, RankSummary, RunSummary, Split
from smpkit.observe.summary_text import block
from smpkit.units import amount, count

MIB = 2**20
SPLIT = Split(compute=0.06, bubble=0.03, optimizer=0.008, other=0.002)
PEAK = KindBytes(weights=8 * MIB, gradients=8 * MIB, states=16 * MIB, activations=3 * MIB, offloaded=5 * MIB)
ONE = RunSummary(
    name="gpt",
    started=0.0,
    seconds=72.0,
    steps=720,
    steps_per_s=10.0,
    samples_per_s=640.0,
    tokens_per_s=27_341.0,
    ranks=(RankSummary(0, "a", Split(compute=0.09, optimizer=0.01), PEAK, 36 * MIB),),
)
TWO = replace(
    ONE,
    world_size=2,
    ranks=tuple(RankSummary(rank, "a", SPLIT, PEAK, 36 * MIB, planned=replace(PEAK, offloaded=0)) for rank in (0, 1)),
    gains=(Gain("offload_activations", 1, 36 * MIB, 41 * MIB, "measured", 0.0042),),
    notes=("rank 3 had not ended 10 s later",),
)


def test_one_rank_is_told_in_few_lines() -> None:
    assert block(ONE) == [
        "run     720 steps in 1 m 12 s: 10 steps/s, 640 samples/s,",
        "        27,300 tokens/s",
        "step    100.0 ms: compute 90.0%, optimizer 10.0%",
        "memory  peaks in MiB: weights 8.0, gradients 8.0, states 16.0,",
        "        activations 3.0, offloaded 5.0, at once 36.0",
    ]


def test_several_ranks_are_a_table_with_the_plan_below_each() -> None:
    assert block(TWO) == [
        "run     720 steps in 1 m 12 s: 10 steps/s, 640 samples/s,",
        "        27,300 tokens/s",
        "step    100.0 ms",
        "  rank  compute  bubble  optimizer  other",
        "     0    60.0%   30.0%       8.0%   2.0%",
        "     1    60.0%   30.0%       8.0%   2.0%",
        "memory  peaks in MiB",
        "  rank  weights  gradients  states  activations  offloaded  at once",
        "     0      8.0        8.0    16.0          3.0        5.0     36.0",
        "  plan      8.0        8.0    16.0          3.0          –     35.0",
        "     1      8.0        8.0    16.0          3.0        5.0     36.0",
        "  plan      8.0        8.0    16.0          3.0          –     35.0",
        "gain    offload_activations: 36.0 MiB instead of 41.0 MiB on the device",
        "        of rank 1, 0.4% slower (measured)",
        "note    rank 3 had not ended 10 s later",
    ]


def test_of_many_ranks_the_fullest_and_the_slowest_are_shown() -> None:
    ranks = [RankSummary(rank, "a", SPLIT, PEAK, 30 * MIB) for rank in range(64)]
    ranks[5] = replace(ranks[5], device_peak=40 * MIB)
    ranks[9] = replace(ranks[9], split=replace(SPLIT, compute=0.09, bubble=0.0))
    ranks[40] = replace(ranks[40], split=replace(SPLIT, compute=0.0, stall=0.06))
    lines = block(replace(ONE, ranks=tuple(ranks)))
    assert [line.split()[0] for line in lines[4:7]] == ["5", "9", "40"]
    assert "of 64 ranks the fullest and slowest" in lines[2]


def test_a_run_without_figures_is_one_line() -> None:
    assert block(RunSummary("a", 0.0, 3.21, 0)) == ["run     0 steps in 3.2 s"]


def test_all_lines_fit_80_columns_behind_the_name_of_a_rank() -> None:
    full = KindBytes(*[10**12] * 7)
    split = Split(*[1 / 6] * 6)
    rank = RankSummary(1000, "a", split, full, 10**12, planned=full)
    fast = replace(TWO, steps_per_s=0.0123, samples_per_s=1234567.0, tokens_per_s=123456789.0, flops_share=0.431)
    lines = block(replace(fast, steps=1_000_000, ranks=(rank, rank)))
    assert max(map(len, lines)) <= 71, max(lines, key=len)


@pytest.mark.parametrize(("value", "text"), [(0.01234, "0.0123"), (3.333, "3.33"), (213.4, "213"), (27_341, "27,300")])
def test_rates_have_three_digits(value: float, text: str) -> None:
    assert count(value) == text


def test_amounts_and_durations() -> None:
    assert [amount(number) for number in (512, 3 * MIB, 5 * 2**30, 2**41)] == ["512 B", "3.0 MiB", "5.0 GiB", "2.0 TiB"]
    assert [duration(number) for number in (0.84, 59.6, 11_100)] == ["0.8 s", "1 m 0 s", "3 h 5 m"]


def test_what_a_plan_does_not_know_is_a_dash() -> None:
    planned = KindBytes(weights=8 * MIB, gradients=8 * MIB)
    lines = block(replace(TWO, ranks=(replace(TWO.ranks[0], planned=planned), TWO.ranks[1])))
    assert "  plan      8.0        8.0       –            –          –        –" in lines
