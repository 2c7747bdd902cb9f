"""What a pipeline made is gone when it is over: stages, and with them models and threads."""

from __future__ import annotations

import gc
import threading

import smpkit.torch as smp
from smpkit.torch.pipeline.stage import Stage
from tests.ranks import run_ranks
from tests.transparency.checkpointed_models import Variant, train


def train_twice() -> tuple[int, list[str]]:
    for horizon in (None, 2):
        train(Variant("each", 4, horizon=horizon), 2)
    assert not smp.is_initialized()
    gc.collect()
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(10)
    return sum(isinstance(each, Stage) for each in gc.get_objects()), [each.name for each in threading.enumerate()]


def test_stages_and_their_threads_end_with_the_training() -> None:
    for stages, threads in run_ranks(train_twice, 2):
        assert stages == 0
        assert threads == ["MainThread"]
