"""Bring together what the hosts of a run wrote, without letting one overwrite another's."""

from __future__ import annotations

import filecmp
import shutil
from collections.abc import Sequence
from pathlib import Path

__all__ = ["merge"]


def merge(sources: Sequence[tuple[str, Path]], target: Path) -> list[str]:
    """Copy the files below several folders into one.

    Returns:
        The files that hosts wrote with different contents, each with who wrote it: SageMaker keeps one of them, and
        nobody knows which. Here the first host's is kept.
    """
    clashes = []
    for host, folder in sources:
        for path in sorted(folder.rglob("*")):
            if path.is_dir() or path.is_symlink():
                continue
            place = target / path.relative_to(folder)
            if not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, place)
            elif not filecmp.cmp(path, place, shallow=False):
                clashes.append(f"{path.relative_to(folder)} (of {host})")
    return clashes
