"""Kill a rank at any moment of a save: the checkpoint before it, or the whole new one, is what the next job finds."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from smpkit.testing.ranks import RankFailed
from smpkit.torch.checkpoints import agreement, background
from smpkit.torch.checkpoints import folder as checkpoint_files
from tests.forked import Script
from tests.ranks import run_ranks
from tests.torch.checkpoints.two_layers import plain
from tests.torch.steps import train_step, wrap

MOMENTS: list[tuple[Any, str]] = [
    (checkpoint_files, "fsync_write"),
    (checkpoint_files, "publish_folder"),
    (checkpoint_files, "atomic_write"),
    (agreement, "agree"),
    (background, "agree"),
]
"""What a save does, one after the other: a rank is killed before or after one of them."""


def begin() -> Any:
    return wrap(plain(), pipeline_parallel_degree=2, ddp=True, timeout_seconds=60)


def killed_while_saving(path: str, victim: int, moment: int, after: bool) -> int:
    """Save twice; on `victim`, die at one moment of the second save. Return how many moments there were."""
    train_step(begin(), torch.ones(1, 3))
    smp.save_checkpoint(path, "good", user_content="good")
    passed = 0

    def watched(act: Callable[..., Any]) -> Callable[..., Any]:
        def acting(*args: Any, **kwargs: Any) -> Any:
            nonlocal passed
            passed += 1
            if passed == moment and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            mine = passed
            result = act(*args, **kwargs)
            if mine == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return acting

    if smp.rank() == victim:
        for module, name in MOMENTS:
            setattr(module, name, watched(getattr(module, name)))
    smp.save_checkpoint(path, "next", user_content="next")
    return passed


def found_by_the_next_job(path: str) -> tuple[str, list[str]]:
    begin()
    content: str = smp.resume_from_checkpoint(path)
    smp.save_checkpoint(path, "last")
    return content, sorted(each.name for each in Path(path).iterdir())


def check(path: Path, victim: int, moment: int, after: bool) -> None:
    with pytest.raises(RankFailed, match=r"died without a traceback \(exit code -9\)"):
        run_ranks(killed_while_saving, 2, str(path), victim, moment, after)
    for content, left in run_ranks(found_by_the_next_job, 2, str(path)):
        assert content == "good" or (content == "next" and "next_partial" in left)
        assert {"good_partial", "last_partial", "newest"} <= set(left)
        assert all(not name.startswith(".") for name in left)


@pytest.mark.parametrize(("victim", "moment"), [(1, 3), (0, 8)])
def test_a_rank_killed_in_a_save_harms_no_checkpoint(victim: int, moment: int, tmp_path: Path) -> None:
    check(tmp_path, victim, moment, after=False)


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("victim", [0, 1])
def test_every_moment_of_a_save(victim: int, after: bool, tmp_path: Path) -> None:
    moments = run_ranks(killed_while_saving, 2, str(tmp_path / "none"), victim, 0, after)[victim]
    assert moments >= 5
    for moment in range(1, moments + 1):
        check(tmp_path / str(moment), victim, moment, after)


def saved_and_killed_between_renames(folder: Path) -> None:
    rename = Path.rename

    def dying(source: Path, target: Path) -> Path:
        if source.name.startswith(".last_partial"):
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(source, target)

    Path.rename = dying  # type: ignore[method-assign, assignment]
    smp.save_checkpoint(folder, "last", user_content="new")


@pytest.mark.usefixtures("world")
def test_a_tag_that_is_saved_again_and_again_is_never_gone(tmp_path: Path) -> None:
    """Scripts save under `last` after each epoch: whoever was killed there had no checkpoint at all."""
    folder, by_tag, after_another = (tmp_path / name for name in ("folder", "by_tag", "after_another"))
    wrap(nn.Linear(64, 64))
    smp.save_checkpoint(folder, "last", user_content="old")
    child = os.fork()
    if not child:
        try:
            saved_and_killed_between_renames(folder)
        finally:
            os._exit(0)
    assert os.waitpid(child, 0) == (child, signal.SIGKILL)
    assert not list(folder.glob("*_partial"))
    for copy in (by_tag, after_another):
        shutil.copytree(folder, copy)
    smp.save_checkpoint(after_another, "other")
    assert smp.latest_checkpoint(folder) == "last_partial"
    assert smp.resume_from_checkpoint(folder) == "new"
    assert smp.resume_from_checkpoint(by_tag, "last") == "new"
    assert smp.resume_from_checkpoint(after_another, "last") == "new"


# --- told to stop while a save runs in the background -----------------------------------------------------------------


ROOT = Path(__file__).parents[3]


SCRIPT = """
import os, signal, sys, threading, time, torch
import smpkit.torch as smp
from smpkit.torch.checkpoints import save as saving
{handler}
smp.init({{}})
model = smp.DistributedModel(torch.nn.Linear(64, 64))
smp.save_checkpoint({folder!r}, "good", user_content="good")
write = saving._write_files
def slowly(save, part):
    first, *others = part.contents
    content = part.contents.pop(first)
    write(save, part)
    os.write(1, b"writing\\n")
    time.sleep(1.5)
    part.contents[first] = content
    return write(save, part)
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
@pytest.mark.usefixtures("world")
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
    wrap(nn.Linear(64, 64))
    assert smp.resume_from_checkpoint(folder) == newest
    smp.save_checkpoint(folder, "next")
    assert not list(folder.glob(".*"))  # what the killed save left is gone
