"""Receives are posted ahead by fixed rules."""

from __future__ import annotations

from smpkit.torch.pipeline.step_plan import num_ahead

MIB = 2**20


def test_all_small_receives_are_posted_before_the_first_wait_and_of_large_ones_the_first() -> None:
    assert num_ahead([MIB // 4] * 6) == 4
    assert num_ahead([0, 0, 2 * MIB, 0]) == 2
    assert num_ahead([2 * MIB, 2 * MIB]) == 1
