"""Which ranks see the same folder: hosts may share one, or have one each of the same name."""

from __future__ import annotations

import contextlib
from pathlib import Path

from smpkit.errors import CheckpointError
from smpkit.torch.checkpoints import folder as files
from smpkit.torch.checkpoints.agreement import all_or_raise, together
from smpkit.torch.core.runtime import state


class FileSystems:
    """Which ranks share a file system.

    Args:
        leaders: for each rank, the lowest one on its file system, which publishes checkpoints there.
    """

    def __init__(self, leaders: tuple[int, ...]) -> None:
        self.leaders = leaders
        self.leader = leaders[state.rank]
        self.is_leader = self.leader == state.rank
        self.here = tuple(rank for rank, leader in enumerate(leaders) if leader == self.leader)
        """The ranks on this rank's file system, ascending."""
        self.last_order = 0
        """Of this job's last save to this folder."""


_known: dict[Path, FileSystems] = {}
"""By the folder, for the job: what is mounted does not change while it runs."""
state.reset_hooks.append(_known.clear)


def known_file_systems(path: Path) -> FileSystems | None:
    """Return what an earlier call of `find_file_systems` found for a folder."""
    return _known.get(path.absolute())


def find_file_systems(path: Path, save_id: str, failure: str) -> FileSystems:
    """Make the folder and find out, by marker files in it, which ranks share it; all ranks call this.

    Also remove what jobs before this one have left there, before this one writes: later, from a thread of a save in the
    background, that could be what `smp.save` of another rank is writing.
    """
    # A file system that shows a marker late is harmless: two leaders write the same index, and what both hold twice.
    marker = path / f".rank_{state.rank}.{save_id}.tmp"
    try:
        # One marker per host: its ranks share its file systems.
        all_or_raise(failure, lambda: _mark(marker, save_id) if state.local_rank == 0 else None)
        _, leaders = together(failure, lambda: _lowest(path, save_id), tuple)
    finally:
        with contextlib.suppress(OSError):
            marker.unlink(missing_ok=True)
    return _known.setdefault(path.absolute(), FileSystems(leaders))


def _mark(marker: Path, save_id: str) -> None:
    make_folder(marker.parent)
    with files.as_checkpoint_error(f"{marker.parent} cannot be written to"):
        marker.touch()
        files.remove_leftovers(marker.parent, save_id)


def _lowest(path: Path, save_id: str) -> int:
    seen = [int(marker.name.split(".")[1].removeprefix("rank_")) for marker in path.glob(f".rank_*.{save_id}.tmp")]
    return min(seen, default=state.rank)


def make_folder(path: Path) -> None:
    if path.is_symlink() and not path.exists():
        # `smpkit run` links the checkpoints; `mkdir` says only that the link is there.
        where = path.readlink()
        raise CheckpointError(
            f"the folder {where} is gone: somebody removed it", hint=f"{path} leads to it: make it anew"
        )
    with files.as_checkpoint_error(f"the folder {path} cannot be made"):
        path.mkdir(parents=True, exist_ok=True)


def file_systems_of(path: Path, failure: str) -> FileSystems:
    """Return which ranks see the same folder or file, which nobody changes now; all ranks call this."""
    _, identities = together(failure, lambda: _identity(path), tuple)
    return FileSystems(tuple(identities.index(identity) for identity in identities))


def _identity(path: Path) -> tuple[int, ...] | None:
    """Return what is the same on all hosts that see the same file, and differs between copies of it."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns
