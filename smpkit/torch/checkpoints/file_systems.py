"""Which ranks write to the same file system: hosts may share a folder, or have one each of the same name."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from smpkit.errors import CheckpointError
from smpkit.torch.checkpoints import folder as files
from smpkit.torch.checkpoints.state_entries import all_or_raise
from smpkit.torch.core.runtime import state
from smpkit.torch.distributed.objects import allgather

__all__ = ["FileSystems", "find_file_systems", "position_beside"]


@dataclass(frozen=True)
class FileSystems:
    """Which ranks share a file system.

    Args:
        leaders: for each rank, the lowest one on its file system.
    """

    leaders: tuple[int, ...]

    @property
    def is_leader(self) -> bool:
        """Whether this rank publishes checkpoints on its file system."""
        return self.leaders[state.rank] == state.rank

    @cached_property
    def here(self) -> frozenset[int]:
        """The ranks on this rank's file system."""
        return self.ranks_led_by(self.leaders[state.rank])

    def ranks_led_by(self, leader: int) -> frozenset[int]:
        """Return the ranks on the file system that a rank leads."""
        return frozenset(rank for rank, each in enumerate(self.leaders) if each == leader)

    def writer(self, holders: frozenset[int]) -> int | None:
        """Return which of the ranks that hold an entry writes it on this file system; None if none of them is here."""
        return min(holders & self.here, default=None)


def find_file_systems(path: Path, save_id: str, failure: str) -> FileSystems:
    """Make the folder and find out, by marker files in it, which ranks share it; all ranks call this."""
    # A file system that shows a marker late is harmless: a rank then writes what another one writes, too.
    all_or_raise(failure, lambda: _make_folder(path))
    marker = path / f".rank_{state.rank}.{save_id}.tmp"
    try:
        # One marker per host: its ranks share its file systems.
        all_or_raise(failure, lambda: _touch(marker) if state.local_rank == 0 else None)
        seen = [int(found.name.split(".")[1].removeprefix("rank_")) for found in path.glob(f".rank_*.{save_id}.tmp")]
        return FileSystems(tuple(allgather(min(seen, default=state.rank))))
    finally:
        with contextlib.suppress(OSError):
            marker.unlink(missing_ok=True)


def position_beside(path: Path) -> tuple[int, int]:
    """Return which of the ranks that see the same file this one is, and how many there are; all ranks call this."""
    same = allgather(_identity(path))
    here = [rank for rank, identity in enumerate(same) if identity == same[state.rank]]
    return here.index(state.rank), len(here)


def _identity(path: Path) -> tuple[int, ...] | None:
    """Return what is the same on all hosts that see the same file, and differs between copies of it."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_ctime_ns


def _make_folder(path: Path) -> None:
    if path.is_symlink() and not path.exists():
        # `smpkit run` links the checkpoints; `mkdir` says only that the link is there.
        where = path.readlink()
        raise CheckpointError(
            f"the folder {where} is gone: somebody removed it", hint=f"{path} leads to it: make it anew"
        )
    with files.as_checkpoint_error(f"the folder {path} cannot be made"):
        path.mkdir(parents=True, exist_ok=True)


def _touch(marker: Path) -> None:
    with files.as_checkpoint_error(f"{marker.parent} cannot be written to"):
        marker.touch()
