"""The folders of runs: what is written before a job is sent, and found again by its name.

::

    ~/smpkit-runs/NAME/     SMPKIT_RUNS or `backend.slurm.folder` moves it; only its owner may look inside
        spec.json           what every node needs to know
        script.sh           the batch script
        slurm.json          the id that Slurm gave it
        token, secrets.json what nobody else may read
        code/               the unpacked sources
        logs/               one file for each attempt and node, and slurm.log, what the batch script printed
        nodes/NODE/         what stands for /opt/ml on a node, with the failure file
        model/ data/ checkpoints/   unless the job file names other places
        stopped             `smpkit stop` was here
        final.json          how it ended, once somebody has looked
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from smpkit.config.fields import JOB_NAME
from smpkit.config.words import printable, quoted
from smpkit.errors import CloudError, UsageError
from smpkit_estimator.sources import Sources, pack

__all__ = ["find_run", "make_run", "read_json", "runs", "runs_folder", "unmake", "write_json"]


def runs_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return where runs are found by their names."""
    chosen = (os.environ if environ is None else environ).get("SMPKIT_RUNS")
    return Path(chosen).absolute() if chosen else Path.home() / "smpkit-runs"


def find_run(name: str) -> Path:
    """Return the folder of a run.

    Raises:
        UsageError: there is none, or none can have this name.
    """
    if re.fullmatch(JOB_NAME, name) is None:
        hint = "`smpkit submit` prints the name of a job, `smpkit jobs` lists them"
        raise UsageError(f"{quoted(name)} cannot be the name of a job", hint=hint)
    run = runs_folder() / name
    if not (run / "spec.json").is_file():
        hint = "`smpkit jobs` lists them; SMPKIT_RUNS names another folder of runs"
        raise UsageError(f"there is no job `{name}` in {runs_folder()}", hint=hint)
    return run.resolve()


def runs() -> Iterator[tuple[str, Path]]:
    """Yield name and folder of every run."""
    with contextlib.suppress(FileNotFoundError):
        for path in runs_folder().iterdir():
            if (path / "spec.json").is_file():
                yield path.name, path.resolve()


def make_run(
    run: Path,
    spec: Mapping[str, Any],
    script: str,
    hidden: Mapping[str, str],
    sources: Sources | None,
    code: Path | None = None,
) -> None:
    """Make the folder of a run.

    Args:
        hidden: the job's secrets, variable -> value.
        sources: what is unpacked into `code`; None to take the sources of another run.
        code: the sources of another run.

    Raises:
        UsageError: there is a run of this name.
        CloudError: the folder cannot be written.
    """
    root = runs_folder()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        run.parent.mkdir(parents=True, exist_ok=True)
        if (root / run.name).exists() or run.exists():
            raise UsageError(f"there is a job `{run.name}` already", hint="`--name` gives another name")
        run.mkdir(mode=0o700)
        if run.parent.resolve() != root.resolve():
            (root / run.name).symlink_to(run, target_is_directory=True)
        for name in ("logs", "nodes"):
            (run / name).mkdir()
        _private(run / "token", secrets.token_hex(32))
        if hidden:
            _private(run / "secrets.json", json.dumps(hidden))
        if sources is not None:
            _unpack(sources, run / "code")
        elif code is not None:
            shutil.copytree(code, run / "code")
        (run / "script.sh").write_text(script, encoding="utf-8")
        write_json(run / "spec.json", spec)
    except OSError as error:
        hint = "set `backend.slurm.folder` or SMPKIT_RUNS to a folder that all nodes see and you may write to"
        reason = (error.strerror or str(error)).lower()
        raise CloudError(f"cannot make {printable(str(run))}: {reason}", hint=hint) from None


def unmake(run: Path) -> None:
    """Remove the folder of a run that was not started."""
    link = runs_folder() / run.name
    if link.is_symlink():
        link.unlink()
    shutil.rmtree(run, ignore_errors=True)


def _private(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def _unpack(sources: Sources, code: Path) -> None:
    """Pack and unpack: what is left out of an archive, such as secrets, is left out here as well."""
    with tempfile.TemporaryFile(prefix="smpkit-") as file:
        pack(sources, file)
        file.seek(0)
        with tarfile.open(fileobj=file, mode="r:gz") as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)
            archive.extractall(code)  # noqa: S202 - packed above, files only


def read_json(path: Path) -> dict[str, Any] | None:
    """Return what a file holds; None if it is missing or half written."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file at once, so that nobody reads half of it."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(value, indent=2), encoding="utf-8")
    part.replace(path)
