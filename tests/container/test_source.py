from __future__ import annotations

import io
import os
import random
import tarfile
from pathlib import Path

import pytest

from smpkit.errors import LaunchError
from smpkit_container.__main__ import fetch_source, install_requirements, unpack
from smpkit_container.environment import Environment, Folders


def archive(path: Path, *members: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(b"x" * member.size) if member.isfile() else None)
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode, info.uid = kind, target, mode, 1234
    info.size = 3 if kind == tarfile.REGTYPE else 0
    return info


def test_files_and_folders_are_unpacked_as_root_s_own(tmp_path: Path) -> None:
    packed = archive(tmp_path / "a.tar.gz", member("train.py"), member("lib/run", mode=0o4777))
    unpack(packed, tmp_path / "code")
    assert (tmp_path / "code" / "train.py").read_text() == "xxx"
    run = (tmp_path / "code" / "lib" / "run").stat()
    assert (run.st_mode & 0o7777, run.st_uid) == (0o755, os.getuid())


@pytest.mark.parametrize(
    "bad",
    [
        member("../evil.py"),
        member("/etc/evil"),
        member("a/../../evil"),
        member("link", tarfile.SYMTYPE, "/etc/passwd"),
        member("hard", tarfile.LNKTYPE, "train.py"),
        member("pipe", tarfile.FIFOTYPE),
        member("device", tarfile.CHRTYPE),
    ],
    ids=lambda info: info.name,
)
def test_nothing_is_unpacked_from_an_archive_that_is_not_plain(tmp_path: Path, bad: tarfile.TarInfo) -> None:
    packed = archive(tmp_path / "a.tar.gz", member("train.py"), bad)
    with pytest.raises(LaunchError, match="the source archive holds"):
        unpack(packed, tmp_path / "deep" / "code")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.tar.gz", "code", "deep"]


def test_long_names_arrive(tmp_path: Path) -> None:
    name = "/".join(["folder" * 20] * 8) + "/größe.py"
    for tar_format in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        with tarfile.open(tmp_path / "a.tar.gz", "w:gz", format=tar_format) as tar:
            tar.addfile(member(name), io.BytesIO(b"xxx"))
        unpack(tmp_path / "a.tar.gz", tmp_path / str(tar_format))
        assert (tmp_path / str(tar_format) / name).read_text() == "xxx"


def test_no_bit_of_an_archive_may_be_another(tmp_path: Path) -> None:
    """Only gzip's checksum tells of a changed bit in a file's content; it stands behind what `tarfile` reads."""
    noise = random.Random(0)
    content = noise.randbytes(20_000)
    (tmp_path / "data").write_bytes(content)
    packed = tmp_path / "a.tar.gz"
    with tarfile.open(packed, "w:gz") as tar:
        tar.add(tmp_path / "data", "data")
    whole = packed.read_bytes()
    for number in range(61):
        damaged = bytearray(whole if number else whole[:-20])
        if number:
            damaged[noise.randrange(20, len(whole))] ^= 1 << noise.randrange(8)
        packed.write_bytes(damaged)
        with pytest.raises(LaunchError, match="cannot be unpacked"):
            unpack(packed, tmp_path / "code")
    packed.write_bytes(whole)
    unpack(packed, tmp_path / "code")
    assert (tmp_path / "code" / "data").read_bytes() == content


def test_code_that_is_there_is_left_alone_and_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").touch()
    fetch_source(Environment(Folders(tmp_path), framework={"sagemaker_submit_directory": "s3://nowhere/source.tar.gz"}))
    assert [path.name for path in (tmp_path / "code").iterdir()] == ["train.py"]
    assert "which are used instead of s3://nowhere/source.tar.gz" in capfd.readouterr().err


def test_requirements_that_cannot_be_met_end_with_pip_s_words(tmp_path: Path) -> None:
    install_requirements(tmp_path)  # none: nothing to do
    (tmp_path / "requirements.txt").write_text("./no-such-folder\n")
    with pytest.raises(LaunchError, match="no-such-folder"):
        install_requirements(tmp_path)


def test_an_archive_that_a_channel_brought_is_unpacked(tmp_path: Path) -> None:
    """Without network the service itself brings the sources, as the channel `code`."""
    brought = tmp_path / "input" / "data" / "code" / "sourcedir.tar.gz"
    brought.parent.mkdir(parents=True)
    with tarfile.open(brought, "w:gz") as tar:
        tar.add(__file__, "train.py")
    environment = Environment(Folders(tmp_path), framework={"sagemaker_submit_directory": str(brought)})
    fetch_source(environment)
    assert (environment.code / "train.py").read_bytes() == Path(__file__).read_bytes()
