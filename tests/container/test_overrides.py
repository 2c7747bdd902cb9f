"""What travelled in another form arrives as it was meant."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from smpkit.errors import ConfigError
from smpkit_container.environment import Environment, Folders
from smpkit_container.overrides import PACKED, PARAMETERS_FILE, decode_overrides


def environment(base: Path, **framework: Any) -> Environment:
    (base / "code").mkdir(exist_ok=True)
    return Environment(folders=Folders(base), hyperparameters={"a": 1}, framework=framework)


def test_nothing_special_stays_as_it_is(tmp_path: Path) -> None:
    plain = environment(tmp_path, sagemaker_program="train.py")
    assert decode_overrides(plain) == plain


def test_parameters_are_read_from_the_sources(tmp_path: Path) -> None:
    sent = environment(tmp_path, **{PARAMETERS_FILE: "p.json"})
    (tmp_path / "code" / "p.json").write_text('{"partitions": 2}')
    assert decode_overrides(sent).mp_parameters == {"partitions": 2}
    assert decode_overrides(sent).framework == {}


def test_packed_hyperparameters_are_unpacked(tmp_path: Path) -> None:
    packed = json.dumps({"it's": "o'clock", "a.b": 2})
    decoded = decode_overrides(environment(tmp_path, **{PACKED: packed}))
    assert decoded.hyperparameters == {
        "a": 1,
        "it's": "o'clock",
        "a.b": 2,
    }


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "none.json", "list.json", ""])
def test_a_hostile_or_missing_file_is_refused(tmp_path: Path, name: str) -> None:
    sent = environment(tmp_path, **{PARAMETERS_FILE: name})
    (tmp_path / "code" / "list.json").write_text("[]")
    (tmp_path / "secret").write_text("{}")
    with pytest.raises(ConfigError):
        decode_overrides(sent)


@pytest.mark.parametrize("packed", ["[]", "{", 3])
def test_damaged_packed_values_are_refused(tmp_path: Path, packed: object) -> None:
    with pytest.raises(ConfigError, match="JSON object"):
        decode_overrides(environment(tmp_path, **{PACKED: packed}))


def test_a_launched_job_gets_its_long_parameters(tmp_path: Path) -> None:
    """End to end: the launcher exports them to the script as if they had come in a hyperparameter."""
    import subprocess
    import sys

    config = tmp_path / "input" / "config"
    config.mkdir(parents=True)
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").write_text("import os; print(os.environ['SM_HP_MP_PARAMETERS'][:40])")
    (code / "p.json").write_text(json.dumps({"ddp": True, "partition_file": "/" + "x" * 3000}))
    sent = {"sagemaker_program": '"train.py"', PARAMETERS_FILE: '"p.json"'}
    (config / "hyperparameters.json").write_text(json.dumps(sent))
    done = subprocess.run(
        [sys.executable, "-m", "smpkit_container", "train"],
        env={**os.environ, "SMPKIT_BASE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert (done.returncode, '{"ddp":true,"partition_file":"/xxxx' in done.stdout) == (0, True), done.stderr
