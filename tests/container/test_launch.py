from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

from smpkit.errors import ConfigError, LaunchError, SmpkitError, UnsupportedError
from smpkit.observe.summary import read_summary
from smpkit_container.__main__ import main
from smpkit_container.console import Console
from smpkit_container.environment import Environment, Folders
from smpkit_container.launch import gpu_notice, launch, timeouts_from
from smpkit_container.topology import Topology


def test_waits_can_be_set_in_seconds() -> None:
    timeouts = timeouts_from({"SMPKIT_GRACE_SECONDS": "5", "SMPKIT_START_SECONDS": "2.5"})
    assert (timeouts.grace, timeouts.start) == (5.0, 2.5)
    assert timeouts_from({}).grace == 110


@pytest.mark.parametrize("text", ["long", "-1", "inf", "nan"])
def test_waits_without_end_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be a number of seconds"):
        timeouts_from({"SMPKIT_GRACE_SECONDS": text})


def start(base: Path, environ: dict[str, str], **framework: object) -> int:
    """Be the launcher of the job below `base`, and return its exit code."""
    console = Console(io.BytesIO(), io.BytesIO(), terminal=False, colour=False)
    return launch(Environment(Folders(base), framework=framework), environ, console)


def run(base: Path, script: str, *, mpi: bool = False, **variables: str) -> int:
    """Launch one rank of a script."""
    (base / "code").mkdir(exist_ok=True)
    (base / "code" / "train.py").write_text(script)
    return start(base, {**os.environ, **variables}, sagemaker_program="train.py", sagemaker_mpi_enabled=mpi)


@pytest.mark.parametrize(
    ("framework", "error", "message"),
    [
        ({}, LaunchError, "names no entry point"),
        ({"sagemaker_program": "no.py"}, LaunchError, "`no.py` is not in"),
        ({"sagemaker_program": "run.rb"}, UnsupportedError, "is neither a Python nor a shell script"),
        ({"sagemaker_program": "a.sh", "sagemaker_mpi_enabled": True}, ConfigError, "that `sagemaker_mpi_enabled`"),
    ],
    ids=["none", "missing", "another language", "shell and launcher"],
)
def test_entry_points_that_cannot_run(
    tmp_path: Path, framework: dict[str, object], error: type[SmpkitError], message: str
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "run.rb").touch()
    with pytest.raises(error, match=message):
        start(tmp_path, {}, **framework)


def test_the_program_tells_bad_files_and_leaves_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "input" / "config"
    config.mkdir(parents=True)
    (config / "hyperparameters.json").write_text("{")
    assert main(["train"], {"SMPKIT_BASE_DIR": str(tmp_path)}) == 2
    assert "cannot be read as JSON" in capsys.readouterr().err
    assert "cannot be read as JSON" in (tmp_path / "output" / "failure").read_text()


def test_the_program_becomes_any_other_command() -> None:
    command = [sys.executable, "-m", "smpkit_container", "echo", "--", "as", "it is"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "-- as it is\n"


def test_modules_of_the_sources_are_not_taken_for_python_s(tmp_path: Path) -> None:
    """The image's working folder is that of the sources."""
    (tmp_path / "json.py").write_text("raise SystemExit('of the sources')")
    dockerfile = resources.files("smpkit_container").joinpath("Dockerfile").read_text()
    [entry_point] = re.findall(r"^ENTRYPOINT (.*)", dockerfile, re.MULTILINE)
    command = [sys.executable, *json.loads(entry_point)[1:], "echo", "started"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("started\n", "")


@pytest.mark.parametrize("module", ["pydantic", "pip"], ids=["imports", "requirements"])
def test_a_stop_before_the_ranks_are_started_ends_the_launcher_and_what_it_started(tmp_path: Path, module: str) -> None:
    """The first process of a container does not get SIGTERM without a handler: it went on, until it was killed."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "requirements.txt").touch()
    (tmp_path / "first").mkdir()
    os.mkfifo(tmp_path / "pid")
    slow = f"import os, time\nopen('{tmp_path}/pid', 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    (tmp_path / "first" / f"{module}.py").write_text(slow)
    host = {"SMPKIT_BASE_DIR": str(tmp_path), "SMPKIT_HOSTS": "n1", "SLURM_NODEID": "0"}
    environ = {**os.environ, **host, "PYTHONPATH": f"{tmp_path / 'first'}:{':'.join(sys.path)}"}
    command = [sys.executable, "-m", "smpkit_container", "train"]
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as process:
        started = int((tmp_path / "pid").read_text())
        process.terminate()
        assert process.communicate()[1].endswith("Stopped before the ranks were started\n")
    assert process.returncode == 143
    with pytest.raises(ProcessLookupError):
        os.kill(started, 0)


def test_a_command_that_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve-nothing"], {}) == 127
    assert "`serve-nothing` cannot be run" in capsys.readouterr().err


@pytest.mark.parametrize("script", ["sub/train.py", "sub/train.sh"])
def test_a_script_in_a_folder_imports_from_the_folder_of_the_sources(tmp_path: Path, script: str) -> None:
    """`source_dir="."`, `entry_point="src/train.py"`: AWS's images have the sources on PYTHONPATH."""
    (tmp_path / "code" / "sub").mkdir(parents=True)
    (tmp_path / "code" / "beside.py").write_text("")
    (tmp_path / "code" / "sub" / "train.py").write_text("import beside")
    (tmp_path / "code" / "sub" / "train.sh").write_text(f"exec {sys.executable} sub/train.py")
    assert start(tmp_path, dict(os.environ), sagemaker_program=script) == 0


def test_mpirun_starts_its_ranks_inside_an_allocation_of_slurm(tmp_path: Path) -> None:
    """As in `salloc` or `srun --pty bash`: it would take the node of the allocation, and not find its own."""
    allocation = {"SLURM_JOBID": "7", "SLURM_JOB_ID": "7", "SLURM_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "1"}
    script = "import os; assert os.environ['SLURM_JOB_ID'] == '7'"
    assert run(tmp_path, script, mpi=True, **allocation) == 0


def test_a_failure_file_of_the_script_is_kept_and_an_older_one_is_not(tmp_path: Path) -> None:
    failure = tmp_path / "output" / "failure"
    failure.parent.mkdir()
    failure.write_text("of an earlier run")
    assert run(tmp_path, "import sys; sys.exit(4)", mpi=True) == 4
    assert failure.read_text().startswith("the script exited with code 4")
    own = "import os, sys; open(os.environ['SM_OUTPUT_FAILURE'], 'w').write('mine'); sys.exit(4)"
    assert run(tmp_path, own, mpi=True) == 4
    assert failure.read_text() == "mine"


def test_a_rank_that_fills_the_disk_leaves_room_for_the_reason(tmp_path: Path) -> None:
    """`smpkit runs` said `failed: exit code 1` of a run that had no space left, and SageMaker says no more, either."""
    script = (
        "import os, sys\nfrom pathlib import Path\nroom = Path(os.environ['SM_OUTPUT_FAILURE']).parent / '.room'\n"
        "sys.exit(4 if room.stat().st_blocks * 512 >= 16384 else 5)\n"
    )
    assert run(tmp_path, script) == 4
    assert sorted(path.name for path in (tmp_path / "output").iterdir() if path.is_file()) == ["failure"]


def test_a_job_whose_failure_file_cannot_be_written_ends_as_its_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a full disk, where the launcher ended with 1 and a bare `No space left on device`."""
    script = (
        "import os, sys\nfrom pathlib import Path\noutput = Path(os.environ['SM_OUTPUT_FAILURE']).parent\n"
        "output.rename(output.with_name('away'))\noutput.touch()\nsys.exit(4)\n"
    )
    assert run(tmp_path, script) == 4
    assert "the failure file could not be written: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("num_gpus", "environ", "words"),
    [
        (8, {}, ""),
        (0, {}, ""),
        (4, {}, "8 ranks share 4 GPUs, over gloo"),
        (1, {"CUDA_VISIBLE_DEVICES": "3"}, "8 ranks share 1 GPU (CUDA_VISIBLE_DEVICES is 3), over gloo"),
    ],
)
def test_ranks_that_share_gpus_are_told_before_they_start(num_gpus: int, environ: dict[str, str], words: str) -> None:
    machine = Environment(folders=Folders(Path("/opt/ml")), num_gpus=num_gpus)
    notice = gpu_notice(machine, Topology(("algo-1", "algo-2"), 0, 8, "torchrun"), environ)
    assert notice.startswith(words)
    assert bool(notice) == bool(words)


def test_an_exit_code_that_python_makes_zero_is_no_failure(tmp_path: Path) -> None:
    assert run(tmp_path, "import sys; sys.exit(256)") == 0
    assert not (tmp_path / "output" / "failure").exists()


def test_an_attempt_does_not_end_with_the_summary_of_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("of an earlier attempt")
    assert run(tmp_path, "", SMPKIT_RUN_DIR=str(tmp_path)) == 0
    assert not (tmp_path / "summary.json").exists()


def test_the_summary_tells_how_the_job_ended_and_not_rank_0_alone(tmp_path: Path) -> None:
    """A job of Slurm that was preempted, or failed while it ended, was `finished` in its report."""
    script = (
        "import os, sys\nfrom pathlib import Path\nfrom smpkit.observe.summary import RunSummary, write_summary\n"
        "write_summary(Path(os.environ['SMPKIT_RUN_DIR']), RunSummary('job', 0.0, 1.0, 5, 'finished'))\nsys.exit(3)\n"
    )
    assert run(tmp_path, script, SMPKIT_RUN_DIR=str(tmp_path)) == 3
    summary = read_summary(tmp_path)
    assert (summary.steps, summary.exit_reason.partition(":")[0]) == (5, "failed")
