"""Run a job now, on the nodes of the allocation in which this process is: `smpkit run` inside `salloc` or `sbatch`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from smpkit.config.job import JobConfig
from smpkit.errors import CloudError
from smpkit.observe.runs import RUN_DIR
from smpkit_estimator.clock import SystemClock
from smpkit_estimator.names import unique_name
from smpkit_estimator.slurm.commands import ask, controller_settings
from smpkit_estimator.slurm.folder import make_run
from smpkit_estimator.slurm.plan import SlurmPlan, plan_runs
from smpkit_estimator.slurm.script import srun_words

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["nodes_here", "plan_here", "run_here"]

_STEPS_THAT_ARE_NONE = ("", "batch", "interactive", "4294967291", "4294967290")


def nodes_here(environ: Mapping[str, str]) -> int:
    """Return the number of nodes of the allocation that this process may start steps in; 0 if there is none.

    A process of a step is not asked: it was started on each node already.
    """
    if not environ.get("SLURM_JOB_ID") or environ.get("SLURM_STEP_ID", "") not in _STEPS_THAT_ARE_NONE:
        return 0
    return int(environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or 0)


def plan_here(job: JobConfig, folder: Path, nodes: int) -> SlurmPlan:
    """Decide everything about a run on these nodes.

    Raises:
        ConfigError: the job cannot run as it is; lists all problems.
    """
    now = SystemClock().now()
    options = job.backend.slurm.model_copy(update={"array": []})
    backend = job.backend.model_copy(update={"slurm": options})
    alone = job.model_copy(update={"backend": backend})
    return plan_runs(alone, folder, unique_name(job.name, now), now, controller_settings(), nodes=nodes)


def run_here(plan: SlurmPlan, folder: Path, arguments: Sequence[str]) -> int:
    """Run it, showing what the ranks print; return its exit code. SIGINT and SIGTERM ask the ranks to save and end.

    Must be called in the main thread.

    Args:
        folder: that of the run beside the job file, for summary, events and logs; on the nodes, too, if they see it.
    """
    [run] = plan.runs
    make_run(run.folder, run.spec, plan.script, plan.secrets, plan.sources)
    extra = ["--", *arguments] if arguments else []
    command = [*srun_words(plan.batch), str(run.folder), *extra]
    command.insert(1, "--overlap")  # the shell of the allocation may be a step, too
    environ = {**os.environ, "SMPKIT_FIRST_HOST": _first_address(), "SMPKIT_SHOW_LOG": "1"}
    environ[RUN_DIR] = str(folder.absolute())
    with _stops_asked(os.environ["SLURM_JOB_ID"]):
        process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, start_new_session=True)
        return process.wait()


def _first_address() -> str:
    doing = "cannot find the first node of the allocation"
    names = ask("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"], doing=doing).split()
    found = re.search(r" NodeAddr=(\S+)", ask("scontrol", "--oneliner", "show", "node", names[0], doing=doing))
    return found[1] if found else names[0]


@contextmanager
def _stops_asked(job_id: str) -> Iterator[None]:
    """Pass SIGINT and SIGTERM on to the launchers as SIGTERM: srun itself would kill them."""

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        try:
            ask("scancel", "--signal=TERM", job_id, doing="cannot stop the ranks")
        except CloudError as error:
            sys.stderr.write(f"error: {error}\n")

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
