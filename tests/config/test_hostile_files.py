"""Configuration files that somebody else wrote: they cost little, never block, and show nothing of other files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from smpkit.config.load import load
from smpkit.errors import ConfigError

JOB = """\
entry_point: train.py
distribution:
  smdistributed:
    modelparallel: {{enabled: true, parameters: {name}}}
"""


def job(folder: Path, name: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").touch()
    (folder / "job.yaml").write_text(JOB.format(name=name))
    return folder / "job.yaml"


def refusal(path: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(path)
    return caught.value


def test_a_pipe_is_refused_as_a_job_and_as_its_parameters(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "cannot be read: is a pipe or a device, not a file" in str(refusal(tmp_path / "pipe"))
    message = str(refusal(job(tmp_path, "pipe")))
    assert "job.yaml:4: " in message
    assert "is a pipe or a device" in message


SECRETS = {
    "shadow": "root:$6$verysecret$:19000:0:99999:7:::\ndaemon:*:19000:0:99999:7:::\n",
    "credentials": "[default]\naws_secret_access_key = verysecret\n",
    "text": "verysecret",
    "twice.yaml": "microbatches: 2\nmicrobatches: 3  # verysecret\n",
    "wrong.json": '{"microbatches": "four", "comment": "verysecret"}',
}


@pytest.mark.parametrize("name", SECRETS)
def test_no_line_of_a_file_elsewhere_is_shown(name: str, tmp_path: Path) -> None:
    secret = tmp_path / name
    secret.write_text(SECRETS[name])
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "link").symlink_to(secret)
    for given in (secret, f"../{name}", "link"):
        message = str(refusal(job(tmp_path / "jobs", given)))
        assert "verysecret" not in message
        assert "names a file outside the job's folder" in message


def test_lines_of_a_file_beside_the_job_are_shown(tmp_path: Path) -> None:
    (tmp_path / "wrong.json").write_text('{"microbatches": "four"}')
    assert '1 | {"microbatches": "four"}' in str(refusal(job(tmp_path, "wrong.json")))
