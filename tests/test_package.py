"""What `pip install` gets: the files, a README for a package index, the commit, the same bytes from every build."""

from __future__ import annotations

import email
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from readme_renderer import markdown

from hatch_build import absolute
from smpkit.version import FILE, commit, version_of

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "scripts/constraints.txt"
IDENTITY = ("-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false")


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "PYTHONPATH"))}
    done = subprocess.run(
        command, cwd=cwd, env=environment | variables, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout.strip()


def copy_of_the_tree(folder: Path) -> Path:
    """Copy what builds read, with today's times and other permissions."""
    for name in ("smpkit", "estimator", "container", "docs", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "runs"))
    for path in [*ROOT.glob("*.md"), *map(ROOT.joinpath, ("hatch_build.py", "pyproject.toml"))]:
        shutil.copy(path, folder / path.relative_to(ROOT))
    for name in ("LICENSE", "Dockerfile", ".gitignore"):
        shutil.copy(ROOT / name, folder / name)
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - 5, time.time() - 5))
        path.chmod(0o700 if path.is_dir() else 0o600)
    return folder


def committed(folder: Path) -> str:
    """Make a folder a repository with all its files; return the commit."""
    run("git", "init", "-q", cwd=folder)
    run("git", "add", "-A", cwd=folder)
    run("git", *IDENTITY, "commit", "-q", "-m", "All", cwd=folder)
    return run("git", "rev-parse", "--short=12", "HEAD", cwd=folder)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = copy_of_the_tree(tmp_path_factory.mktemp("source") / "smpkit")
    committed(folder)
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", target, cwd=source)
    (built,) = target.iterdir()
    return built


# --- what is in it ----------------------------------------------------------------------------------------------------


def test_a_wheel_holds_the_packages_and_nothing_else(source: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        written = archive.read(FILE).decode().strip()
    packages = {"smpkit": "smpkit", "estimator/smpkit_estimator": "smpkit_estimator"}
    packages["container/smpkit_container"] = "smpkit_container"
    wanted = {
        f"{package}/{path.relative_to(source / folder).as_posix()}"
        for folder, package in packages.items()
        for path in (source / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert {name for name in held if ".dist-info/" not in name} == wanted | {FILE}
    assert {"smpkit/py.typed", "smpkit_container/Dockerfile", "smpkit_container/install.sh"} <= held
    assert written == commit(source)


def test_the_metadata_are_valid_and_the_readme_renders(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(name)
    metadata = Metadata.from_email(text, validate=True)
    assert metadata.description_content_type is not None
    assert metadata.description_content_type.startswith("text/markdown")
    page = markdown.render(metadata.description or "")
    assert page is not None
    assert "<pre" in page
    assert "<!--" not in page
    addresses = re.findall(r'(?:href|src)="([^"]*)"', page)
    assert [address for address in addresses if not address.startswith(("https://", "#"))] == []
    message = email.message_from_bytes(text)
    urls = [f"{name}, {url}" for name, url in (metadata.project_urls or {}).items()]
    assert message.get_all("Project-URL", []) == urls


def test_links_are_absolute_where_there_is_an_address_and_words_where_there_is_none() -> None:
    page = "[a](docs/a.md#b) ![drawn](docs/a.svg) [c](https://c.example) [d](#here)\n"
    known = absolute(page, "https://code.example/smpkit")
    assert known == (
        "[a](https://code.example/smpkit/blob/main/docs/a.md#b) ![drawn](https://code.example/smpkit/raw/main/docs/a.svg)"
        " [c](https://c.example) [d](#here)\n"
    )
    assert absolute(page, "") == "a  [c](https://c.example) [d](#here)\n"


# --- the commit -------------------------------------------------------------------------------------------------------


def test_a_clone_knows_its_commit_and_whether_files_have_changed(source: Path) -> None:
    known = run("git", "rev-parse", "--short=12", "HEAD", cwd=source)
    assert commit(source) == known
    page = source / "README.md"
    text = page.read_text(encoding="utf-8")
    page.write_text("changed")
    assert commit(source) == f"{known}-dirty"
    page.write_text(text, encoding="utf-8")


def test_a_repository_around_smpkit_is_never_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy inside somebody's repository, an environment inside it, and a hook of it, are all not smpkit's clone."""
    folder = tmp_path / "theirs" / "vendored"
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder.parent / "pyproject.toml").write_text('[project]\nname = "theirs"\n')
    committed(folder.parent)
    asked = tmp_path / "asked"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/git").write_text(f'#!/bin/sh\ntouch {asked}\nexec {shutil.which("git")} "$@"\n')
    (tmp_path / "bin/git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert commit(folder) is None
    assert commit(folder.parent) is None
    assert not asked.exists()

    ours = tmp_path / "ours"
    ours.mkdir()
    shutil.copy(ROOT / "pyproject.toml", ours)
    known = committed(ours)
    monkeypatch.setenv("GIT_DIR", str(folder.parent / ".git"))  # as in a hook of theirs
    asked.unlink(missing_ok=True)
    assert commit(ours) == known
    assert asked.exists()


def test_no_git_means_no_commit(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert commit(source) is None


# --- the version ------------------------------------------------------------------------------------------------------


def test_the_tag_is_the_version_of_a_clone_and_of_what_is_built_from_it(source: Path, tmp_path: Path) -> None:
    clone = tmp_path / "smpkit"
    run("git", "clone", "-q", source, clone)
    assert version_of(clone) == "0.1.0.dev0"
    run("git", "tag", "v0.3.9", cwd=clone)
    assert version_of(clone) == "0.3.9"
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path, cwd=clone)
    run("tar", "-xzf", tmp_path / "smpkit-0.3.9.tar.gz", "-C", tmp_path)
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=tmp_path / "smpkit-0.3.9")
    assert (tmp_path / "smpkit-0.3.9-py3-none-any.whl").is_file()
    run("git", *IDENTITY, "commit", "-q", "--allow-empty", "-m", "Next", cwd=clone)
    assert version_of(clone) == "0.3.10.dev1"


# --- builds -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_builds_are_equal_byte_for_byte(source: Path, tmp_path: Path) -> None:
    other = tmp_path / "another folder"
    shutil.copytree(source, other)
    for path in other.rglob("*"):
        if ".git" not in path.parts:
            os.utime(path, (1_500_000_000, 1_500_000_000))
            path.chmod(0o755 if path.is_dir() else 0o644)
    sums = []
    for number, folder in enumerate((source, other)):
        target = tmp_path / str(number)
        run(sys.executable, "-m", "build", "--no-isolation", "-o", target, folder, SOURCE_DATE_EPOCH="1700000000")
        sums.append({path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in target.iterdir()})
    assert len(sums[0]) == 2
    assert sums[0] == sums[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_wheel_and_sdist_install_into_an_empty_environment(source: Path, tmp_path: Path) -> None:
    """The sdist is built with what pip downloads for it, as a user's is, and still knows its commit."""
    probe = ("-m", "pip", "download", "-q", "--no-deps", "-d", str(tmp_path / "probe"), "hatchling")
    if subprocess.run([sys.executable, *probe], capture_output=True, check=False, timeout=120).returncode != 0:
        pytest.skip("no package index can be reached")
    run(sys.executable, "-m", "build", "-o", tmp_path / "dist", source)
    known = run("git", "rev-parse", "--short=12", "HEAD", cwd=source)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for kind in ("*.whl", "*.tar.gz"):
        (built,) = (tmp_path / "dist").glob(kind)
        environment = tmp_path / f"env{built.suffix}"
        run(sys.executable, "-m", "venv", environment)
        python = environment / "bin/python"
        run(python, "-m", "pip", "install", "-q", "-c", CONSTRAINTS, built)
        assert run(environment / "bin/smpkit", "--version", cwd=elsewhere).endswith(f"(commit {known})")
        drawn = run(environment / "bin/smpkit", "plan", "--pp", "2", "--microbatches", "4", cwd=elsewhere)
        assert "stage 1  .  F0 B0" in drawn
        run(python, "-c", "import smpkit_container, smpkit_estimator, smpkit; smpkit.Estimator", cwd=elsewhere)
    with tarfile.open(next((tmp_path / "dist").glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {FILE, "README.md", "hatch_build.py", "examples/finetune/train.py"} <= names
