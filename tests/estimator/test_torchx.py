"""The component of TorchX, with the real one, in a folder of its own: it wants older packages than the tests."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from smpkit.errors import ConfigError
from tests.container.test_peers import free_ports
from tests.job_contract import PIPELINE, SCRIPT, uninterrupted

ROOT = Path(__file__).parents[2]
COMPONENT = ROOT / "estimator" / "smpkit_estimator" / "torchx.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def torchx(tmp_path_factory: pytest.TempPathFactory) -> str:
    """TorchX's packages, where Python looks before it does among those of the tests; nothing if they have it, too."""
    if find_spec("torchx") is not None:
        return ""
    folder = tmp_path_factory.mktemp("torchx")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--retries", "1", "--target", str(folder)]
    try:
        subprocess.run([*command, "torchx==0.7.0"], check=True, capture_output=True, text=True, timeout=240)
    except subprocess.SubprocessError as error:
        pytest.skip(f"TorchX cannot be installed: {error}")
    return str(folder)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text(SCRIPT.read_text())
    job = {
        "name": "job",
        "entry_point": "train.py",
        "source_dir": "src",
        "image": "registry.io/team/smpkit:1",
        "output": str(tmp_path / "out"),
        "compute": {"instance_count": 2},
        "distribution": PIPELINE,
        "environment": {"NAMES": "a,b"},
        "hyperparameters": {"steps": 6},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    return tmp_path


def run(torchx: str, scheduler: str, *options: str, component: tuple[str, ...] = (), code: int = 0) -> str:
    """Call `torchx run` with the component; return what it prints."""
    command = [sys.executable, "-m", "torchx.cli.main", "run", "--workspace", "", "--scheduler", scheduler, *options]
    places = [torchx, ROOT, ROOT / "estimator", ROOT / "container"]
    environ = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": ":".join(str(place) for place in places if place),
        "OMP_NUM_THREADS": "1",
    }
    words = [*command, f"{COMPONENT}:job", "--file", "job.yaml", *component]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=200, check=False)
    told = done.stdout + done.stderr
    assert done.returncode == code, told
    return told


def test_a_dry_run_shows_what_hosts_run(torchx: str, folder: Path) -> None:
    """On Slurm nothing of the job travels in variables, which TorchX cuts at commas."""
    told = run(torchx, "slurm", "--dryrun", component=("--max_retries", "2", "hyperparameters.text=a,'b' \"c\" $d"))
    line = next(line for line in told.splitlines() if line.startswith("' host "))
    words = shlex.split(line.removeprefix("'").removesuffix(":\\"))
    spec = json.loads(base64.b64decode(words[1]))
    assert words[2] == "src"
    assert spec["nodes"] == 2
    assert spec["environment"] == {"NAMES": "a,b"}
    assert json.loads(spec["hyperparameters"]["text"]) == "a,'b' \"c\" $d"
    assert spec["places"]["model"] == f"{folder}/out/{words[3]}/model"
    assert [f'JOB_COMPLETION_INDEX="{index}"' in told for index in range(3)] == [True, True, False]
    assert "${SLURM_JOB_NODELIST_HET_GROUP_0:-localhost}" in told
    assert not re.search(r"--export=\S*a,b", told)
    assert sorted(path.name for path in folder.iterdir()) == ["job.yaml", "src"]
    told = run(torchx, "kubernetes", "-cfg", "queue=q", "--dryrun")
    assert told.count("image: registry.io/team/smpkit:1") == 2
    assert "${VC_HOST_0_HOSTS:-localhost}" in told


def test_what_cannot_be_is_said_before_anything_runs(torchx: str, folder: Path) -> None:
    told = run(torchx, "local_cwd", component=("output=s3://bucket/out", "secrets.KEY.variable=HOME"), code=1)
    assert ConfigError.__name__ in told
    for words in ("output: is no folder that containers see: `s3://bucket/out`", "secrets: do not reach the hosts"):
        assert words in told


def test_two_hosts_of_torchx_are_one_job(torchx: str, folder: Path) -> None:
    with free_ports() as port:
        told = run(torchx, "local_cwd", component=("--port", str(port)))
        assert re.search(r"host/1.* \[rank 1\] step 6 on host-1", told)
        [losses] = folder.glob("out/job-*/model/losses.txt")
        assert losses.read_text() == uninterrupted()
        failing = ("--port", str(port), "hyperparameters.fail-on-rank=1")
        told = run(torchx, "local_cwd", component=failing, code=1)
    assert re.search(r"Failed after .*\(rank 1 on host-1, exit 1\)", told)
    assert "ValueError: bad batch" in told
