"""One container for each host of a job, with the platform's folders, on a network of their own."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from smpkit_estimator.local import LocalPlan
from smpkit_estimator.platform_files import config_files

__all__ = ["STOP_SECONDS", "Host", "Run", "lay_out", "start_command"]

STOP_SECONDS = 120
"""Between SIGTERM and SIGKILL, as on SageMaker."""

_CODE = "/opt/ml/code"
_CHECKPOINTS = "/opt/ml/checkpoints"
_WRITABLE = ("model", "output/data", "output/intermediate")


@dataclass(frozen=True)
class Host:
    """One host: its name on the network, its container and its folder on this machine."""

    name: str
    container: str
    folder: Path


@dataclass(frozen=True)
class Run:
    """All that the containers of a run have in common."""

    plan: LocalPlan
    image: str
    name: str
    tree: Path
    hosts: tuple[Host, ...]
    checkpoints: Path
    """One folder for all hosts, which outlives them, as the platform's copy in S3 does."""
    gpus: bool = False

    @property
    def network(self) -> str:
        return self.name

    @property
    def code(self) -> Path:
        """The sources: where they are, or with the job's dependencies beside them, in a copy."""
        return self.tree / "code" if self.plan.dependencies else self.plan.source


def lay_out(run: Run) -> None:
    """Make the folders and files of every host; what an earlier container of it wrote is left where it is."""
    names = [host.name for host in run.hosts]
    if run.plan.dependencies and not run.code.exists():
        _gather_code(run)
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    for host in run.hosts:
        config = host.folder / "input" / "config"
        config.mkdir(parents=True, exist_ok=True)
        for part in _WRITABLE:
            (host.folder / part).mkdir(parents=True, exist_ok=True)
        files = config_files(
            run.plan.job,
            hosts=names,
            host=host.name,
            submit_directory=_CODE,
            job_name=run.name,
            ranks_per_host=run.plan.ranks // len(names),
            interface="eth0",
            checkpoints=_CHECKPOINTS,
        )
        for name, value in files.items():
            (config / f"{name}.json").write_text(json.dumps(value, indent=2), encoding="utf-8")


def _gather_code(run: Run) -> None:
    """Copy the sources and what belongs beside them: links would lead nowhere inside a container."""
    run.code.mkdir(parents=True)
    for path in (*run.plan.source.iterdir(), *run.plan.dependencies):
        if path.is_dir():
            shutil.copytree(path, run.code / path.name, ignore=shutil.ignore_patterns(".git", "__pycache__"))
        else:
            shutil.copy2(path, run.code / path.name)


@dataclass(frozen=True)
class Command:
    """A docker command and its environment."""

    words: tuple[str, ...]
    environ: Mapping[str, str]


def start_command(run: Run, host: Host, arguments: Sequence[str], variables: Mapping[str, str]) -> Command:
    """Return the command that runs the host's container in the foreground.

    As on SageMaker, the container's own host name is not the one by which the other hosts reach it. A program that
    confuses the two fails here, too.
    """
    mounts = [
        (run.code, _CODE, True),
        (host.folder / "input" / "config", "/opt/ml/input/config", True),
        (host.folder / "model", "/opt/ml/model", False),
        (host.folder / "output", "/opt/ml/output", False),
        (run.checkpoints, _CHECKPOINTS, False),
        *((path, f"/opt/ml/input/data/{name}", True) for name, path in run.plan.inputs.items()),
    ]
    passed = {
        **run.plan.job.environment,
        **run.plan.secrets,
        "TRAINING_JOB_NAME": run.name,
        "TRAINING_JOB_ARN": f"arn:aws:sagemaker:local:000000000000:training-job/{run.name}",
        **variables,
    }
    words = [
        *("docker", "run", "--init=false", "--name", host.container, "--label", f"smpkit.run={run.name}"),
        *("--network", run.network, "--network-alias", host.name, "--hostname", f"ip-{host.container[-12:]}"),
        *("--shm-size", "8g", "--stop-timeout", str(STOP_SECONDS)),
        # Pinned memory counts as locked; an engine inside a container may not be allowed to raise the limit.
        *(("--gpus", "all", "--ulimit", "memlock=-1") if run.gpus else ()),
        *(word for mount in mounts for word in ("--mount", _mount(*mount))),
        # By name only: every user of this machine can read the arguments of a command, but not its environment.
        *(word for name in passed for word in ("--env", name)),
    ]
    script = ["--", *arguments] if arguments else []
    return Command((*words, run.image, "train", *script), {**os.environ, **passed})


def _mount(source: Path, target: str, read_only: bool) -> str:
    """Return the value of `--mount`, which is a line of CSV: a comma or a quote in a path must not end it."""
    fields = ["type=bind", f"source={source}", f"target={target}", *(["readonly"] if read_only else [])]
    return ",".join(f'"{text.replace(chr(34), chr(34) * 2)}"' if set(text) & {",", '"'} else text for text in fields)
