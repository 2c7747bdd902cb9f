from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

import smpkit.torch as smp
from smpkit.cli.export import export
from smpkit.errors import SmpkitError
from smpkit.torch.checkpoints.export import LAYOUTS
from tests.cli.conftest import Smpkit, process


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    smp.init()
    smp.DistributedModel(nn.Linear(3, 2))
    smp.save_checkpoint(tmp_path, "step")
    smp.shutdown()
    return tmp_path / "step_partial"


def test_it_says_what_it_has_read(checkpoint: Path, tmp_path: Path, smpkit: Smpkit) -> None:
    result = smpkit("export", str(tmp_path), str(tmp_path / "out"))
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"exported {checkpoint} to {tmp_path / 'out'}\n"
    names = sorted(path.name for path in (tmp_path / "out" / "step_partial").iterdir())
    assert names == ["model_0.pt", "optimizer_0.pt", "user_content.pt"]


def test_a_process_of_its_own_does_the_work(checkpoint: Path, tmp_path: Path) -> None:
    done = process("export", str(checkpoint), str(tmp_path / "out"), "--layout", "hub")
    assert (done.returncode, done.stdout) == (0, "")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_what_is_wrong_is_one_sentence(checkpoint: Path, tmp_path: Path, smpkit: Smpkit) -> None:
    result = smpkit("export", str(checkpoint), str(tmp_path / "out"), "--layout", "smp-v2", code=2)
    assert result.stderr.startswith("error: invalid value for `--layout`: `smp-v2` is not one of")
    (checkpoint / "model_0_0_0.safetensors").unlink()
    result = smpkit("export", str(checkpoint), str(tmp_path / "out"), code=1)
    assert result.stderr == f"error: {checkpoint / 'model_0_0_0.safetensors'} is missing\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit, SmpkitError])
def test_of_an_export_that_was_ended_nothing_is_left(
    end: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After SIGKILL its process cannot remove what it has written, nor where Ctrl-C finds it in a long write."""

    def ended(*_: object) -> str:
        (tmp_path / ".out[1].5f.export" / "step_partial").mkdir(parents=True)
        raise end("ended")

    monkeypatch.setattr("smpkit.cli._with_torch.ask", ended)
    assert export.callback is not None
    with pytest.raises(end):
        export.callback(tmp_path, tmp_path / "out[1]", "hub")
    assert list(tmp_path.iterdir()) == []


def test_the_command_knows_every_layout() -> None:
    (option,) = (each for each in export.params if each.name == "layout")
    assert list(option.type.choices) == list(LAYOUTS)  # type: ignore[attr-defined]
