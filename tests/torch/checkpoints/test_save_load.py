from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import smpkit.torch as smp
from smpkit.errors import CheckpointError
from smpkit.torch.checkpoints.save_load import load, save
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("world")


class NotPlain:
    """Needs this module's code to be rebuilt."""


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def save_everywhere(folder: str, config: dict[str, Any], v3: bool) -> int:
    smp.init(config)
    save({"rank": smp.rank()}, f"{folder}/f", v3=v3)
    smp.barrier()
    return load(f"{folder}/f")["rank"]


PIPELINE = {"pipeline_parallel_degree": 2, "ddp": True, "microbatches": 4}
GRID = {**PIPELINE, "tensor_parallel_degree": 2}


@pytest.mark.parametrize(
    ("config", "v3", "names"),
    [
        (PIPELINE, False, ["f_0", "f_1"]),
        (GRID, False, ["f_0_0", "f_0_1", "f_1_0", "f_1_1"]),
        (GRID, True, ["f_0_0_0", "f_0_1_0", "f_1_0_0", "f_1_1_0"]),
    ],
    ids=["no-tensor-parallelism", "tensor-parallelism", "v3"],
)
def test_trap_12_file_names_of_every_era(config: dict[str, Any], v3: bool, names: list[str], tmp_path: Path) -> None:
    size = len(names)
    assert run_ranks(save_everywhere, size, str(tmp_path), config, v3) == list(range(size))
    assert files(tmp_path) == names


@pytest.mark.parametrize("name", ["f_0", "f_0_0", "f_0_0_0"])
def test_trap_12_load_finds_the_names_of_other_releases(name: str, tmp_path: Path) -> None:
    smp.init()
    torch.save({"name": name}, tmp_path / name)
    assert load(tmp_path / "f") == {"name": name}
    assert load(str(tmp_path / "f"), back_compat=True) == {"name": name}


def test_a_whole_object_has_the_plain_name(tmp_path: Path) -> None:
    smp.init()
    save({"x": torch.ones(2)}, tmp_path / "f", partial=False)
    assert files(tmp_path) == ["f"]
    assert load(tmp_path / "f", partial=False)["x"].tolist() == [1, 1]


def test_a_missing_file_is_named_and_a_whole_one_suggested(tmp_path: Path) -> None:
    smp.init()
    with pytest.raises(CheckpointError, match=r"there is no file `.*f_0`, `.*f_0_0`, `.*f_0_0_0`"):
        load(tmp_path / "f")
    torch.save(1, tmp_path / "f")
    with pytest.raises(CheckpointError, match="partial=False"):
        load(tmp_path / "f")


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 cut short", b"\x80\x02}q\x00"], ids=str)
def test_a_damaged_file_is_a_checkpoint_error(content: bytes, tmp_path: Path) -> None:
    smp.init()
    (tmp_path / "f_0").write_bytes(content)
    with pytest.raises(CheckpointError, match="f_0"):
        load(tmp_path / "f")


def test_a_flipped_bit_of_what_is_read_is_a_checkpoint_error(tmp_path: Path) -> None:
    smp.init()
    save({"x": torch.ones(50)}, tmp_path / "f")
    data = bytearray((tmp_path / "f_0").read_bytes())
    data[data.index(b"\0\0\x80\x3f" * 50) + 3] ^= 0x40
    (tmp_path / "f_0").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"f_0 is damaged: Bad CRC-32"):
        load(tmp_path / "f")
    assert load(tmp_path / "f", pickle_load_args={"mmap": True})["x"].numel() == 50  # reads what is used


def test_an_object_that_needs_code_is_refused_until_the_caller_trusts_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # so that the class is none of the script's own
    smp.init()
    save({"x": NotPlain(), "y": 1}, tmp_path / "f")
    with pytest.raises(CheckpointError, match=r'NotPlain(?s:.*)hint: .*pickle_load_args=\{"weights_only": False\}'):
        load(tmp_path / "f")
    assert isinstance(load(tmp_path / "f", pickle_load_args={"weights_only": False})["x"], NotPlain)
    assert isinstance(load(tmp_path / "f", pickle_module=pickle)["x"], NotPlain)


def test_a_failed_save_leaves_the_older_file_and_nothing_else(tmp_path: Path) -> None:
    smp.init()
    save({"x": 1}, tmp_path / "f")
    with pytest.raises(CheckpointError, match="cannot be pickled"):
        save({"x": torch.ones(1000), "y": lambda: 0}, tmp_path / "f")
    assert files(tmp_path) == ["f_0"]
    assert load(tmp_path / "f") == {"x": 1}


def test_a_file_that_cannot_be_written_is_a_checkpoint_error(tmp_path: Path) -> None:
    smp.init()
    with pytest.raises(CheckpointError, match="cannot be written: No such file or directory"):
        save(1, tmp_path / "missing" / "f")


def test_the_file_may_be_overwritten_while_the_loaded_tensors_are_in_use(tmp_path: Path) -> None:
    smp.init()
    save({"x": torch.ones(1000)}, tmp_path / "f")
    loaded = load(tmp_path / "f")
    (tmp_path / "f_0").write_bytes(b"")
    assert loaded["x"].sum() == 1000
