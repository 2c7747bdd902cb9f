from __future__ import annotations

from dataclasses import replace

import pytest

from smpkit.config.words import duration
from smpkit.observe import summary_text
from smpkit.observe.summary import Gain, KindBytes, RankSummary, RunSummary, Split
from smpkit.units import amount, count, seconds

MIB = 2**20
SPLIT = Split(compute=0.06, bubble=0.03, optimizer=0.008, other=0.002)
PEAK = KindBytes(weights=8 * MIB, gradients=8 * MIB, states=16 * MIB, activations=3 * MIB, offloaded=5 * MIB)
ONE = RunSummary(
    name="gpt",
    started=0.0,
    seconds=72.0,
    steps=720,
    exit_reason="finished",
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


def block(summary: RunSummary) -> list[str]:
    return [*summary_text.block(summary)]


def test_one_rank_is_told_in_few_lines() -> None:
    assert block(ONE) == [
        "run     720 steps of 100.0 ms: 640 samples/s, 27,300 tokens/s",
        "time    compute 90.0%, optimizer 10.0%",
        "memory  at most 36.0 MiB in tensors",
    ]


def test_two_ranks_get_at_most_eight_lines() -> None:
    """It had been 11 and more, most of them memory by kind, which is in the report."""
    values = dict.fromkeys(("loss", "held_out_loss", "perplexity", "learning_rate", "norm"), (5.515, 3.948))
    gains = (*TWO.gains, Gain("activation checkpointing", 0, 36 * MIB, 60 * MIB, "simulated"))
    full = replace(
        TWO, values=values, gains=gains, flops_share=0.431, flops_basis="the peak in calibration.json", notes=()
    )
    assert block(full) == [
        "run     720 steps of 100.0 ms: 640 samples/s, 27,300 tokens/s,",
        "        43% of the peak in calibration.json",
        "values  loss 5.515 → 3.948, held_out_loss 5.515 → 3.948, …",
        "time    rank  compute  bubble  optimizer  other",
        "           0    60.0%   30.0%       8.0%   2.0%",
        "           1    60.0%   30.0%       8.0%   2.0%",
        "memory  at most 36.0 MiB in tensors (rank 0), planned 35.0 MiB",
        "saved   24.0 MiB by activation checkpointing, …",
    ]
    assert block(TWO)[-2:] == ["saved   5.0 MiB by offload_activations", "note    rank 3 had not ended 10 s later"]


def test_a_step_is_as_long_as_its_rate_says_and_as_its_parts_add_up_to() -> None:
    """`20 steps in 15 s: 4.02 steps/s` contradicted itself: the seconds were those of the start, too."""
    [line, *_] = block(replace(TWO, seconds=9999.0, steps_per_s=4.02))
    assert line.startswith("run     720 steps of 248.8 ms: ")
    assert TWO.ranks[0].split.total == pytest.approx(0.1)


def test_the_peak_is_of_the_device_where_there_is_one() -> None:
    on_device = replace(ONE.ranks[0], device_peak=30 * 2**30, device_size=80 * 2**30)
    assert block(replace(ONE, ranks=(on_device,)))[-1] == "memory  at most 30.0 GiB of 80.0 GiB"


def test_of_many_ranks_the_fullest_and_the_slowest_are_shown() -> None:
    ranks = [RankSummary(rank, "a", SPLIT, PEAK, 30 * MIB) for rank in range(64)]
    ranks[5] = replace(ranks[5], device_peak=40 * MIB)
    ranks[9] = replace(ranks[9], split=replace(SPLIT, compute=0.09, bubble=0.0))
    ranks[40] = replace(ranks[40], split=replace(SPLIT, compute=0.0, stall=0.06))
    lines = block(replace(ONE, ranks=tuple(ranks)))
    assert [line.split()[0] for line in lines[2:5]] == ["5", "9", "40"]
    assert lines[5].strip() == "the fullest and the slowest of 64 ranks"
    assert "(rank 5)" in lines[6]


def test_a_run_without_figures_is_one_line() -> None:
    assert block(RunSummary("a", 0.0, 3.21, 0, "finished")) == ["run     0 steps in 3.2 s"]


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


def test_a_plan_without_activations_is_no_plan_of_the_peak() -> None:
    planned = KindBytes(weights=8 * MIB, gradients=8 * MIB)
    ranks = tuple(replace(rank, planned=planned) for rank in TWO.ranks)
    assert "memory  at most 36.0 MiB in tensors (rank 0)" in block(replace(TWO, ranks=ranks))


def test_short_times_are_not_nothing() -> None:
    assert [seconds(length) for length in (0, 2e-8, 1e-6, 0.0123, 3)] == ["0 µs", "20 ns", "1 µs", "12.3 ms", "3.00 s"]
