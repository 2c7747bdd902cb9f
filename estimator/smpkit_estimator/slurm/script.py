"""The batch script of a run: a pure function, whose text `smpkit submit --dry-run` prints and `sbatch` gets."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from smpkit.config import scheduled as names
from smpkit.config.job import JobConfig
from smpkit_estimator.scheduled import limit_of


def batch_script(job: JobConfig, run: Path, around: Sequence[str], command: Sequence[str]) -> str:
    """Return the script; `around` are more options of `srun`, `command` is what every node runs."""
    options, nodes = job.backend.slurm, job.compute.instance_count
    srun = [
        *("srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", f"--cpus-per-task={_cpus(job)}"),
        # A launcher hears from the others why they ended; srun must not kill it meanwhile.
        *("--kill-on-bad-exit=0", "--wait=0", "--open-mode=append"),
        *around,
    ]
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in _sbatch_options(job, run)),
            "",
            f"run={shlex.quote(str(run))}",
            "began=$(date +%s)",
            'trap \'echo "$? ${SLURM_RESTART_COUNT:-0} $began $(date +%s)" > "$run/ended"\' EXIT',
            '[ ! -e "$run/stopped" ] || exit 0',
            *options.setup,
            'hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | tr "\\n" " ")',
            "address=$(scontrol --oneliner show node \"${hosts%% *}\" | grep -o ' NodeAddr=[^ ]*')",
            f'export {names.HOSTS}="$hosts" {names.FIRST_HOST}="${{address#*=}}"',
            f'export {names.VARIABLES}="$run/variables.json"',
            # Below those that systems give to outgoing connections; jobs that share a node do not meet at one port.
            f"export {names.PORT}=$((12000 + 2 * (SLURM_JOB_ID % 10000)))",
            'attempt="$run/logs/${SLURM_RESTART_COUNT:-0}"',
            'echo "$hosts" > "$attempt.hosts"',
            f'{shlex.join(srun)} --output="$attempt-%n.log" {shlex.join(command)}',  # `%n` is the number of the node
            "code=$?",
            # Ranks that saved after SIGTERM: the job was preempted with a time of grace, or somebody stopped it.
            f'if [ "$code" = {names.STOPPED} ]; then',
            '  [ ! -e "$run/stopped" ] || exit 0',
            *(['  scontrol requeue "$SLURM_JOB_ID" && sleep 60'] if options.requeue else []),
            "fi",
            'exit "$code"',
            "",
        ]
    )


def _cpus(job: JobConfig) -> int:
    return job.backend.slurm.cpus_per_node or job.distribution.processes_per_host or 1


def _sbatch_options(job: JobConfig, run: Path) -> Iterator[str]:
    options, seconds = job.backend.slurm, limit_of(job)
    values = {
        "job-name": run.name,
        "nodes": job.compute.instance_count,
        "ntasks-per-node": 1,
        "cpus-per-task": _cpus(job),
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "time": options.time or (_time_limit(seconds) if seconds is not None else None),
        "gpus-per-node": options.gpus_per_node,
        "gres": options.gres,
        "mem": options.memory,
        "constraint": options.constraint,
        "reservation": options.reservation,
    }
    yield from (f"--{name}={_word(str(value))}" for name, value in values.items() if value is not None)
    if options.exclusive:
        yield "--exclusive"
    yield "--requeue" if options.requeue else "--no-requeue"
    yield f"--output={_word(f'{run}/logs/slurm.log'.replace('%', '%%'))}"
    yield "--open-mode=append"
    yield from options.options


def _word(text: str) -> str:
    """Quote a value as sbatch reads it in a script."""
    if re.fullmatch(r"[\w%+,./:@=&|*()\[\]-]+", text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _time_limit(seconds: int) -> str:
    """Return a time limit in Slurm's form, which has whole minutes."""
    hours, minutes = divmod(-(-seconds // 60), 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02}:{minutes:02}:00"


def container_words(
    runtime: str, image: str | None, mounts: Sequence[str], *, gpus: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the options of srun, and the words before the command, that run it in an image."""
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
