"""Where a job file is sent, and what each back end needs beyond what all have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from typing import Annotated, ClassVar, Literal

from pydantic import Field, JsonValue

from smpkit.config.batch import Batch
from smpkit.config.fields import Location, Word
from smpkit.config.kubernetes import Kubernetes
from smpkit.config.section import Section, instead, matching
from smpkit.config.words import quoted, suggestion
from smpkit.errors import Problem

__all__ = ["BACKENDS", "BackendChoice", "Slurm"]

BACKENDS = "smpkit.backends"
"""The group of entry points by which another package brings a back end."""

_TIME = r"\d+(:\d{2}){0,2}|\d+-\d{1,2}(:\d{2}){0,2}|UNLIMITED"
Time = Annotated[str, matching(_TIME, "must be a time as Slurm writes it", "`90` minutes, `2:00:00`, `3-12:00`")]
Line = Annotated[str, matching(r".*\S.*", "must be one printable line")]
_OPTION = r"--[a-z][a-z-]*(=\S.*)?|-[A-Za-z]\S*"
SbatchOption = Annotated[str, matching(_OPTION, "must be an option of `sbatch`", "for example `--mail-type=END`")]


class Slurm(Section):
    """How a job runs on a Slurm cluster, whose own defaults hold where you set nothing."""

    partition: Word | None = None
    """The partition, or several, separated by commas."""

    account: Word | None = None
    """The account to charge."""

    qos: Word | None = None
    """The quality of service."""

    time: Time | None = None
    """The time limit, as Slurm writes it. Default: `compute.max_run_seconds`, if set."""

    gpus_per_node: Annotated[Word | int, instead("must be a number, or a kind with a number")] | None = None
    """GPUs of each node, one for each rank; with their type: `a100:8`."""

    gres: Word | None = None
    """On clusters without `--gpus-per-node`: generic resources of each node, such as `gpu:8`."""

    cpus_per_node: int | None = Field(default=None, ge=1)
    """CPUs of each node; all of them with `exclusive`."""

    memory: Word | None = None
    """Memory of each node, such as `64G`; `0` for all of it."""

    constraint: Word | None = None
    """Features that nodes must have."""

    reservation: Word | None = None
    """A reservation to run in."""

    exclusive: bool = False
    """Share the nodes with no other job."""

    options: list[SbatchOption] = Field(default_factory=list, max_length=100)
    """More options of `sbatch`, each as one text."""

    setup: list[Line] = Field(default_factory=list, max_length=100)
    """Lines of shell, such as `module load cuda`, to run on the first node before the launchers, which inherit
    their variables."""

    folder: Location | None = None
    """Folder for sources, logs and results, which nodes must see. Default: `SMPKIT_RUNS`, or `~/smpkit-runs`."""

    container: Literal["auto", "pyxis", "apptainer", "none"] = "auto"
    """What starts the job's `image`. `auto`: whichever the cluster has; `none`: nothing, and the job runs in the
    environment that submits."""

    mounts: list[Word] = Field(default_factory=list, max_length=100)
    """More folders for the container, each `path` or `path:path inside`."""

    interface: Word | None = None
    """The network interface between nodes. Default: that of the launchers."""

    grace_seconds: int | None = Field(default=None, ge=1)
    """How long ranks may save after SIGTERM. Default: a little less than the cluster's `KillWait`, at most 110."""

    requeue: bool = True
    """Restart the job from its checkpoints when it is preempted or a node fails."""

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
    """Where `smpkit submit` sends the job; `backend: slurm` sets only the `name`."""

    name: Word | None = None
    """`sagemaker`, `slurm`, `kubernetes`, `batch`, or one of another package; `--backend` overrides it. Default:
    the one whose options are set, else `sagemaker`."""

    slurm: Slurm = Field(default_factory=Slurm)
    """Options of Slurm."""

    kubernetes: Kubernetes = Field(default_factory=Kubernetes)
    """Options of Kubernetes."""

    batch: Batch = Field(default_factory=Batch)
    """Options of AWS Batch."""

    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Options of another package's back end, which checks them."""

    short_form = "name"

    def broken_rules(self) -> Iterable[Problem]:
        """Refuse a back end that nobody has, and ask which one is meant where the options of several are given."""
        known = ("sagemaker", *_WITH_OPTIONS)
        if self.name not in (None, *known) and not entry_points(group=BACKENDS, name=str(self.name)):
            hint = suggestion(str(self.name), known) or f"those are {', '.join(f'`{name}`' for name in known)}"
            yield Problem(("name",), f"is no back end: {quoted(self.name)}", hint)
        described = [name for name in _WITH_OPTIONS if name in self.model_fields_set]
        if len(described) > 1 and self.name is None:
            hint = f"write `backend: {{name: {described[0]}, ...}}`, or use `--backend`"
            yield Problem(("name",), f"is required with the options of {' and '.join(described)}", hint)

    @property
    def chosen(self) -> str | None:
        """The back end that the job file chooses, if it does."""
        return self.name or next((name for name in _WITH_OPTIONS if name in self.model_fields_set), None)


_WITH_OPTIONS = ("slurm", "kubernetes", "batch")
