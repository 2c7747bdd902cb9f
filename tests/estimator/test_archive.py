"""The source archive: reproducible, without secrets, and harmless whatever is in the folder."""

from __future__ import annotations

import io
import os
import socket
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from smpkit.errors import ConfigError
from smpkit_container.__main__ import unpack
from smpkit_estimator.sources import collect, pack, packing_notes


def fill(folder: Path, **files: str) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def packed(folder: Path, *dependencies: Path) -> bytes:
    file = io.BytesIO()
    pack(collect(folder, dependencies), file)
    return file.getvalue()


def members(data: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as tar:
        return {member.name: member for member in tar}


def names(folder: Path, *dependencies: Path) -> list[str]:
    return list(members(packed(folder, *dependencies)))


def test_the_launcher_unpacks_what_was_packed(tmp_path: Path) -> None:
    """Both ends of the wire: the launcher takes plain files and folders only."""
    long = {f"{'d' * 90}/{'f' * 90}": "x", "d/" + "é" * 60: "long"}
    files = {"train.py": "print()", "a/b/c.py": "c", "empty": "", **long}
    source = fill(tmp_path / "src", **files)
    (source / "large").write_bytes(os.urandom(3 * 2**20 + 17))
    (source / "train.py").chmod(0o755)
    (source / "link").symlink_to("a")
    archive, code = tmp_path / "sourcedir.tar.gz", tmp_path / "code"
    archive.write_bytes(packed(source))
    unpack(archive, code)
    found = {str(path.relative_to(code)) for path in code.rglob("*") if path.is_file()}
    assert found == {*files, "large", "link/b/c.py"}
    assert all((code / name).read_bytes() == (source / name).read_bytes() for name in found)
    assert os.access(code / "train.py", os.X_OK)
    assert not os.access(code / "empty", os.X_OK)


def test_same_content_is_the_same_archive_whatever_times_owners_and_places(tmp_path: Path) -> None:
    """SDK v2's archive differs at every call, so everything is uploaded again."""
    files = {"b.py": "b", "a/c.py": "c", "a.py": "a"}
    first, second = fill(tmp_path / "1", **files), fill(tmp_path / "2", **dict(reversed(files.items())))
    os.utime(second / "b.py", (1, 1))
    (second / "a.py").chmod(0o600)
    assert packed(first) == packed(second)
    found = members(packed(first))
    assert list(found) == sorted(found)
    assert {(m.mtime, m.uid, m.gid, m.uname, m.gname) for m in found.values()} == {(0, 0, 0, "", "")}
    assert pack(collect(first)) == pack(collect(second), io.BytesIO())
    (second / "b.py").write_text("B")
    assert pack(collect(first)).digest != pack(collect(second)).digest


@pytest.mark.parametrize(
    "name",
    [
        *(".env", ".env.production", "prod.env", "id_rsa", "deploy_rsa", "server.key", "cert.pem", "store.p12"),
        *(".netrc", ".npmrc", ".aws/credentials", ".aws/config", ".ssh/config", "pkg/.env", "credentials.json"),
        *("service-account-prod.json", "ID_RSA", ".git-credentials", "kaggle.json"),
        *(".config/gcloud/application_default_credentials.json", "id_ed25519_sk", "id_ecdsa_sk", ".vault_pass"),
        *("secrets.yaml", "terraform.tfstate", "prod.tfvars"),
    ],
)
def test_secrets_are_never_packed_not_even_when_asked_for(tmp_path: Path, name: str) -> None:
    """SDK v2 packs `.env` and `.git`; keys of users ended in S3."""
    fill(tmp_path, **{"train.py": "", name: "secret", ".smpkitignore": f"!{name}\n!.env\n"})
    sources = collect(tmp_path)
    assert [entry.name for entry in sources.entries if not entry.name.endswith("ignore")] == ["train.py"]
    assert sources.secrets  # and it is told


@pytest.mark.parametrize("name", [".env.example", "environment.py", "keys.py", "monkey", "tokens.txt", ".envrc.md"])
def test_harmless_names_are_packed(tmp_path: Path, name: str) -> None:
    assert names(fill(tmp_path, **{name: "x"})) == [name]


def test_repositories_caches_and_environments_are_left_out(tmp_path: Path) -> None:
    caches = ("__pycache__/a.pyc", "a.pyc", ".venv/x", "env311/pyvenv.cfg", "env311/lib/x.py", "p/node_modules/m")
    fill(tmp_path, **dict.fromkeys(("train.py", ".git/config", *caches), ""))
    assert names(tmp_path) == ["train.py"]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({".gitignore": "*.csv\n", "a.csv": "", "b.py": ""}, [".gitignore", "b.py"]),
        ({".smpkitignore": "data/\n", "data/a": "", "x/data/b": "", "c": ""}, [".smpkitignore", "c"]),
        ({".gitignore": "/data\n", "data/a": "", "x/data/b": ""}, [".gitignore", "x/data/b"]),
        ({".gitignore": "*.txt\n!keep.txt\n", "a.txt": "", "keep.txt": ""}, [".gitignore", "keep.txt"]),
        ({".gitignore": "a.bin\n", ".smpkitignore": "!a.bin\n", "a.bin": ""}, [".gitignore", ".smpkitignore", "a.bin"]),
        ({".gitignore": "**/logs/**\n", "p/logs/a": "", "p/b": ""}, [".gitignore", "p/b"]),
        ({".gitignore": "# a comment\n\n\\#x\n", "#x": "", "y": ""}, [".gitignore", "y"]),
    ],
    ids=["glob", "folder", "anchored", "negated", "ours wins", "stars", "escape"],
)
def test_ignore_files_are_gits(tmp_path: Path, files: dict[str, str], expected: list[str]) -> None:
    assert names(fill(tmp_path, **files)) == expected


def test_ignore_files_below_the_root_are_named_and_not_read(tmp_path: Path) -> None:
    sources = collect(fill(tmp_path, **{".gitignore": "", "x/.gitignore": "a\n", "x/a": ""}))
    assert [entry.name for entry in sources.entries] == [".gitignore", "x/.gitignore", "x/a"]
    (note,) = packing_notes(pack(sources))
    assert note == "not read, as only ignore files at the root count: `x/.gitignore`"


def test_a_file_that_shrinks_while_it_is_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = collect(fill(tmp_path, log="x"))
    monkeypatch.setattr("smpkit_estimator.sources.os.fstat", lambda _: SimpleNamespace(st_size=4096))  # as it was
    with pytest.raises(ConfigError, match="`log` cannot be read: unexpected end of data"):
        pack(sources, io.BytesIO())


def test_what_links_inside_lead_to_is_packed_under_their_names(tmp_path: Path) -> None:
    """The launcher unpacks no links, so that an archive cannot write through one."""
    fill(tmp_path, **{"real/a.py": "a", "real/.env": "secret"})
    (tmp_path / "relative").symlink_to("real")
    (tmp_path / "absolute.py").symlink_to(tmp_path / "real" / "a.py")
    (tmp_path / "dangling").symlink_to("none")
    (tmp_path / "harmless.txt").symlink_to("real/.env")  # no way to pack a secret
    sources = collect(tmp_path)
    assert [entry.name for entry in sources.entries] == ["absolute.py", "real/a.py", "relative/a.py"]
    assert sources.specials == ["dangling"]
    assert sources.secrets == ["harmless.txt", "real/.env", "relative/.env"]


def test_links_that_lead_round_in_a_circle_are_refused(tmp_path: Path) -> None:
    fill(tmp_path, **{"a/x": "", "b/y": ""})
    (tmp_path / "a" / "to_b").symlink_to("../b")
    (tmp_path / "b" / "to_a").symlink_to("../a")
    (tmp_path / "b" / "up").symlink_to("..")
    with pytest.raises(ConfigError, match="leads to a folder that it is in"):
        collect(tmp_path)


@pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "pkg/../../outside", "circle", "/"])
def test_a_link_that_leads_out_is_refused(tmp_path: Path, target: str) -> None:
    """SDK v2 follows links, and packs what is behind them as if it were the user's source."""
    fill(tmp_path, outside="secret")
    source = fill(tmp_path / "src", **{"train.py": "", "pkg/x": ""})
    (source / "circle").symlink_to(target)
    with pytest.raises(ConfigError, match="the link `circle` leads"):
        collect(source)


def test_what_is_no_file_is_never_opened(tmp_path: Path) -> None:
    """Opening a pipe would wait for a writer for ever."""
    fill(tmp_path, **{"train.py": ""})
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        os.chdir(tmp_path)  # a socket's path may have only about 100 characters
        listener.bind("socket")
        sources = collect(tmp_path)
    assert sources.specials == ["pipe", "socket"]
    assert [entry.name for entry in sources.entries] == ["train.py"]


def test_dependencies_come_under_their_own_names(tmp_path: Path) -> None:
    source = fill(tmp_path / "src", **{"train.py": ""})
    fill(tmp_path / "lib", **{"a.py": "", ".git/x": "", "b/c.py": ""})
    fill(tmp_path, **{"one.py": ""})
    assert names(source, tmp_path / "lib", tmp_path / "one.py") == ["lib/a.py", "lib/b/c.py", "one.py", "train.py"]
    with pytest.raises(ConfigError, match=r"`train\.py` is both"):
        collect(source, [fill(tmp_path / "other", **{"train.py": ""}) / "train.py"])
    with pytest.raises(ConfigError, match="there is no file or folder"):
        collect(source, [tmp_path / "none"])


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    fill(tmp_path, **{"train.py": ""})
    with (tmp_path / os.fsdecode(b"\xff.py")).open("w"):
        pass
    with pytest.raises(ConfigError, match="not UTF-8"):
        collect(tmp_path)
