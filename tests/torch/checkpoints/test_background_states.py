"""Saves in the background of what changes in unusual ways: offloaded weights, loss scales; and a job told to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from smpkit.torch.checkpoints import save as saving
from tests.forked import Script
from tests.models import CASES
from tests.torch.steps import on_ranks
from tests.torch.test_amp import Layer, train_step
from tests.train import TrainingInSlices, batch

ROOT = Path(__file__).parents[3]


@contextlib.contextmanager
def held_back() -> Iterator[threading.Event]:
    """Let saves write nothing before the end, or before the event is set."""
    event, write = threading.Event(), saving._write_files

    def held(*args: Any) -> Any:
        assert event.wait(60), "nobody let the save go on"
        return write(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "_write_files", held)
        try:
            yield event
        finally:
            event.set()


def save_while(folder: Path, content: Any, train: Any) -> None:
    """Save blockingly as `now`, and in the background as `later` while training goes on."""
    smp.save_checkpoint(folder, "now", user_content=content)
    with held_back():
        pending = smp.save_checkpoint(folder, "later", user_content=content, blocking=False)
        train()
        train()
    assert pending is not None
    pending.wait(60)


@on_ranks(1)
def test_an_offload_optimizer_in_the_users_content(tmp_path: Path) -> None:
    """Weights are parts of flat buffers, which its passes over slices change in place, as they do its states."""
    smp.init({})
    smp.DistributedModel(nn.Linear(1, 1))
    case = CASES["Sequential"]

    def train(job: TrainingInSlices) -> None:
        job.step(*batch(case, 0, 8))

    job = TrainingInSlices(case, num_slices=2)
    train(job)
    content = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}
    save_while(tmp_path, content, lambda: train(job))
    now, found = (smp.resume_from_checkpoint(tmp_path, tag) for tag in ("now", "later"))
    torch.testing.assert_close(found, now, rtol=0, atol=0)
    again = TrainingInSlices(case, num_slices=2)
    again.model.load_state_dict(found["model"])
    again.optimizer.load_state_dict(found["optimizer"])
    for _ in range(2):
        train(again)
    assert all(map(torch.equal, again.model.parameters(), job.model.parameters()))


@on_ranks(2)
def test_a_grad_scaler_is_kept_as_it_was(tmp_path: Path) -> None:
    smp.init({"ddp": True})
    module = Layer()
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = smp.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)

    def train() -> None:
        optimizer.zero_grad()
        train_step(model, torch.ones(8, 4), scaler, None)
        scaler.step(optimizer)
        scaler.update()

    train()
    assert scaler.get_scale() == 64.0
    module.spoil = True
    save_while(tmp_path, {"scaler": scaler, "state": scaler.state_dict()}, train)
    assert scaler.get_scale() == 16.0
    content = smp.resume_from_checkpoint(tmp_path, "later")
    assert content["scaler"].get_scale() == 64.0
    assert content["scaler"].state_dict() == content["state"]
    scaler.load_state_dict(content["state"])
    module.spoil = False
    train()  # the second step without an overflow: the scale grows
    assert scaler.get_scale() == 128.0


# --- SIGTERM ----------------------------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys, threading, time, torch
import smpkit.torch as smp
from smpkit.torch.checkpoints import save as saving
{handler}
smp.init({{}})
model = smp.DistributedModel(torch.nn.Linear(64, 64))
smp.save_checkpoint({folder!r}, "good", user_content="good")
write = saving._write_files
def slowly(save, part, go_on):
    first, *others = part.contents
    content = part.contents.pop(first)
    write(save, part, go_on)
    os.write(1, b"writing\\n")
    time.sleep(1.5)
    part.contents[first] = content
    return write(save, part, go_on)
saving._write_files = slowly
smp.save_checkpoint({folder!r}, "last", user_content="last", blocking=False)
while not {until}:
    time.sleep(0.01)
"""

ENDS = "signal.signal(signal.SIGTERM, lambda *_: (signal.signal(signal.SIGTERM, signal.SIG_IGN), sys.exit()))"
STOPPED_AS_THE_THREAD_STARTS = f"""
{ENDS}
start = threading.Thread.start
def stopped(thread):
    start(thread)
    if thread.name == "smpkit-save":
        os.kill(os.getpid(), signal.SIGTERM)
threading.Thread.start = stopped
"""


@pytest.mark.parametrize(
    ("handler", "until", "newest"),
    [
        ("", "False", "good"),
        ("", "smp.stop_requested()", "last"),
        (ENDS, "False", "last"),
        (STOPPED_AS_THE_THREAD_STARTS, "False", "last"),
    ],
    ids=["no handler", "stop_requested", "own handler", "own handler as the thread starts"],
)
def test_sigterm_in_a_save(handler: str, until: str, newest: str, tmp_path: Path) -> None:
    """The save ends, or leaves the one before whole and `newest` as it was."""
    path, folder = tmp_path / "script.py", tmp_path / "checkpoints"
    path.write_text(SCRIPT.format(handler=handler, until=until, folder=str(folder)))
    script = Script(path, env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)})
    try:
        assert script.stdout is not None
        assert script.stdout.readline() == "writing\n"
        script.send_signal(signal.SIGTERM)
        _, said = script.communicate(timeout=60)
    finally:
        script.kill()
    assert script.returncode == (0 if newest == "last" else -signal.SIGTERM), said
    assert (folder / "newest").read_text() == f"{newest}_partial\n"
    expected = ["good_partial", "last_partial"] if newest == "last" else ["good_partial"]
    assert sorted(each.name for each in folder.glob("*_partial")) == expected
    smp.init({})
    smp.DistributedModel(nn.Linear(64, 64))
    try:
        assert smp.resume_from_checkpoint(folder) == newest
        smp.save_checkpoint(folder, "next")
    finally:
        smp.shutdown()
    assert not list(folder.glob(".*"))  # what the killed save left is gone
