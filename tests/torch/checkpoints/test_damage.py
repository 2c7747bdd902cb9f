"""Damaged, forged and foreign checkpoints: found before anything is loaded, named, and never taken for none."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import smpkit
import smpkit.torch as smp
from smpkit.errors import CheckpointError
from smpkit.torch import latest_checkpoint, resume_from_checkpoint, save_checkpoint
from smpkit.torch.checkpoints import folder as folder_module
from smpkit.torch.checkpoints import reader as reader_module
from smpkit.torch.checkpoints.reader import read_whole
from tests.torch.checkpoints.two_layers import make, plain, train
from tests.torch.steps import on_ranks

DIFFERENT = ["model_0_0_0.safetensors", "optimizer_0_0_0.safetensors", "user_content.pt"]
"""The files that are not the same in any two saves."""
WIDTHS = 6, 40, 2  # in a file, there is more behind its middle than names and shapes
ENTRY = {"size": 1, "crc32": 1, "rank": 0, "host": "h", "folder": 0}


pytestmark = pytest.mark.usefixtures("world")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Two checkpoints, of which `two` is the newer, and a model that has been trained on."""
    model, optimizer = make(*WIDTHS)
    for step, tag in enumerate(("one", "two"), 1):
        train(model, optimizer)
        save_checkpoint(tmp_path, tag, user_content={"step": step, "noise": torch.rand(50)})
    train(model, optimizer)
    return tmp_path


def flip(path: Path, at: int | None = None, bit: int = 0) -> None:
    """Flip a bit of a file, by default behind its middle; in a file of JSON, of a digit there."""
    data = bytearray(path.read_bytes())
    if at is None:
        behind = range(len(data) * 2 // 3, len(data))
        at = next(place for place in behind if path.suffix != ".json" or chr(data[place]).isdigit())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def edit_index(folder: Path, **changes: Any) -> None:
    """Change an index as somebody who may write to the folder could: with a checksum that fits, that is, none."""
    index = json.loads((folder / "index.json").read_text())
    index.pop("crc32", None)
    (folder / "index.json").write_text(json.dumps({**index, **changes}))


def state_of_model() -> list[torch.Tensor]:
    optimizer: Any = smp.state.optimizer
    model: Any = smp.state.model
    moments = [value for each in optimizer.state_dict()["state"].values() for value in each.values()]
    return [*(each.detach().clone() for each in model.parameters()), *(each.clone() for each in moments)]


# --- nothing usable is not nothing ------------------------------------------------------------------------------------


def test_a_folder_of_damaged_checkpoints_is_not_an_empty_one(saved: Path) -> None:
    for tag in ("one", "two"):
        os.truncate(saved / f"{tag}_partial" / "model_0_0_0.safetensors", 10)
    for call in (latest_checkpoint, resume_from_checkpoint):
        with pytest.raises(CheckpointError) as caught:
            call(saved)
        for name in ("`one_partial`: ", "`two_partial`: ", "has 10 bytes instead of", "to start anew, use another"):
            assert name in str(caught.value)


@pytest.mark.parametrize("newest", ["gone_partial\n", "gone\n", "", "\x1b[2J", "../elsewhere", ".x", "a\0b"], ids=repr)
@pytest.mark.parametrize("partial", [True, False])
def test_what_newest_names_is_missed(newest: str, partial: bool, tmp_path: Path) -> None:
    (tmp_path / "newest").write_text(newest)
    with pytest.raises(CheckpointError, match=r"can be used; `(gone|gone_partial|newest)`: ") as caught:
        latest_checkpoint(tmp_path, partial=partial)
    assert str(caught.value).replace("\n", "").isprintable()


@pytest.mark.parametrize("partial", [True, False])
def test_a_checkpoint_of_the_other_kind_is_pointed_to(partial: bool, tmp_path: Path) -> None:
    make()
    save_checkpoint(tmp_path, "one", partial=partial)
    with pytest.raises(CheckpointError, match=f"`one(_partial)?`: it is a (full|partial) .*use partial={partial}"):
        latest_checkpoint(tmp_path, partial=not partial)
    if partial:
        with pytest.raises(CheckpointError, match="use partial=True"):
            resume_from_checkpoint(tmp_path, "one", partial=False)


@pytest.mark.parametrize("found", [3, 5])
def test_another_format_is_refused_with_what_to_do(found: int, saved: Path) -> None:
    edit_index(saved / "two_partial", format=found)
    calls = (lambda: latest_checkpoint(saved), lambda: resume_from_checkpoint(saved))
    for call in (*calls, lambda: resume_from_checkpoint(saved, "two")):
        with pytest.raises(CheckpointError) as caught:
            call()
        age, hint = ("an older", "save the model with partial=False") if found == 3 else ("a newer", "update smpkit")
        said = f"two_partial has format {found}, of {age} smpkit (`{smpkit.__version__}`); this one reads format 4"
        assert said in str(caught.value)
        assert hint in str(caught.value)


# --- checksums --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, "flipped bit") for name in (*DIFFERENT, "optimizer_0_0_0.pt", "index.json")]
    + [(name, "of another save") for name in DIFFERENT],
)
def test_a_damaged_file_is_named_and_the_older_checkpoint_is_used(name: str, kind: str, saved: Path) -> None:
    damaged, other = (saved / f"{tag}_partial" / name for tag in ("two", "one"))
    if kind == "flipped bit":
        flip(damaged)
    else:
        assert other.stat().st_size == damaged.stat().st_size
        shutil.copy(other, damaged)
    with pytest.warns(UserWarning, match=rf"`one_partial` in .* is used .*; `two_partial`: .*{name}") as warned:
        assert resume_from_checkpoint(saved)["step"] == 1
    assert warned[0].filename == __file__
    found = state_of_model()
    resume_from_checkpoint(saved, "one")
    assert all(map(torch.equal, found, state_of_model()))


TOO_MANY = OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.parametrize(
    ("module", "name", "error"),
    [
        (folder_module, "read_regular", TOO_MANY),
        (folder_module, "_stat", CheckpointError("it cannot be read")),
        (folder_module, "_crc_of_file", MemoryError("no memory")),
        (folder_module, "_crc_of_file", TOO_MANY),
        (folder_module, "_crc_of_file", RuntimeError("can't start new thread")),
    ],
    ids=["JSON", "size", "memory", "file", "threads"],
)
def test_a_fault_of_the_machine_is_no_damage(
    module: Any, name: str, error: Exception, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = getattr(module, name)

    def fail(source: Any, *args: Any, **options: Any) -> Any:
        if source.parent.name == "two_partial":
            raise error from (TOO_MANY if isinstance(error, CheckpointError) else None)
        return read(source, *args, **options)

    monkeypatch.setattr(module, name, fail)
    for newest in ("two", "gone"):  # then `two` is the newest that is left
        (saved / "newest").write_text(f"{newest}_partial\n")
        with pytest.raises(CheckpointError, match=r"^no checkpoint was loaded; rank 0: ") as caught:
            resume_from_checkpoint(saved)
        assert (os.strerror(errno.EMFILE) if error is TOO_MANY else str(error)) in str(caught.value)
        if name == "read_regular":
            with pytest.raises(CheckpointError, match=r"two_partial.*cannot be read: Too many open files"):
                latest_checkpoint(saved)


def test_going_back_is_said(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also where nobody goes back: a save may have been killed before it was named."""
    with caplog.at_level("INFO"):
        assert resume_from_checkpoint(saved)["step"] == 2
        assert "was saved later" not in caplog.text
        (saved / "newest").write_text("one_partial\n")
        assert resume_from_checkpoint(saved)["step"] == 1
    assert "Resuming from `one_partial`, which `newest` names; `two_partial` was saved later." in caplog.text
    (saved / "newest").unlink()
    assert resume_from_checkpoint(saved)["step"] == 2


def test_a_system_that_tells_no_cores_resumes(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert resume_from_checkpoint(saved)["step"] == 2


def test_a_damaged_checkpoint_that_is_asked_for_is_refused_unless_checksums_are_left_out(saved: Path) -> None:
    resume_from_checkpoint(saved)
    intact = state_of_model()
    flip(saved / "two_partial" / "optimizer_0_0_0.safetensors")
    with pytest.raises(CheckpointError, match=r"`two_partial` in .* was not loaded; rank 0: .* has the CRC-32"):
        resume_from_checkpoint(saved, "two")
    assert resume_from_checkpoint(saved, "two", load_optimizer=False)["step"] == 2  # does not read that file
    assert resume_from_checkpoint(saved, verify_checksums=False)["step"] == 2
    assert not all(map(torch.equal, intact, state_of_model()))


def test_a_full_checkpoint_carries_checksums_too(saved: Path) -> None:
    save_checkpoint(saved, "whole", partial=False)
    with zipfile.ZipFile(saved / "whole") as archive:
        assert archive.testzip() is None
        assert all(info.CRC for info in archive.infolist())
        member = max(archive.infolist(), key=lambda each: each.file_size)
    flip(saved / "whole", member.header_offset + member.file_size)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* `whole`: rank 0: .* is damaged: Bad CRC-32"):
        resume_from_checkpoint(saved, partial=False)
    resume_from_checkpoint(saved, partial=False, verify_checksums=False)


def test_content_beside_a_full_checkpoint_is_compared_too(tmp_path: Path) -> None:
    make()
    save_checkpoint(tmp_path, "whole", partial=False, user_content={"noise": torch.ones(50)})
    path = tmp_path / "user_content_whole"
    flip(path, path.read_bytes().index(b"\0\0\x80\x3f" * 50))  # ones
    with pytest.raises(CheckpointError, match=r"user_content_whole is damaged: Bad CRC-32"):
        resume_from_checkpoint(tmp_path, partial=False)


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_not_mixed(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that evaluates may read what a job that trains replaces."""
    read = reader_module.Reader.read

    def replaced(self: Any, *args: Any) -> None:
        read(self, *args)
        shutil.copytree(saved / "one_partial", saved / "new")
        shutil.rmtree(saved / "two_partial")
        (saved / "new").rename(saved / "two_partial")

    monkeypatch.setattr(reader_module.Reader, "read", replaced)
    reader = smp.CheckpointReader(saved / "two_partial")
    with pytest.raises(CheckpointError, match=r"another save replaced .*two_partial while it was read"):
        read_whole(reader, "model.0.weight")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_own_loader_is_told_of_a_flipped_bit(saved: Path) -> None:
    from torch.distributed.checkpoint import state_dict_loader as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    flip(saved / "two_partial" / "model_0_0_0.safetensors")
    for verify in (True, False):
        reader = smp.CheckpointReader(saved / "two_partial", verify_checksums=verify)
        with pytest.raises(CheckpointException, match="CRC-32") if verify else contextlib.nullcontext():
            dcp.load({"model": plain(*WIDTHS).state_dict()}, storage_reader=reader)
    # Also of one in the next folder, by a reader that has compared all files of the one before.
    state = {"model": plain(*WIDTHS).state_dict()}
    reader = smp.CheckpointReader(saved / "one_partial")
    reader._to_verify.clear()
    with pytest.raises(CheckpointException, match="CRC-32"):
        dcp.load(state, storage_reader=reader, checkpoint_id=saved / "two_partial")


@on_ranks(4, hosts=2)
def test_all_ranks_choose_the_newest_checkpoint_that_is_intact_on_all(tmp_path: Path) -> None:
    model, optimizer = make(*WIDTHS, ddp=True)
    own = tmp_path / f"host_{smp.rank() // smp.local_size()}"
    for step, tag in enumerate(("one", "two", "three"), 1):
        train(model, optimizer)
        save_checkpoint(own, tag, user_content={"step": step})
    if smp.rank() == 3:
        flip(own / "three_partial" / "model_0_0_3.safetensors")
        os.truncate(own / "two_partial" / "optimizer_0_0_3.safetensors", 7)
    smp.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert resume_from_checkpoint(own) == {"step": 1}
    warned = [str(each.message) for each in caught if "is used" in str(each.message)]
    assert len(warned) == (smp.rank() == 0)
    assert all("`three_partial`: rank " in text and "has the CRC-32" in text for text in warned)


# --- forged checkpoints -----------------------------------------------------------------------------------------------


def test_an_index_names_no_file_outside_its_folder(saved: Path) -> None:
    outside = saved / "outside.pt"
    shutil.copy(saved / "two_partial" / "optimizer_0_0_0.pt", outside)
    index = json.loads((saved / "two_partial" / "index.json").read_text())
    for name in ("../outside.pt", str(outside), "..", "a/b"):
        edit_index(saved / "two_partial", files={**index["files"], name: ENTRY})
        with pytest.raises(CheckpointError, match=r"index\.json is damaged: `.*` is not a file in this folder"):
            resume_from_checkpoint(saved, "two")


@pytest.mark.timeout(40)  # where it would wait for a writer
@pytest.mark.parametrize("name", ["newest", "index.json", "model_0_0_0.safetensors", "optimizer_0_0_0.pt"])
def test_a_pipe_is_no_file(name: str, saved: Path) -> None:
    path = saved / name if name == "newest" else saved / "two_partial" / name
    path.unlink()
    os.mkfifo(path)
    with pytest.warns(UserWarning, match="(a pipe|instead of)"):
        resume_from_checkpoint(saved)
    with pytest.raises(CheckpointError):
        smp.load(path, partial=False)


def test_a_compressed_archive_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(1 << 22)}, tmp_path / "plain")
    with (
        zipfile.ZipFile(tmp_path / "plain") as plain,
        zipfile.ZipFile(tmp_path / "packed", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for info in plain.infolist():
            packed.writestr(info.filename, plain.read(info))
    assert (tmp_path / "packed").stat().st_size < 1 << 17
    with pytest.raises(CheckpointError, match=r"compressed member(?s:.*)hint: "):
        smp.load(tmp_path / "packed", partial=False)
    assert smp.load(tmp_path / "plain", partial=False)["weight"].numel() == 1 << 22


def test_members_that_claim_the_same_bytes_are_refused(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(1 << 12)}, tmp_path / "plain")
    data = (tmp_path / "plain").read_bytes()
    with zipfile.ZipFile(tmp_path / "plain") as archive:
        start, end = archive.start_dir, data.rindex(b"PK\5\6")
        entries, count = data[start:end], len(archive.infolist())
    end_record = bytearray(data[end : end + 22])
    for at, value, width in ((8, 3 * count, 2), (10, 3 * count, 2), (12, 3 * len(entries), 4)):
        end_record[at : at + width] = value.to_bytes(width, "little")
    end_record[16:20] = start.to_bytes(4, "little")
    (tmp_path / "forged").write_bytes(data[:start] + 3 * entries + end_record)
    with pytest.raises(CheckpointError, match="forged is damaged: "):
        smp.load(tmp_path / "forged", partial=False)


@on_ranks(2, hosts=2)
def test_two_saves_under_one_tag_are_not_mixed(tmp_path: Path) -> None:
    make(ddp=True)
    own = tmp_path / f"host_{smp.rank()}"
    save_checkpoint(own, "one")
    shutil.copytree(own / "one_partial", own / "kept")
    save_checkpoint(own, "one")
    if smp.rank() == 1:
        shutil.rmtree(own / "one_partial")
        (own / "kept").rename(own / "one_partial")
    smp.barrier()
    with pytest.raises(CheckpointError, match=r"can be used; `one_partial`: hosts .* have different saves of it: "):
        resume_from_checkpoint(own)
    with pytest.raises(CheckpointError, match=r"was not loaded; ranks 0 and 1: there is no folder .*/none_partial$"):
        resume_from_checkpoint(tmp_path, "none")
    with pytest.raises(CheckpointError, match="hosts have different saves of this name"):
        resume_from_checkpoint(own, "one")
