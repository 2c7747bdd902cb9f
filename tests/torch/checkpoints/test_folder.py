from __future__ import annotations

from pathlib import Path

import pytest

from smpkit.errors import CheckpointError, UsageError
from smpkit.torch.checkpoints import folder as files
from smpkit.torch.checkpoints.file_systems import make_folder
from smpkit.torch.checkpoints.folder import Index


def make(path: Path, tag: str, order: int = 1, size: int = 3) -> Path:
    folder = path / f"{tag}_partial"
    folder.mkdir(parents=True)
    (folder / "model_0_0_0.safetensors").write_bytes(b"abc")
    (folder / files.INDEX).write_text(index_text(tag, order, size))
    return folder


def index_text(tag: str, order: int = 1, size: int = 3) -> str:
    entry = {"size": size, "crc32": 1, "rank": 0, "host": "h", "folder": 0}
    degrees = {"pipeline": 1, "tensor": 1}
    index = Index(tag, files.new_save_id(), order, degrees, "float32", "0", {"model_0_0_0.safetensors": entry})
    return index.to_text()


@pytest.mark.parametrize("path", ["s3://bucket/ck", Path("gs://bucket"), "~/ck"], ids=str)
def test_a_folder_that_is_elsewhere_is_not_made_here(path: str | Path) -> None:
    """Composer and TensorFlow's estimators take `s3://`, transformers `~`: here both would be names of folders."""
    with pytest.raises(UsageError, match="is no folder of this machine"):
        files.folder_at(path)


def test_a_checkpoint_is_no_folder_of_checkpoints(tmp_path: Path) -> None:
    """As transformers' `resume_from_checkpoint` names it; "resume if there is something" would start anew."""
    folder = make(tmp_path, "a")
    assert files.folder_at(tmp_path) == tmp_path
    with pytest.raises(UsageError, match=f"a_partial is a checkpoint itself\nhint: .* {tmp_path}, and its tag"):
        files.folder_at(folder)


def test_a_file_is_no_folder_of_checkpoints(tmp_path: Path) -> None:
    """`smp.latest_checkpoint` said that there is none; the first save, hours later, that the folder cannot be made."""
    (tmp_path / "model.pt").touch()
    with pytest.raises(UsageError, match=r"model\.pt is a file\nhint: name the folder"):
        files.folder_at(tmp_path / "model.pt")


def test_who_writes_an_older_one_into_newest_goes_back_to_it(tmp_path: Path) -> None:
    """As with DeepSpeed's `latest` (tdrussell/diffusion-pipe#263), and as `smpkit resume` reads it."""
    for order, tag in enumerate("abc", 1):
        make(tmp_path, tag, order)
    assert list(files.survey(tmp_path, partial=True).usable) == ["c_partial", "b_partial", "a_partial"]
    (tmp_path / files.NEWEST).write_text("a_partial\n")
    assert list(files.survey(tmp_path, partial=True).usable) == ["a_partial", "c_partial", "b_partial"]


def test_damage_is_said_with_the_sizes(tmp_path: Path) -> None:
    folder = make(tmp_path, "a", size=99)
    assert (
        files.find_damage(folder, files.read_index(folder))
        == f"{folder / 'model_0_0_0.safetensors'} has 3 bytes instead of 99"
    )


def test_publishing_replaces_a_folder_of_the_same_name(tmp_path: Path) -> None:
    old = make(tmp_path, "a", order=1)
    staged = files.staging_path(tmp_path, "a_partial", files.new_save_id())
    make(tmp_path / "elsewhere", "a", order=2).rename(staged)
    index = index_text("a", order=2)
    files.publish_folder(staged, old, index)
    assert files.read_index(old).order == 2
    assert not list(tmp_path.glob(".*"))
    files.publish_folder(staged, old, index)  # another leader on the same file system was faster: nothing to do
    assert files.read_index(old).order == 2
    with pytest.raises(FileNotFoundError):
        files.publish_folder(staged, old, index_text("a", order=3))


def test_whoever_looks_for_checkpoints_may_publish_one_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`smpkit export` or `smp.latest_checkpoint` of another process, between the index and the rename."""
    written = make(tmp_path / "elsewhere", "a")
    index = files.read_index(written)
    staged = files.staging_path(tmp_path, "a_partial", index.save_id)
    written.rename(staged)
    monkeypatch.setattr(files, "sync_folder", lambda _: files.finish_saves(tmp_path))
    files.publish_folder(staged, tmp_path / "a_partial", index.to_text())
    assert files.survey(tmp_path, partial=True).usable.keys() == {"a_partial"}


def test_what_dead_saves_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    ours, other = files.new_save_id(), files.new_save_id()
    files.staging_path(tmp_path, "a_partial", other).mkdir()
    (tmp_path / f".f_0.{other}.tmp").write_text("x")
    files.staging_path(tmp_path, "b_partial", ours).mkdir()
    (tmp_path / ".users.tmp").write_text("x")
    (tmp_path / "plain.tmp").write_text("x")
    files.remove_leftovers(tmp_path, ours)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".b_partial.{ours}.tmp", ".users.tmp", "plain.tmp"]


def test_the_order_of_a_damaged_checkpoint_is_not_given_again(tmp_path: Path) -> None:
    make(tmp_path, "a", order=1)
    (make(tmp_path, "cut", order=4) / "model_0_0_0.safetensors").unlink()
    assert files.next_order(tmp_path, 0) == 5


def test_a_folder_that_was_removed_is_called_that(tmp_path: Path) -> None:
    """`smpkit run` gives the script a link; `mkdir` said of it `File exists`."""
    folder, link = tmp_path / "kept", tmp_path / "checkpoints"
    link.symlink_to(folder)
    with pytest.raises(CheckpointError, match=f"the folder {folder} is gone: somebody removed it"):
        make_folder(link)
