"""The batch script of a run: a pure function, whose text `smpkit submit --dry-run` prints and `sbatch` gets."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from smpkit.config.backend import Slurm

__all__ = ["Batch", "batch_script", "container_words", "srun_words"]

_ADDRESS = "scontrol --oneliner show node \"$first\" | grep -o ' NodeAddr=[^ ]*'"
_STOPPED = 143  # as the launcher has it


@dataclass(frozen=True)
class Batch:
    """All that the script depends on."""

    name: str
    run: str
    """The folder of the run; of an array, without the number of the task, which is put behind it."""
    nodes: int
    cpus: int
    """CPUs of each node."""
    command: tuple[str, ...]
    """What every node runs, without the folder of the run."""
    options: Slurm
    seconds: int | None = None
    """The time limit, where the job file gives one in seconds."""
    runs: int = 0
    """The runs of an array; 0 for a job that is none."""
    container: tuple[str, ...] = ()
    """Options of `srun` for pyxis."""


def batch_script(batch: Batch) -> str:
    """Return the script."""
    run = shlex.quote(batch.run) + ("-$SLURM_ARRAY_TASK_ID" if batch.runs else "")
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in _options(batch)),
            "",
            f"run={run}",
            '[ ! -e "$run/stopped" ] || exit 0',
            *batch.options.setup,
            'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            f"address=$({_ADDRESS})",
            'export SMPKIT_FIRST_HOST="${address#*=}"',
            f'{shlex.join(srun_words(batch))} "$run"',
            "code=$?",
            # Ranks that saved after SIGTERM: the job was preempted with a time of grace, or somebody stopped it.
            f'if [ "$code" = {_STOPPED} ]; then',
            '  [ ! -e "$run/stopped" ] || exit 0',
            *(['  scontrol requeue "$SLURM_JOB_ID" && sleep 60'] if batch.options.requeue else []),
            "fi",
            'exit "$code"',
            "",
        ]
    )


def srun_words(batch: Batch) -> list[str]:
    """Return the command that starts one launcher on each node; the folder of the run comes behind it."""
    return [
        *("srun", f"--nodes={batch.nodes}", f"--ntasks={batch.nodes}", "--ntasks-per-node=1"),
        # A launcher hears from the others why they ended; srun must not kill it meanwhile.
        *(f"--cpus-per-task={batch.cpus}", "--kill-on-bad-exit=0", "--wait=0"),
        *batch.container,
        *batch.command,
    ]


def _options(batch: Batch) -> Iterator[str]:
    options = batch.options
    values = {
        "job-name": batch.name,
        "nodes": batch.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": batch.cpus,
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "time": options.time or (_limit(batch.seconds) if batch.seconds is not None else None),
        "gpus-per-node": options.gpus_per_node,
        "gres": options.gres,
        "mem": options.memory,
        "constraint": options.constraint,
        "reservation": options.reservation,
        "array": _tasks(batch),
    }
    yield from (f"--{name}={_word(str(value))}" for name, value in values.items() if value is not None)
    if options.exclusive:
        yield "--exclusive"
    yield "--requeue" if options.requeue else "--no-requeue"
    log = f"{batch.run}{'-%a' if batch.runs else ''}/logs/slurm.log"
    yield f"--output={_word(log if batch.runs else log.replace('%', '%%'))}"
    yield "--open-mode=append"
    yield from options.options


def _word(text: str) -> str:
    """Quote a value as sbatch reads it in a script."""
    if re.fullmatch(r"[\w%+,./:@=&|*()\[\]-]+", text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _limit(seconds: int) -> str:
    """Return a time limit in Slurm's form, which has whole minutes."""
    hours, minutes = divmod(-(-seconds // 60), 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02}:{minutes:02}:00"


def _tasks(batch: Batch) -> str | None:
    if not batch.runs:
        return None
    limit = f"%{batch.options.array_limit}" if batch.options.array_limit else ""
    return f"0-{batch.runs - 1}{limit}"


def container_words(
    runtime: str, image: str | None, mounts: Sequence[str], *, gpus: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return options of srun, and what comes before the command, to run it in an image."""
    if image is None or runtime == "none":
        return (), ()
    pairs = [mount if ":" in mount else f"{mount}:{mount}" for mount in dict.fromkeys(mounts)]
    if runtime == "pyxis":
        # As enroot has it: a `#` between the registry and the path.
        name = image if image.startswith(("/", ".")) else re.sub(r"^([^/]+[.:][^/]*)/", r"\1#", image)
        return (f"--container-image={name}", f"--container-mounts={','.join(pairs)}", "--no-container-mount-home"), ()
    name = image if image.startswith(("/", ".")) or "://" in image else f"docker://{image}"
    binds = [word for pair in pairs for word in ("--bind", pair)]
    return (), ("apptainer", "exec", *(("--nv",) if gpus else ()), *binds, name)
