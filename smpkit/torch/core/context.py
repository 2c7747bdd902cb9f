"""The rank, the world and the rendezvous of this process, read from its launcher's variables.

Pure: `launch_from` takes the environment as a mapping. Known launchers, in this order, are torchrun, Open MPI, SLURM
steps, and PMI (MPICH's and Intel's Hydra). Without any of them, one process is the whole world.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from smpkit.errors import UsageError

DEFAULT_PORT: Final = 29500
"""The port of the rendezvous when only `MASTER_ADDR` is set; torchrun's default."""


@dataclass(frozen=True)
class Launch:
    """The place of one process in its job.

    Args:
        local_rank, local_size: among the ranks of this host.
        launcher: name for messages: `torchrun`, `Open MPI`, `SLURM`, `PMI`, or `no launcher`.
        job_id: identifies this job, if the launcher sets such a variable; smpkit's own sets a secret, SMPKIT_JOB_TOKEN.
        master_address, master_port: where rank 0 listens; None if it is not set.
        agent_store: the launcher itself serves the store at that address, so rank 0 must not (torchrun).
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = "no launcher"
    job_id: str = ""
    master_address: str | None = None
    master_port: int | None = None
    agent_store: bool = False

    @property
    def single_host(self) -> bool:
        return self.local_size == self.world_size


class _Launcher(NamedTuple):
    """The variables that one launcher sets."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_size: str
    job_id: tuple[str, ...]
    """Variables that together tell jobs apart, as far as they are set."""


_TORCHRUN: Final = _Launcher(
    "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", ("TORCHELASTIC_RUN_ID",)
)
_OPEN_MPI: Final = _Launcher(
    "Open MPI",
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
)
_SLURM: Final = _Launcher(
    "SLURM",
    *("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
)
_PMI: Final = _Launcher("PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ("PMI_ID",))


def launch_from(environment: Mapping[str, str]) -> Launch:
    """Read the launcher's variables; raise UsageError if they are incomplete, not numbers, or contradict each other."""
    launcher = _launcher_of(environment)
    if launcher is None:
        return Launch()
    rank, world_size = (_number(environment, launcher, name) for name in (launcher.rank, launcher.world_size))
    if rank is None or world_size is None:
        known, missing = (launcher.world_size, launcher.rank) if rank is None else (launcher.rank, launcher.world_size)
        raise UsageError(
            f"{known} is set but {missing} is not",
            hint=f"start the script with {launcher.name}, or unset {known} to run one process",
        )
    local_rank = _number(environment, launcher, launcher.local_rank)
    local_size = _number(environment, launcher, launcher.local_size)
    if world_size == 1:  # which needs no launcher
        local_rank, local_size = local_rank or 0, local_size or 1
    if local_rank is None or local_size is None:
        missing = launcher.local_rank if local_rank is None else launcher.local_size
        raise UsageError(
            f"{launcher.rank}={rank} and {launcher.world_size}={world_size} are set but {missing} is not",
            hint="start the script with torchrun or mpirun, which set all of them",
        )
    _check_ranges(launcher, rank, world_size, local_rank, local_size)
    if environment.get("MASTER_ADDR") == "":
        raise UsageError("MASTER_ADDR is set but empty", hint="unset it, or set it to the host of rank 0")
    own_id = ".".join(environment[name] for name in launcher.job_id if name in environment)
    return Launch(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_size=local_size,
        launcher=launcher.name,
        job_id=environment.get("SMPKIT_JOB_TOKEN") or own_id,
        master_address=environment.get("MASTER_ADDR"),
        master_port=_port(environment),
        agent_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _launcher_of(environment: Mapping[str, str]) -> _Launcher | None:
    # torchrun comes first: it may itself have been started by mpirun or srun, one process per host, and then the
    # outer launcher's ranks count hosts. Likewise a SLURM batch script without srun has SLURM_PROCID but no step: srun
    # numbers its steps from 0; the batch script's own step and an interactive shell have other names.
    is_step = environment.get("SLURM_STEP_ID", "") not in ("batch", "interactive", "4294967291", "4294967290")
    for launcher in (_TORCHRUN, _OPEN_MPI, _SLURM, _PMI):
        is_set = [name in environment for name in (launcher.rank, launcher.world_size)]
        if (all(is_set) and is_step) if launcher is _SLURM else any(is_set):
            return launcher
    return None


def _number(environment: Mapping[str, str], launcher: _Launcher, name: str) -> int | None:
    text = environment.get(name)
    if text is None:
        return None
    if name == _SLURM.local_size:
        return _slurm_local_size(text, _number(environment, launcher, "SLURM_NODEID") or 0)
    if not re.fullmatch(r"\d{1,9}", text.strip()):
        raise UsageError(
            f"{name} is `{text}`, which is not a number", hint=f"it is set by {launcher.name}; unset it otherwise"
        )
    return int(text)


def _slurm_local_size(text: str, node: int) -> int:
    """Read a node's count from SLURM's run-length form: `4(x2),3` is 4, 4, 3 for nodes 0, 1, 2."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part.strip())
        if match is None:
            raise UsageError(f"{_SLURM.local_size} is `{text}`, which is not SLURM's `4(x2),3` form")
        counts += [int(match[1])] * int(match[2] or 1)
    if node >= len(counts):
        raise UsageError(f"SLURM_NODEID is {node} but {_SLURM.local_size} is `{text}`, for {len(counts)} nodes")
    return counts[node]


def _check_ranges(launcher: _Launcher, rank: int, world_size: int, local_rank: int, local_size: int) -> None:
    rank_text, world_text = f"{launcher.rank}={rank}", f"{launcher.world_size}={world_size}"
    local_text, host_text = f"{launcher.local_rank}={local_rank}", f"{launcher.local_size}={local_size}"
    if rank >= world_size:
        problem = f"{rank_text} is outside {world_text}"
    elif local_rank >= local_size:
        problem = f"{local_text} is outside {host_text}"
    # Open MPI counts the ranks of a host in the order in which it binds them, which need not be that of their ranks.
    elif local_size > world_size or (local_rank > rank and launcher is not _OPEN_MPI):
        problem = f"{local_text} of {host_text} contradicts {rank_text} of {world_text}"
    else:
        return
    hint = f"these are {launcher.name}'s; another launcher or a shell profile may have overwritten one"
    raise UsageError(problem, hint=hint)


def _port(environment: Mapping[str, str]) -> int | None:
    text = environment.get("MASTER_PORT")
    if text is None:
        return None
    if not re.fullmatch(r"\d{1,5}", text.strip()) or not 0 < int(text) < 65536:
        raise UsageError(f"MASTER_PORT is `{text}`, which is not a port", hint="use a number from 1 to 65535")
    return int(text)
