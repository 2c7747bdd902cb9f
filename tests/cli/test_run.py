from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smpkit.observe.runs import held
from smpkit.observe.summary import read_summary
from smpkit.observe.summary_text import block
from tests.cli.conftest import Smpkit

SMPKIT = [sys.executable, "-c", "from smpkit.cli.main import main; main()"]

JOB = """
entry_point: train.py
distribution:
  mpi: {enabled: true, processes_per_host: 2}
"""


def start(folder: Path, *arguments: str, file: str = "job.yaml", **options: Any) -> subprocess.Popen[str]:
    command = [*SMPKIT, "run", file, *arguments]
    environ = {**os.environ, "SMPKIT_SETTLE_SECONDS": "0.5", "NO_COLOR": "1", "TMPDIR": str(folder)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environ, stdout=pipe, stderr=pipe, text=True, **options)


def run(folder: Path, *arguments: str, file: str = "job.yaml") -> tuple[int, str, str]:
    with start(folder, *arguments, file=file) as process:
        out, err = process.communicate(timeout=150)
    return process.returncode, out, err


def write(folder: Path, source: str, job: str = JOB) -> None:
    (folder / "job.yaml").write_text(job)
    (folder / "train.py").write_text(source)


def test_success_says_what_ran_and_how_long(tmp_path: Path) -> None:
    write(tmp_path, "import sys; print(sys.argv[1:])")
    code, out, err = run(tmp_path, "--set", "hyperparameters.lr=0.1", "--", "--more", "x y")
    assert code == 0
    assert sorted(out.splitlines()) == [f"[rank {rank}] ['--lr', '0.1', '--more', 'x y']" for rank in range(2)]
    first, last, place = err.splitlines()
    assert re.fullmatch(r"run: runs/train-\d{8}-\d{6}", place)
    assert first == "Running `train` on this machine: 2 ranks with mpirun, no modelparallel parameters"
    assert last.startswith("Finished after ")


def test_a_script_runs_without_a_job_file(tmp_path: Path) -> None:
    source = "import os, sys; print(sys.argv[1:], os.environ.get('SM_HP_MP_PARAMETERS'), os.environ['WORLD_SIZE'])"
    write(tmp_path, source)
    (tmp_path / "job.yaml").unlink()
    options = ["--set", "distribution.mpi.enabled=true", "--ranks", "2", "-p", "ddp=true", "-H", "lr=0.1"]
    code, out, _ = run(tmp_path, *options, file="train.py")
    said = """['--lr', '0.1'] {"ddp":true} 2"""
    assert (code, sorted(out.splitlines())) == (0, [f"[rank {rank}] {said}" for rank in range(2)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian.py"], "no such file: `trian.py`\n    hint: did you mean `train.py`?"),
        (["train.py", "--ranks", "2", "-p", "pipeline_parallel_degree=3"], "divide the number of ranks (2), got 3"),
        (["job.yaml", "--ranks", "3", "-p", "pipeline_parallel_degree=2"], "must divide the number of ranks (3)"),
        (["job.yaml", "--set", "inputs.train=s3://bucket-name/data"], "is not on this machine"),
        (["job.yaml", "--set", "distribution.mpi.custom_mpi_options=-np 4"], "`-np 4` is set by smpkit"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_run_is_refused_at_once(here: Path, smpkit: Smpkit, arguments: list[str], message: str) -> None:
    write(here, "")
    assert message in smpkit("run", *arguments, code=2).stderr
    assert sorted(path.name for path in here.iterdir()) == ["job.yaml", "train.py"]


@pytest.mark.parametrize("command", ["validate", "plan", "submit"])
def test_other_commands_say_what_to_do_with_a_script(tmp_path: Path, smpkit: Smpkit, command: str) -> None:
    done = smpkit(command, str(tmp_path / "train.py"), code=2)
    assert "train.py: is a script\n    hint: `smpkit run " in done.stderr


FAILING = """
import os
import time
from pathlib import Path
from smpkit.observe.status import StatusPage
from smpkit.observe.summary import KindBytes
rank = int(os.environ["RANK"])
page = StatusPage(Path(os.environ["SMPKIT_STATUS_DIR"]), rank, (2, 1, 1))
page.begin_step(8)
page.end_step(8, 0.25)
page.write(KindBytes(weights=(rank + 1) * 2**20), None, None)
if rank == 1:
    raise ValueError("boo")
time.sleep(600)
"""


def test_a_failed_run_has_the_first_failing_ranks_story_and_a_summary_of_what_its_ranks_held(tmp_path: Path) -> None:
    write(tmp_path, FAILING)
    code, out, err = run(tmp_path)
    assert (code, out) == (1, "")
    assert "(rank 1, exit 1)\n\n    Traceback (most recent call last):\n" in err
    assert err.count("ValueError: boo") == 1
    assert "\nrank 0 stopped because of it\n" in err
    assert re.search(r"^run: runs/train-", err, re.MULTILINE)
    [folder] = (tmp_path / "runs").glob("train-*")
    summary = read_summary(folder)
    assert (summary.world_size, summary.pipeline, summary.tensor, summary.data) == (2, 2, 1, 1)
    assert (summary.exit_reason, summary.name) == ("failed: ValueError: boo", "train")
    assert list(block(summary)) == [
        "run     8 steps of 250.0 ms",
        "memory  at most 2.0 MiB in tensors (rank 1)",
        "note    memory is the most up to step 8, or in a step that failed",
    ]


KEPT = JOB + "checkpoints: ./kept\n"
SAVES = """
import os, pathlib, signal, time
def save(*_):
    folder = pathlib.Path(os.environ["SMPKIT_CHECKPOINT_DIR"])
    pathlib.Path(f"saving-{os.environ['RANK']}").touch()
    (folder / "newest").write_text("step_7\\x1b[2J_partial")
    raise SystemExit(0)
signal.signal(signal.SIGTERM, save)
pathlib.Path(f"ready-{os.environ['RANK']}").write_text(str(os.getpid()))
time.sleep(600)
"""


def await_ranks(folder: Path, what: str = "ready") -> list[int]:
    """Wait until both ranks have left a file, and return what it says."""
    deadline = time.monotonic() + 90
    files = [folder / f"{what}-{rank}" for rank in range(2)]
    while not all(file.exists() and (file.read_text() or what != "ready") for file in files):
        assert time.monotonic() < deadline, f"the ranks are not {what}"
        time.sleep(0.02)
    return [int(file.read_text() or 0) for file in files]


@pytest.mark.parametrize("key", ["checkpoints", "output"])
def test_two_runs_that_save_to_one_folder_are_refused(key: str, here: Path, smpkit: Smpkit) -> None:
    """Each would have replaced and removed what the other had saved."""
    write(here, "", KEPT)
    with held(here / "mine", alone=key):
        refused = smpkit("run", "job.yaml", "--set", f"{key}=mine", code=2)
    assert refused.stdout == ""
    assert f"error: another run saves its {key} to `{here / 'mine'}`\nhint: " in refused.stderr
    assert f"`--set {key}=FOLDER`" in refused.stderr
    assert not (here / "runs").exists()


@pytest.mark.parametrize("send", [os.killpg, os.kill], ids=["group", "pid"])
def test_ctrl_c_stops_the_ranks_and_is_130(tmp_path: Path, send: Callable[[int, int], None]) -> None:
    """A terminal sends the signal to the group, `kill -INT` and supervisors to the command alone."""
    write(tmp_path, SAVES, KEPT)
    with start(tmp_path, start_new_session=True) as process:
        await_ranks(tmp_path)
        send(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=90)
    assert process.returncode == 130
    await_ranks(tmp_path, "saving")
    assert "SIGINT: asked 2 ranks to end" in err
    assert re.search(r"^Stopped after [0-9.]+ s", err, re.MULTILINE)
    assert "Interrupted" not in err
    assert "Traceback" not in err


def test_a_run_that_was_asked_to_stop_says_so_with_what_it_saved(tmp_path: Path) -> None:
    write(tmp_path, SAVES, KEPT)
    with start(tmp_path) as process:
        await_ranks(tmp_path)
        process.terminate()
        _, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    assert re.search(r"^Stopped after [0-9.]+ s with checkpoint `step_7\\x1b\[2J`$", err, re.MULTILINE), err
    assert "Finished" not in err


def test_the_signal_to_the_command_alone_kills_the_ranks_when_it_comes_twice(tmp_path: Path) -> None:
    write(tmp_path, SAVES.replace("raise SystemExit(0)", "time.sleep(600)"), KEPT)
    with start(tmp_path) as process:
        await_ranks(tmp_path)
        process.send_signal(signal.SIGINT)
        await_ranks(tmp_path, "saving")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=90)
    assert process.returncode == 130, err


def test_killed_command_takes_the_ranks_along(tmp_path: Path) -> None:
    write(tmp_path, SAVES, KEPT)
    with start(tmp_path) as process:
        pids = await_ranks(tmp_path)
        process.kill()
        process.communicate(timeout=90)
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "a rank outlived the command"
        time.sleep(0.05)


@pytest.mark.usefixtures("here")
def test_options_of_the_image_are_refused_without_it(smpkit: Smpkit) -> None:
    result = smpkit("run", "train.py", "--hosts", "2", "--base-image", "x", "--torch", "y", code=2)
    said = "`--hosts` and `--base-image` and `--torch` cannot be given without `--docker`\nhint: add `--docker`"
    assert (result.stdout, said in result.stderr) == ("", True)


def test_without_torch_it_says_what_to_install(here: Path, smpkit: Smpkit, monkeypatch: pytest.MonkeyPatch) -> None:
    write(here, "print()", "entry_point: train.py\n")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    result = smpkit("run", "job.yaml", code=2)
    assert result.stdout == ""
    assert result.stderr == (
        "error: torch is not installed beside smpkit, and the ranks need it\n"
        "hint: `pip install 'smpkit[torch]'` (`smpkit doctor` names the small build for the CPU), or use `--docker`\n"
    )


def test_no_more_ranks_are_started_than_gpus_are_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\nfor n in 0 1 2; do echo "GPU $n: NVIDIA H200 (UUID: GPU-$n)"; done\n')
    tool.chmod(0o755)
    job = "entry_point: train.py\ndistribution: {torch_distributed: {enabled: true}}\n"
    write(tmp_path, "import os; print(os.environ['SM_NUM_GPUS'], os.environ['WORLD_SIZE'])", job)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    code, out, err = run(tmp_path, "--set", "environment.CUDA_VISIBLE_DEVICES=2,0")
    assert (code, sorted(out.splitlines())) == (0, ["[rank 0] 2 2", "[rank 1] 2 2"]), err
    assert "on this machine: 2 ranks, no" in err
    assert "warning" not in err


def test_results_are_told_with_their_place(tmp_path: Path) -> None:
    write(tmp_path, "import os; open(os.environ['SM_MODEL_DIR'] + '/model', 'w')", JOB + "output: ./out\n")
    code, _, err = run(tmp_path)
    assert code == 0
    assert f"model: {tmp_path / 'out' / 'model'}" in err


def test_exit_code_of_a_script_is_not_mistaken_for_bad_configuration(tmp_path: Path) -> None:
    write(tmp_path, "import sys; sys.exit(2)")
    assert run(tmp_path)[0] == 1


@pytest.mark.parametrize(("code", "end"), [(0, "Finished after "), (3, "(rank ")], ids=["finished", "failed"])
def test_a_summary_that_cannot_be_written_changes_no_end(tmp_path: Path, code: int, end: str) -> None:
    source = "import os, sys; os.makedirs(os.environ['SMPKIT_RUN_DIR'] + '/summary.json', exist_ok=True); sys.exit(%d)"
    write(tmp_path, source % code)
    ended, _, err = run(tmp_path)
    assert (ended, end in err) == (min(code, 1), True), err
    assert "warning: the summary cannot be written to `" in err
    assert re.search(r"^run: runs/train-\d{8}-\d{6}$", err, re.MULTILINE)
