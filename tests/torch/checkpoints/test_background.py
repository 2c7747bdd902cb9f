"""Saves in the background: the same bytes as a blocking save, one at a time, errors that are not lost."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import smpkit.torch as smp
from smpkit.errors import CheckpointError, DeadlineError, UsageError
from smpkit.testing.ranks import RankFailed
from smpkit.torch.checkpoints import folder as folder_module
from smpkit.torch.checkpoints import reader as reader_module
from smpkit.torch.checkpoints import save as saving
from smpkit.torch.checkpoints import whole as whole_module
from tests.deadlines import wait_shortly
from tests.models import CASES, MODELS
from tests.ranks import run_ranks
from tests.torch.steps import on_ranks, wrap
from tests.torch.test_amp import Layer, train_step
from tests.train import Training, TrainingInSlices, Way, batch

CASE = replace(MODELS["tied modules"], dtype=torch.float32)
PIPELINE = Way(pipeline=2, microbatches=2, optimizer="AdamW")
REPLICAS = Way(replicas=2, microbatches=2, optimizer="AdamW")


def begin(way: Way = PIPELINE) -> Training:
    """Start a job, and train for a step."""
    smp.init(way.init)
    job = Training(CASE, way)
    job.run(0)
    return job


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


def check_same_files(folder: Path, first: str, second: str) -> None:
    """Check the files of two checkpoints but their indices, which have the names of the saves."""
    files, others = (
        {path.name: path.read_bytes() for path in (folder / f"{tag}_partial").iterdir() if path.name != "index.json"}
        for tag in (first, second)
    )
    assert files.keys() == others.keys()
    assert [name for name in files if files[name] != others[name]] == []


@pytest.mark.parametrize(
    "way",
    [
        PIPELINE,
        replace(PIPELINE, config={"bf16": True}),
        replace(PIPELINE, config={"fp16": True}),
        replace(REPLICAS, config={"shard_optimizer_state": True}),
        replace(REPLICAS, config={"sharded_data_parallel_degree": 2}),
    ],
    ids=["pipeline", "bf16", "fp16", "sharded states", "sharded parameters"],
)
@on_ranks(2)
def test_the_files_are_those_of_a_blocking_save(tmp_path: Path, way: Way) -> None:
    job = begin(way)
    content: dict[str, Any] = {"step": 1, "history": torch.arange(3.0), "rates": [0.1]}
    for number in range(2):  # the second uses the memory of the first again
        smp.save_checkpoint(tmp_path, f"now_{number}", user_content=content)
        with held_back():
            pending: Any = smp.save_checkpoint(tmp_path, f"later_{number}", user_content=content, blocking=False)
            assert not pending.done()
            job.run(0)  # while it waits to be written
            content["history"] += 1
            content["rates"][0] = 7
        pending.wait(30)
        assert pending.done()
        assert (tmp_path / "newest").read_text() == f"later_{number}_partial\n"
        check_same_files(tmp_path, f"now_{number}", f"later_{number}")
        content["history"] -= 1
        content["rates"][0] = 0.1
        smp.barrier()
    job.run(0)
    pending = smp.save_checkpoint(tmp_path, "alone", user_content=content, blocking=False)
    pending.wait(30)  # nothing else waits for the copies
    smp.save_checkpoint(tmp_path, "beside", user_content=content)
    check_same_files(tmp_path, "alone", "beside")
    kept = {name: value.clone() for name, value in job.model.local_state_dict().items() if torch.is_tensor(value)}
    pending = smp.save_checkpoint(tmp_path, "last", user_content=content, blocking=False)
    job.run(0)
    assert smp.resume_from_checkpoint(tmp_path)["step"] == 1  # waits for the save
    after = job.model.local_state_dict()
    assert all(torch.equal(after[name], value) for name, value in kept.items())


def run_out_of_room(folder: Path, told_by: str) -> str:
    job = begin()
    smp.save_checkpoint(folder, "good", blocking=True)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if smp.rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        pending: Any = smp.save_checkpoint(folder, "bad", blocking=False)
        job.run(0)
        while not pending.done():
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    calls = {"wait": pending.wait, "save": lambda: smp.save_checkpoint(folder, "next"), "shutdown": smp.shutdown}
    with pytest.raises(CheckpointError) as caught:
        calls[told_by]()
    if told_by == "wait":
        smp.save_checkpoint(folder, "next")  # it has been told: this is not its error
    elif told_by == "save":
        smp.save_checkpoint(folder, "again", blocking=False)
        smp.shutdown()  # as at the end of a script
    return caught.value.message


@pytest.mark.parametrize("told_by", ["wait", "save", "shutdown"])
def test_a_failed_save_is_told_on_all_ranks_and_leaves_the_one_before(tmp_path: Path, told_by: str) -> None:
    for text in run_ranks(run_out_of_room, 2, tmp_path, told_by):
        assert "checkpoint `bad` was not saved; rank 1: model_" in text
        assert "File too large" in text
    left = sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("."))
    later = {"wait": ["next_partial"], "save": ["again_partial"], "shutdown": []}[told_by]
    assert left == sorted(["good_partial", "newest", *later])


@on_ranks(2)
def test_a_save_waits_for_the_one_before_and_the_end_for_the_last(tmp_path: Path) -> None:
    begin()
    with held_back() as go_on:
        first: Any = smp.save_checkpoint(tmp_path, "first", blocking=False)
        with pytest.raises(DeadlineError, match=r"waited 0\.1 s for checkpoint `first`, which is still being written"):
            first.wait(0.1)
        threading.Timer(0.3, go_on.set).start()
        smp.save_checkpoint(tmp_path, "second", blocking=False)
        assert first.done()
    with pytest.raises(UsageError, match="blocking is False with partial=False"):
        smp.save_checkpoint(tmp_path, "third", partial=False, blocking=False)
    smp.shutdown()  # as at the end of a script
    assert (tmp_path / "newest").read_text() == "second_partial\n"


@contextlib.contextmanager
def slow(place: Any, name: str) -> Iterator[None]:
    """Let the first calls on rank 0 take 3.6 s."""
    call, left = getattr(place, name), [0.9] * 4

    def slowly(*args: Any) -> Any:
        time.sleep(left.pop() if left and smp.rank() == 0 else 0)
        return call(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder_module, "PIECE_BYTES", 128)
        patch.setattr(place, name, slowly)
        yield
    assert not left or smp.rank() > 0, "else nobody had to wait"


@on_ranks(2)
def test_a_file_that_grows_has_no_deadline(tmp_path: Path) -> None:
    """One rank saves for longer than the other waits for a sign of it."""
    begin()
    with slow(folder_module, "pieces_of"):
        pending: Any = smp.save_checkpoint(tmp_path, "slow", blocking=False)
        wait_shortly(3)
        pending.wait(60)
    assert (tmp_path / "newest").read_text() == "slow_partial\n"


@on_ranks(2)
def test_nor_have_a_full_save_and_an_export(tmp_path: Path) -> None:
    begin()
    wait_shortly(3)
    with slow(whole_module, "pieces_of"):
        smp.save_checkpoint(tmp_path, "tensors", partial=False)
    with slow(folder_module, "pieces_of"):
        smp.save_checkpoint(tmp_path, "file", partial=False)
    with slow(folder_module, "pieces_of"):
        smp.save_pretrained(tmp_path / "hub")
    contents = [torch.load(tmp_path / tag) for tag in ("tensors", "file")]
    stored = load_file(tmp_path / "hub" / "model.safetensors")
    for content in contents:
        assert content.keys() >= stored.keys()
        assert all(torch.equal(content[name], value) for name, value in stored.items())


@on_ranks(2)
def test_nor_has_a_resume(tmp_path: Path) -> None:
    """The other rank has nothing to compare, or has done so."""
    begin()
    smp.save_checkpoint(tmp_path, "one")
    smp.save_checkpoint(tmp_path, "whole", partial=False)
    compare = folder_module._crc_of_file

    def compare_slowly(path: Path) -> int:
        time.sleep(5 if smp.rank() == 1 else 0)
        return compare(path)

    with pytest.MonkeyPatch.context() as patch:
        wait_shortly(3)
        patch.setattr(folder_module, "_crc_of_file", compare_slowly)
        smp.resume_from_checkpoint(tmp_path, "one")
    with slow(zipfile.ZipExtFile, "read"):
        smp.resume_from_checkpoint(tmp_path, "whole", partial=False)
    smp.save_pretrained(tmp_path / "hub")
    with slow(reader_module, "view_of"):
        smp.resume_from_checkpoint(tmp_path, "one")
    with slow(reader_module, "view_of"):
        smp.resume_from_checkpoint(tmp_path, "whole", partial=False)
    with slow(reader_module, "view_of"):
        smp.load_pretrained(tmp_path / "hub")


def lose_a_rank(folder: Path) -> None:
    begin()
    smp.save_checkpoint(folder, "good")
    with held_back():
        pending: Any = smp.save_checkpoint(folder, "bad", blocking=False)
        if smp.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        wait_shortly()
    with pytest.raises(CheckpointError, match=r"`bad` was not saved; .*rank 1"):
        pending.wait(60)


def test_a_killed_rank_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(lose_a_rank, 2, tmp_path)
    assert str(caught.value) == "--- rank 1: died without a traceback (exit code -9)"  # rank 0 has ended its wait
    assert (tmp_path / "newest").read_text() == "good_partial\n"
    assert sorted(path.name for path in tmp_path.glob("*_partial")) == ["good_partial"]


SCRIPT = """
import sys
import resource, torch
import smpkit.torch as smp
smp.init({})
model = smp.DistributedModel(torch.nn.Linear(64, 64))
smp.save_checkpoint(sys.argv[1], "good")
if sys.argv[2] == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
smp.save_checkpoint(sys.argv[1], "last", blocking=False)
"""


@pytest.mark.parametrize(("disk", "code", "newest"), [("empty", 0, "last"), ("full", 1, "good")])
def test_the_end_of_a_script_finishes_the_save_or_fails(tmp_path: Path, disk: str, code: int, newest: str) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), disk]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stderr
    assert ("checkpoint `last` was not saved; rank 0: model_0_0_0.safetensors" in done.stderr) == (disk == "full")
    assert (tmp_path / "newest").read_text() == f"{newest}_partial\n"


# --- what changes in unusual ways -------------------------------------------------------------------------------------


def save_while(folder: Path, content: Any, train: Any) -> None:
    """Save blockingly as `now`, and in the background as `later` while training goes on."""
    smp.save_checkpoint(folder, "now", user_content=content)
    with held_back():
        pending: Any = smp.save_checkpoint(folder, "later", user_content=content, blocking=False)
        train()
        train()
    pending.wait(60)


@on_ranks(1)
def test_an_offload_optimizer_in_the_users_content(tmp_path: Path) -> None:
    """Weights are parts of flat buffers, which its passes over slices change in place, as they do its states."""
    wrap(nn.Linear(1, 1))
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


@on_ranks(2)
def test_what_a_rank_saves_by_itself_meanwhile_is_left_alone(tmp_path: Path) -> None:
    """A leader's thread took the file that `smp.save` was writing beside it for that of a save that had died."""
    begin()
    (tmp_path / f".f.{'0' * 16}.tmp").touch()  # of one that has
    smp.save_checkpoint(tmp_path, "before")
    with held_back() as event:
        pending: Any = smp.save_checkpoint(tmp_path, "meanwhile", blocking=False)
        write = folder_module.fsync_write

        def while_the_thread_goes_on(path: Path, content: Any) -> Any:
            result = write(path, content)
            if threading.current_thread() is threading.main_thread():
                event.set()
                pending.wait(30)
            return result

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(folder_module, "fsync_write", while_the_thread_goes_on)
            smp.save(1, tmp_path / "f")
    assert smp.load(tmp_path / "f") == 1
    smp.barrier()
    assert not list(tmp_path.glob(".*"))
