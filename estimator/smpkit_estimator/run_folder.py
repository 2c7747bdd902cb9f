"""The folder with the measurements of a job's ranks, `run` among its other results, as `smpkit report` reads it."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from smpkit.errors import CloudError, JobError, UnsupportedError
from smpkit_estimator.files import folder_here

__all__ = ["NAME", "run_below", "run_in_volume", "unpack_run"]

NAME = "run"
"""The launcher names it to the ranks by SMPKIT_RUN_DIR, below SM_OUTPUT_DATA_DIR."""


def run_below(results: Path, job: str) -> Path:
    """Return the folder among a job's results.

    Raises:
        JobError: there is none.
    """
    folder = results / NAME
    if not folder.is_dir():
        hint = "ranks that call `smp.init` leave it; it is there when the first of them has ended"
        raise JobError(f"job `{job}` has left no measurements: there is no folder {folder}", hint=hint)
    return folder


def run_in_volume(places: Mapping[str, str], job: str, what: str) -> Path:
    """Return the folder of a job whose results lie in a volume, if this machine mounts it.

    Args:
        places: of the job's `spec.json`.
        what: whose volume it is, such as `a volume of the cluster`.

    Raises:
        JobError: there is none.
        UnsupportedError: there are no results that stay, or this machine does not see the volume.
    """
    if "output/data" not in places:
        hint = "name a folder in a volume with `output`"
        raise UnsupportedError(f"the results of job `{job}` went with its containers", hint=hint)
    results = Path(places["output/data"])
    folder_here(str(results.parents[1]), what)  # `output`: the rest is made when the job starts
    return run_below(results, job)


def unpack_run(archive: BinaryIO, into: Path, place: str) -> None:
    """Unpack that folder alone: its files, and no links.

    Args:
        place: where the archive is from, for errors.

    Raises:
        CloudError: it is damaged.
    """
    try:
        with tarfile.open(fileobj=archive, mode="r:gz") as tar:
            for member in tar:
                parts = PurePosixPath(member.name).parts
                content = tar.extractfile(member) if member.isreg() else None
                if parts[:1] != (NAME,) or ".." in parts or content is None:
                    continue
                target = into.joinpath(*parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as file:
                    shutil.copyfileobj(content, file)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise CloudError(f"cannot unpack {place}: {error}") from None
