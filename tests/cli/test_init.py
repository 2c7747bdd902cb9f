from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.cli.conftest import Smpkit


def test_it_writes_a_job_that_validates_and_overwrites_nothing(tmp_path: Path, smpkit: Smpkit) -> None:
    folder = tmp_path / "new"
    smpkit("init", str(folder), code=0)
    assert sorted(path.name for path in folder.iterdir()) == ["job.yaml", "train.py"]
    smpkit("validate", str(folder / "job.yaml"), code=0)
    compile((folder / "train.py").read_text(), "train.py", "exec")
    assert "is there already" in smpkit("init", str(folder), code=2).stderr
    smpkit("init", str(folder), "--force", code=0)


@pytest.mark.parametrize(
    ("scripts", "arguments", "taken", "said"),
    [
        (["mine.py"], [], "mine.py", "wrote job.yaml\nhint:"),
        (
            ["data.py", "test_data.py", "pretrain.py", "my eval.py"],
            [],
            "pretrain.py",
            "it runs `pretrain.py`; `--entry-point data.py --force` takes another script",
        ),
        (["train.py", "my eval.py"], ["--entry-point", "my eval.py"], "my eval.py", "wrote job.yaml\nhint:"),
    ],
)
def test_beside_scripts_it_writes_their_job_alone(
    here: Path, smpkit: Smpkit, scripts: list[str], arguments: list[str], taken: str, said: str
) -> None:
    for name in scripts:
        Path(name).write_text("own = 1")
    assert said in smpkit("init", *arguments).stderr
    job = yaml.safe_load(Path("job.yaml").read_text())
    assert (job["entry_point"], "hyperparameters" in job) == (taken, False)
    smpkit("validate", "job.yaml", code=0)
    assert sorted(path.name for path in here.iterdir()) == sorted([*scripts, "job.yaml"])
    assert {Path(name).read_text() for name in scripts} == {"own = 1"}


def test_a_script_that_is_not_there_is_named(here: Path, smpkit: Smpkit) -> None:
    (here / "sample.py").touch()
    done = smpkit("init", "--entry-point", "sampel.py")
    assert (done.exit_code, done.stderr) == (2, "error: `sampel.py` is not a script\nhint: did you mean `sample.py`?\n")


def test_a_script_elsewhere_gets_its_job_file_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smpkit: Smpkit
) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("../there/train.py", "notes.txt"):
        Path(name).touch()
    done = smpkit("init", "--entry-point", "../there/train.py")
    assert (done.exit_code, sorted(Path().iterdir())) == (2, [Path("notes.txt")])
    assert done.stderr.endswith("hint: `smpkit init ../there --entry-point train.py`\n")
    assert smpkit("init", "--entry-point", "notes.txt").stderr == "error: `notes.txt` is not a script\n"
    smpkit("init", "../there", "--entry-point", str(tmp_path / "there/train.py"), code=0)
    smpkit("validate", "../there/job.yaml", code=0)
