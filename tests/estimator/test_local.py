from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smpkit.cli._run import run_local
from smpkit.config.job import JobConfig
from smpkit.errors import ConfigError
from smpkit_estimator.local import LocalPlan, LocalRun, plan_local_run

MPI = {"mpi": {"enabled": True, "processes_per_host": 1}}


def plan(folder: Path, source: str = "", num_gpus: int = 0, **settings: Any) -> LocalPlan:
    (folder / "train.py").write_text(source)
    job = JobConfig.model_validate({"entry_point": "train.py", "distribution": MPI, **settings})
    return plan_local_run(job, folder, num_gpus)


def test_ranks_that_do_not_fit_this_machine_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="makes 100,000 ranks on one machine, which takes at most 4,096"):
        plan(tmp_path, compute={"instance_count": 100_000})
    with pytest.raises(ConfigError, match="partitions"):
        plan(tmp_path, num_gpus=3, distribution={"enabled": True, "parameters": {"partitions": 2}})


def test_secrets_come_from_the_users_own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {"HF_TOKEN": "team/hf", "W": {"entry": "team/all", "key": "wandb", "variable": "MY_W"}}
    monkeypatch.setenv("MY_W", "s3cr3t-2")
    with pytest.raises(ConfigError, match=r"secrets\.HF_TOKEN: the variable HF_TOKEN is not set on this machine"):
        plan(tmp_path, secrets=secrets)
    monkeypatch.setenv("HF_TOKEN", "s3cr3t-1")
    assert "s3cr3t" not in repr(plan(tmp_path, secrets=secrets))
    source = (
        "import os, pathlib\n"
        "assert (os.environ['HF_TOKEN'], os.environ['W']) == ('s3cr3t-1', 's3cr3t-2')\n"
        "config = pathlib.Path(os.environ['SM_INPUT_CONFIG_DIR'])\n"
        "assert not [path for path in config.iterdir() if 's3cr3t' in path.read_text()]\n"
    )
    assert run(tmp_path, source, secrets=secrets).exit_code == 0


def run(folder: Path, source: str, **settings: Any) -> LocalRun:
    (folder / "runs" / "one").mkdir(parents=True, exist_ok=True)
    return run_local(plan(folder, source, **settings), folder / "runs" / "one", ("--more",))


def test_what_is_not_on_this_machine_is_named_all_at_once(tmp_path: Path) -> None:
    for place in ("s3://bucket-name/src.tar.gz", "none"):
        with pytest.raises(ConfigError) as caught:
            plan(tmp_path, inputs={"train": "s3://bucket-name/data", "test": "./missing"}, source_dir=place)
        text = str(caught.value)
        assert "source_dir: " in text
        assert "inputs.train: is not on this machine: `s3://bucket-name/data`" in text
        assert "`--set inputs.train=./data`" in text
        assert "inputs.test: there is no file or folder" in text


@pytest.mark.parametrize(
    ("distribution", "hosts", "num_gpus", "ranks"),
    [
        ({"mpi": {"enabled": True, "processes_per_host": 2}}, 3, 0, 6),
        ({"torch_distributed": {"enabled": True, "processes_per_host": 2}}, 1, 8, 2),
        ({"enabled": True, "parameters": {"partitions": 2, "tensor_parallel_degree": 2, "ddp": True}}, 1, 0, 4),
        ({"enabled": True, "parameters": {"partitions": 2}, "mpi": {"enabled": True}}, 2, 4, 4),
        ({}, 1, 0, 1),
    ],
    ids=["all hosts", "as asked", "degrees", "gpus", "one"],
)
def test_number_of_ranks(tmp_path: Path, distribution: Any, hosts: int, num_gpus: int, ranks: int) -> None:
    made = plan(tmp_path, num_gpus=num_gpus, distribution=distribution, compute={"instance_count": hosts})
    assert made.ranks == ranks
    assert len(made.notes) == (hosts > 1)


def test_results_for_s3_stay_here_with_a_note(tmp_path: Path) -> None:
    made = plan(tmp_path, output="s3://bucket-name/out", checkpoints="s3://bucket-name/ckpt")
    assert (made.output, made.checkpoints) == (None, None)
    assert made.notes == (
        "`output` goes to a local folder, not to s3://bucket-name/out",
        "`checkpoints` goes to a local folder, not to s3://bucket-name/ckpt",
    )


WRITES = """
import os, sys
for name in ("SM_MODEL_DIR", "SM_OUTPUT_DATA_DIR", "SMPKIT_CHECKPOINT_DIR"):
    open(os.path.join(os.environ[name], "file"), "w").write(name)
"""


def test_folders_of_the_job_file_are_used_directly(tmp_path: Path) -> None:
    done = run(tmp_path, WRITES, output="./out", checkpoints="./ckpt")
    assert (done.exit_code, done.failure) == (0, None)
    assert (done.model, done.output_data) == (tmp_path / "out" / "model", tmp_path / "out" / "data")
    assert done.checkpoints == tmp_path / "ckpt"
    assert (tmp_path / "ckpt" / "file").read_text() == "SMPKIT_CHECKPOINT_DIR"


def test_what_the_job_file_names_no_place_for_is_in_the_folder_of_the_run(tmp_path: Path) -> None:
    done, folder = run(tmp_path, WRITES), tmp_path / "runs" / "one"
    assert (done.model, done.output_data) == (folder / "model", folder / "output" / "data")
    assert (folder / "checkpoints" / "file").is_file()
    assert {path.name for path in folder.iterdir()} <= {"model", "output", "checkpoints", "logs"}


def test_of_a_run_without_results_nothing_but_its_logs_is_left(tmp_path: Path) -> None:
    done = run(tmp_path, "")
    assert (done.model, done.output_data, done.checkpoints) == (None, None, None)
    assert {path.name for path in (tmp_path / "runs" / "one").iterdir()} <= {"logs"}


def test_the_script_sees_the_platform(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "text").write_text("hello")
    source = (
        "import os, pathlib, sys\n"
        "names = ('FOO', 'SM_CHANNELS', 'SM_CURRENT_HOST')\n"
        "assert [os.environ.get(name) for name in names] == ['a b', '[\"train\"]', 'algo-1']\n"
        "assert pathlib.Path(os.environ['SM_CHANNEL_TRAIN'], 'text').read_text() == 'hello'\n"
        f"assert (os.getcwd(), sys.argv) == ({str(tmp_path)!r}, ['train.py', '--lr', '0.1', '--more'])\n"
    )
    settings: dict[str, Any] = {"environment": {"FOO": "a b"}, "inputs": {"train": "./data"}}
    assert run(tmp_path, source, hyperparameters={"lr": 0.1}, **settings).exit_code == 0


def test_in_the_shell_of_a_managed_jobs_pod_a_run_is_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"HOSTS": "pod-0 pod-1", "FIRST_HOST": "127.0.0.1", "START_SECONDS": "1"}.items():
        monkeypatch.setenv(f"SMPKIT_{name}", value)
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    source = "import os\nassert (os.environ['SM_HOSTS'], os.environ['WORLD_SIZE']) == ('[\"algo-1\"]', '1')\n"
    assert run(tmp_path, source).exit_code == 0


def test_dependencies_lie_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "lib").mkdir()
    (tmp_path / "src" / "train.py").write_text("import lib.one; print(lib.one.X)")
    (tmp_path / "lib" / "one.py").write_text("X = 'from a dependency'")
    written = {"entry_point": "train.py", "source_dir": "src"}
    job = JobConfig.model_validate({**written, "dependencies": ["lib"]})
    assert run_local(plan_local_run(job, tmp_path), tmp_path / "run").exit_code == 0
    with pytest.raises(ConfigError) as caught:
        plan(tmp_path, source_dir="src", dependencies=["lib", "src/train.py", "none"])
    assert [problem.message.split("`")[1] for problem in caught.value.problems] == ["train.py", "none"]
