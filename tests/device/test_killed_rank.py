"""A rank that is killed in the middle of a step ends the others within seconds, although their GPU is at work."""

from __future__ import annotations

import pytest
import torch

from tests.device.device import sleep, synchronize
from tests.device.ranks import run_on_gpu
from tests.transparency.test_pipeline_failures import begin, data, die, told, train_step

_CYCLES = 4_000_000_000
"""Of the GPU's clock: two seconds."""


def die_while_the_gpu_is_busy() -> None:
    sleep(_CYCLES)
    message, seconds = die()
    raise AssertionError(f"{message} after {seconds:.0f} s")


def test_a_rank_that_is_killed_ends_the_others() -> None:
    with pytest.raises(AssertionError) as caught:
        run_on_gpu(die_while_the_gpu_is_busy, timeout=90)
    assert "rank 0 lost rank 1" in str(caught.value)
    assert "exit code -9" in str(caught.value)


def raise_while_the_other_waits_in_cuda() -> tuple[str, float]:
    """Let one rank sit in the driver, where no deadline of Python reaches, when the other raises."""
    model, switch = begin()
    train_step(model, *data())
    if torch.distributed.get_rank() == 0:

        def wait_and_train() -> None:
            sleep(_CYCLES)
            synchronize()
            train_step(model, *data())

        return told(wait_and_train)

    def broken() -> None:
        raise ValueError("the switch is broken")

    switch.trouble = broken
    return told(lambda: train_step(model, *data()))


def test_a_rank_that_waits_for_its_gpu_hears_of_it() -> None:
    first, _ = run_on_gpu(raise_while_the_other_waits_in_cuda, timeout=90)
    assert "rank 1 failed: ValueError: the switch is broken" in first[0]
    assert first[1] < 30
