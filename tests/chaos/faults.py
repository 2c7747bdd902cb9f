"""What can go wrong with a job, how to bring it about, and what must be seen then: one line of a table for each."""

from __future__ import annotations

import dataclasses
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from smpkit.torch.checkpoints import save as saving
from tests.chaos.job import TIMEOUT, Training, traps


@dataclass(frozen=True)
class Fault:
    """One of `in_rank`, `from_outside` and `in_files` says how to bring it about.

    Args:
        says: patterns in what `smpkit run` prints on stderr, in which `{rank}` is the rank that the fault strikes.
        in_rank: called on that rank before a step; returns "skip" to leave the step out.
        from_outside: called with the processes of the rank and of the command line.
        in_files: called with the folders of checkpoints, the newest first, before the job starts.
        code: of `smpkit run`; None: any but 0.
        resumes: whether the same job can go on from its checkpoints.
        everywhere: whether it strikes all ranks.
        misleads: whether the rank hands other batches to its pipeline until that is noticed.
        in_background: whether the job saves in the background, and the fault waits for the next save.
    """

    says: tuple[str, ...]
    in_rank: Callable[[Training], object] | None = None
    from_outside: Callable[[Sequence[int]], object] | None = None
    in_files: Callable[[Sequence[Path], random.Random], object] | None = None
    code: int | None = 1
    resumes: bool = True
    everywhere: bool = False
    misleads: bool = False
    in_background: bool = False
    victims: tuple[str, Sequence[int]] | None = None
    """The only configuration in which it is a fault, and the ranks there; None: any rank of any."""
    launcher: str | None = None
    """The only launcher with which it can happen; None: any."""


RANK, COMMAND_LINE = range(2)  # the launcher is a part of the command


def send(who: int, number: int, processes: Sequence[int]) -> None:
    os.kill(processes[who], number)


def send_mpirun(number: int, processes: Sequence[int]) -> None:
    [mpirun] = [pid for pid in children(processes[COMMAND_LINE]) if b"--host" in words(pid, "cmdline")]
    os.kill(mpirun, number)


def send_stand_in(number: int, processes: Sequence[int]) -> None:
    [rank] = [word for word in words(processes[RANK], "environ") if word.startswith(b"OMPI_COMM_WORLD_RANK=")]
    [mpirun] = [pid for pid in children(processes[COMMAND_LINE]) if b"--host" in words(pid, "cmdline")]
    [stand_in] = [pid for pid in children(mpirun) if rank in words(pid, "environ")]
    os.kill(stand_in, number)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def words(pid: int, file: str) -> list[bytes]:
    return Path(f"/proc/{pid}/{file}").read_bytes().split(b"\0")


def raise_in(place: str, training: Training) -> None:
    def trap() -> None:
        raise ValueError(f"the {place} of this rank has gone wrong")

    traps[place] = trap


def take_other_shapes(training: Training) -> None:
    training.tokens = training.tokens[:, :-2]


def die_in_save(training: Training) -> None:
    write = saving._write_files

    def begin_to_write(save: Any, part: Any) -> Any:
        first = next(iter(part.contents))
        write(save, dataclasses.replace(part, contents={first: part.contents[first]}))
        os.kill(os.getpid(), signal.SIGKILL)

    saving._write_files = begin_to_write


def pick(folder: Path, chance: random.Random) -> Path:
    return chance.choice(sorted([*folder.glob("*.safetensors"), *folder.glob("*.pt")]))


def truncate(folders: Sequence[Path], chance: random.Random) -> None:
    file = pick(folders[0], chance)
    os.truncate(file, chance.randrange(file.stat().st_size))


def flip(file: Path, at: int, chance: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << chance.randrange(8)
    file.write_bytes(data)


def flip_in_tensors(folders: Sequence[Path], chance: random.Random) -> None:
    file = chance.choice(sorted(folders[0].glob("model_*.safetensors")))
    flip(file, file.stat().st_size - 1 - chance.randrange(64), chance)


def flip_in_index(folders: Sequence[Path], chance: random.Random) -> None:
    file = folders[0] / "index.json"
    data = file.read_bytes()
    flip(file, chance.choice([at for at in range(len(data)) if chr(data[at]).isalnum()]), chance)


def damage_all(folders: Sequence[Path], chance: random.Random) -> None:
    for folder in folders:
        os.truncate(pick(folder, chance), 7)


KILLED = (r"\(rank {rank}, exit 137\)", "killed by SIGKILL")
RAISED = r"\(rank {rank}, exit 1\)"
WAITED = (rf"waited {TIMEOUT:.0f} s in .* for rank {{rank}}|rank {{rank}} was still running",)
OLDER = (r"`step_\d+_partial` in .* is used", r"`{newest}_partial`: ")

FAULTS = {
    # processes: what is killed or stopped from outside
    "kill rank": Fault(KILLED, from_outside=partial(send, RANK, signal.SIGKILL)),
    "kill stand-in": Fault(
        ("mpirun ended with exit code 137, though no rank failed",),
        from_outside=partial(send_stand_in, signal.SIGKILL),
        launcher="mpirun",
    ),
    "kill mpirun": Fault(
        ("mpirun was killed by SIGKILL, though no rank failed",),
        from_outside=partial(send_mpirun, signal.SIGKILL),
        launcher="mpirun",
    ),
    "kill command line": Fault((), from_outside=partial(send, COMMAND_LINE, signal.SIGKILL), code=-signal.SIGKILL),
    "terminate": Fault((r"Stopped|stopped",), from_outside=partial(send, COMMAND_LINE, signal.SIGTERM), code=None),
    "stop rank": Fault(WAITED, from_outside=partial(send, RANK, signal.SIGSTOP)),
    "stop stand-in": Fault((), from_outside=partial(send_stand_in, signal.SIGSTOP), code=0, launcher="mpirun"),
    # what a script does on one rank
    "raise in forward": Fault((RAISED, "the forward of this rank"), partial(raise_in, "forward")),
    "raise in backward": Fault((RAISED, "the backward of this rank"), partial(raise_in, "backward")),
    "raise in step": Fault((RAISED, "the update of this rank"), partial(raise_in, "update")),
    "stall in forward": Fault(WAITED, lambda _: traps.update(forward=lambda: time.sleep(600))),
    "skip a step": Fault((r"rank {rank}",), lambda _: "skip", misleads=True),
    # Only the batch of a pipeline's first rank is used; both of its stages compare it, and either may be the first.
    "other shapes": Fault(
        (r"ranks (0 and 1|2 and 3)\b", r"\[4, [68]\]"), take_other_shapes, victims=("tensor 2, pipeline 2", (0, 1))
    ),
    "leave early": Fault((r"rank {rank}",), lambda _: sys.exit(0)),
    "full disk": Fault(
        (r"rank \d: .*cannot be written: File too large",),
        lambda _: resource.setrlimit(resource.RLIMIT_FSIZE, (2048, resource.RLIM_INFINITY)),
        everywhere=True,
    ),
    # checkpoints that are damaged between two runs
    "truncated file": Fault(OLDER, in_files=truncate, code=0),
    "missing file": Fault(
        (*OLDER, "is missing"), in_files=lambda folders, chance: pick(folders[0], chance).unlink(), code=0
    ),
    "flipped bit in a tensor": Fault((*OLDER, "has the CRC-32"), in_files=flip_in_tensors, code=0),
    "flipped bit in the index": Fault((*OLDER, r"index\.json is damaged"), in_files=flip_in_index, code=0),
    "missing checkpoint": Fault(
        (*OLDER, "it is missing"), in_files=lambda folders, _: shutil.rmtree(folders[0]), code=0
    ),
    "all checkpoints damaged": Fault(
        (r"can be used", r"`{newest}_partial`: .* has 7 bytes instead of"), in_files=damage_all, resumes=False
    ),
    "kill rank in a background save": Fault(KILLED, die_in_save, in_background=True),
}
