"""Where a job file is sent, and what each back end needs beyond what all have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, JsonValue

from smpkit.config.batch import Batch
from smpkit.config.fields import Location, Word
from smpkit.config.kubernetes import Kubernetes
from smpkit.config.section import Section, instead, matching
from smpkit.errors import Problem

__all__ = ["BackendChoice", "Slurm"]

_TIME = r"\d+(:\d{2}){0,2}|\d+-\d{1,2}(:\d{2}){0,2}|UNLIMITED"
Time = Annotated[str, matching(_TIME, "must be a time as Slurm writes it", "`90` minutes, `2:00:00`, `3-12:00`")]
Line = Annotated[str, matching(r".*\S.*", "must be one printable line")]
_OPTION = r"--[a-z][a-z-]*(=\S.*)?|-[A-Za-z]\S*"
SbatchOption = Annotated[str, matching(_OPTION, "must be an option of `sbatch`", "for example `--mail-type=END`")]


class Slurm(Section):
    """How a job runs on a Slurm cluster. What is not given is the cluster's default."""

    partition: Word | None = None
    """The partition, or several with commas between."""

    account: Word | None = None
    """The account that is charged."""

    qos: Word | None = None
    """The quality of service."""

    time: Time | None = None
    """The time limit, as Slurm writes it. Default: `compute.max_run_seconds` if that is given."""

    gpus_per_node: Annotated[Word | int, instead("must be a number, or a kind with a number")] | None = None
    """GPUs of each node: a number, or with the type, `a100:8`. The launcher gives each rank one."""

    gres: Word | None = None
    """Generic resources of each node, such as `gpu:8`, on clusters without `--gpus-per-node`."""

    cpus_per_node: int | None = Field(default=None, ge=1)
    """CPUs of each node. All of the node's with `exclusive`."""

    memory: Word | None = None
    """Memory of each node, such as `64G`; `0` for all of it."""

    constraint: Word | None = None
    """Features that the nodes must have."""

    reservation: Word | None = None
    """A reservation to run in."""

    exclusive: bool = False
    """Share the nodes with no other job."""

    options: list[SbatchOption] = Field(default_factory=list, max_length=100)
    """More options of `sbatch`, each as one text."""

    setup: list[Line] = Field(default_factory=list, max_length=100)
    """Lines of shell that run on the first node before the launchers, which inherit their variables, such as
    `module load cuda`."""

    folder: Location | None = None
    """Where runs are kept: sources, logs, results. Nodes must see it. Default: `SMPKIT_RUNS`, or `~/smpkit-runs`."""

    container: Literal["auto", "pyxis", "apptainer", "none"] = "auto"
    """What starts the job's `image`: pyxis or Apptainer, whichever the cluster has; `none` to run without it, in the
    environment that submits."""

    mounts: list[Word] = Field(default_factory=list, max_length=100)
    """More folders that the container sees, each `path` or `path:path inside`."""

    interface: Word | None = None
    """The network interface over which nodes talk. Default: the one over which the launchers reach each other."""

    grace_seconds: int | None = Field(default=None, ge=1)
    """How long ranks may save after SIGTERM. Default: a little less than the cluster's `KillWait`, at most 110."""

    requeue: bool = True
    """Let the job start again from its checkpoints when it is preempted or a node fails."""

    refused: ClassVar[Mapping[str, tuple[str, str]]] = {
        "array": (
            "would be several jobs, and a job file is one",
            "`for lr in 0.1 0.01; do smpkit submit job.yaml --set hyperparameters.lr=$lr; done`",
        ),
        "cpus_per_task": ("is called `cpus_per_node` here: a node has one launcher", "rename it"),
        "gpus": ("is called `gpus_per_node` here", "rename it"),
        "image": ("belongs to the top of the job file", "write `image: ...` there"),
        "nodes": ("is `compute.instance_count` for all back ends", "write `compute: {instance_count: ...}`"),
        "mem": ("is called `memory` here", "rename it"),
    }

    @property
    def seconds(self) -> int | None:
        """The time limit in seconds; None if there is none here."""
        if self.time is None or self.time == "UNLIMITED":
            return None
        days, _, clock = self.time.rpartition("-")
        parts = [int(part) for part in clock.split(":")]
        if days:  # hours, minutes, seconds, as many as there are
            hours, minutes, seconds = [*parts, 0, 0][:3]
        elif len(parts) == 3:
            hours, minutes, seconds = parts
        else:  # minutes, or minutes and seconds
            hours, (minutes, seconds) = 0, [*parts, 0][:2]
        return (int(days or 0) * 24 + hours) * 3600 + minutes * 60 + seconds

    def broken_rules(self) -> Iterable[Problem]:
        """Refuse options that contradict each other."""
        if self.gres is not None and self.gpus_per_node is not None:
            yield Problem(("gres",), "is given together with gpus_per_node", "keep one of them")


class BackendChoice(Section):
    """Where `smpkit submit` sends the job. A name alone, `backend: slurm`, is the `name`."""

    name: Word | None = None
    """The back end: `sagemaker`, `slurm`, `kubernetes`, `batch` or one of another package. Default:
    the one whose options are given, else `sagemaker`. `--backend` goes before it."""

    slurm: Slurm = Field(default_factory=Slurm)
    """Options of Slurm."""

    kubernetes: Kubernetes = Field(default_factory=Kubernetes)
    """Options of Kubernetes."""

    batch: Batch = Field(default_factory=Batch)
    """Options of AWS Batch."""

    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Options of a back end of another package, which checks them."""

    short_form = "name"

    def broken_rules(self) -> Iterable[Problem]:
        """Ask which one is meant where the options of several are given."""
        described = [name for name in _WITH_OPTIONS if name in self.model_fields_set]
        if len(described) > 1 and self.name is None:
            hint = f"write `backend: {{name: {described[0]}, ...}}`, or use `--backend`"
            yield Problem(("name",), f"is required with the options of {' and '.join(described)}", hint)

    @property
    def chosen(self) -> str | None:
        """The back end that the job file chooses, if it does."""
        return self.name or next((name for name in _WITH_OPTIONS if name in self.model_fields_set), None)


_WITH_OPTIONS = ("slurm", "kubernetes", "batch")
