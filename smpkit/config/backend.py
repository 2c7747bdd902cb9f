"""Where a job file is sent, and what each back end needs beyond what all have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from typing import Annotated, ClassVar, Literal

from pydantic import Field, JsonValue

from smpkit.config.fields import BucketUri, ContainerPath, Location, Word
from smpkit.config.section import Section, instead, matching
from smpkit.config.words import quoted, suggestion
from smpkit.errors import Problem

__all__ = ["BACKENDS", "BackendChoice", "Batch", "BatchVolume", "Kubernetes", "Slurm", "Toleration", "Volume"]

BACKENDS = "smpkit.backends"
"""The group of entry points by which another package brings a back end."""

# ---- Slurm -----------------------------------------------------------------------------------------------------------

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


# ---- Kubernetes ------------------------------------------------------------------------------------------------------

_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_LETTERS = "must have lower-case letters, digits, `-` and `.`, as names of Kubernetes"
Name = Annotated[str, matching(rf"{_LABEL}(\.{_LABEL})*", _LETTERS)]
_AMOUNT = "must be an amount as Kubernetes writes it"
Quantity = Annotated[str, matching(r"\d+(\.\d+)?([EPTGMk]i?|m)?", _AMOUNT, "`16`, `500m`, `64Gi`")]


class Volume(Section):
    """Storage that every pod mounts. Exactly one of `claim`, `host_path`, `nfs` and `source` says what it is."""

    mount: ContainerPath
    """Where pods see it. Folders that the job file names (`output`, `checkpoints`, `inputs`) lie in one."""

    claim: Name | None = None
    """A PersistentVolumeClaim; several hosts need one with the access mode ReadWriteMany."""

    host_path: ContainerPath | None = None
    """A folder of the nodes, such as a parallel file system that all of them mount."""

    nfs: Annotated[str, matching(r"[^:/\s]+:/\S*", "must be `server:/path`")] | None = None
    """An NFS export, `server:/path`."""

    source: dict[str, JsonValue] | None = None
    """Any other kind of volume, as in a pod's specification: `{csi: {driver: ...}}`."""

    read_only: bool = False
    """Mount it without the right to write."""

    def broken_rules(self) -> Iterable[Problem]:
        """Require one kind of volume."""
        kinds = ("claim", "host_path", "nfs", "source")
        chosen = [kind for kind in kinds if getattr(self, kind) is not None]
        if len(chosen) != 1:
            what = f"has {' and '.join(chosen)}" if chosen else "says nothing of what it is"
            yield Problem((), what, f"give one of {', '.join(kinds)}")


class Toleration(Section):
    """A taint of nodes that pods put up with."""

    key: Word | None = None
    """The taint; all of them without it."""

    operator: Literal["Exists", "Equal"] = "Exists"
    """Whether the taint must have `value`."""

    value: str | None = None
    """The value with `operator: Equal`."""

    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """The effect; all of them without it."""

    def broken_rules(self) -> Iterable[Problem]:
        """Require key and value with `Equal`, and no value without it."""
        if self.operator == "Equal" and self.key is None:
            yield Problem(("key",), "is required with `operator: Equal`")
        if (self.value is not None) != (self.operator == "Equal"):
            yield Problem(("value",), "belongs to `operator: Equal`", "give both or neither")


class Kubernetes(Section):
    """How a job runs on Kubernetes: one pod for each host, of an Indexed Job."""

    namespace: Name | None = None
    """The namespace. Default: `--region`, then that of the kubeconfig's context."""

    context: Word | None = None
    """The context of the kubeconfig. Default: `--profile`, then the current one."""

    queue: Name | None = None
    """Kueue's LocalQueue that the job waits in."""

    priority_class: Name | None = None
    """The pods' PriorityClass, and with `queue` also Kueue's WorkloadPriorityClass."""

    gpus: int | None = Field(default=None, ge=1)
    """GPUs of each pod. The launcher gives each rank one."""

    gpu_resource: Word = "nvidia.com/gpu"
    """What the cluster calls them: `nvidia.com/gpu`, `amd.com/gpu`."""

    cpus: Quantity | None = None
    """CPUs of each pod, such as `16`."""

    memory: Quantity | None = None
    """Memory of each pod, such as `64Gi`."""

    resources: dict[Word, Quantity] = Field(default_factory=dict, max_length=20)
    """More resources of each pod, such as `{rdma/hca: "1"}`."""

    shared_memory: Quantity | None = None
    """Most that ranks may keep in `/dev/shm`. Default: half of the node's memory."""

    node_selector: dict[Word, str] = Field(default_factory=dict, max_length=20)
    """Labels that nodes must have."""

    tolerations: list[Toleration] = Field(default_factory=list, max_length=20)
    """Taints that pods put up with."""

    volumes: list[Volume] = Field(default_factory=list, max_length=20)
    """Storage that every pod mounts."""

    service_account: Name | None = None
    """The pods' service account. Without one they get no token for the API."""

    image_pull_secrets: list[Name] = Field(default_factory=list, max_length=10)
    """Secrets with the registry's credentials."""

    code: ContainerPath | None = None
    """A folder in the image or in a volume that holds the sources: then none are sent."""

    host_network: bool = False
    """Use the nodes' network and not the cluster's; some fabrics need it."""

    port: int | None = Field(default=None, ge=1024, le=65_000)
    """The port at which the ranks meet; launchers take the next one. Default: 7777."""

    interface: Word | None = None
    """The network interface over which hosts talk. Default: the one over which the launchers reach each other."""

    grace_seconds: int = Field(default=110, ge=1, le=86_400)
    """How long ranks may save after SIGTERM; Kubernetes kills pods ten seconds later."""

    restarts: int = Field(default=3, ge=0, le=100)
    """How often a host is started again because another one was lost. Evicted and preempted pods do not count."""

    keep_seconds: int | None = Field(default=None, ge=0)
    """How long the job is kept after its end. Default: until somebody deletes it."""

    labels: dict[Word, str] = Field(default_factory=dict, max_length=20)
    """More labels of everything that is created."""

    annotations: dict[Word, str] = Field(default_factory=dict, max_length=20)
    """Annotations of the pods."""

    refused: ClassVar[Mapping[str, tuple[str, str]]] = {
        "workload": ("is always an Indexed Job, which does what a JobSet would do", "remove it"),
        "image": ("belongs to the top of the job file", "write `image: ...` there"),
        "nodes": ("is `compute.instance_count` for all back ends", "write `compute: {instance_count: ...}`"),
        "replicas": ("is `compute.instance_count` for all back ends", "write `compute: {instance_count: ...}`"),
        "nodeSelector": ("is called `node_selector` here", "rename it"),
        "serviceAccountName": ("is called `service_account` here", "rename it"),
        "env": ("belongs to the top of the job file", "write `environment: ...` there"),
        "kind": ("is the name of the section itself", "write `backend: {kubernetes: {...}}`"),
    }

    def broken_rules(self) -> Iterable[Problem]:
        """Refuse two volumes at one place, and places that smpkit itself needs."""
        mounts = [volume.mount.rstrip("/") for volume in self.volumes]
        for index, mount in enumerate(mounts):
            path = ("volumes", index, "mount")
            if mount in mounts[:index]:
                yield Problem(path, f"is the place of another volume too: `{mount}`", "give each its own")
            if mount in ("", "/opt/ml", "/etc/smpkit", "/dev/shm"):  # noqa: S108 - a place in a pod
                yield Problem(path, f"is a place that smpkit needs: `{mount or '/'}`", "choose another, as `/data`")


# ---- AWS Batch -------------------------------------------------------------------------------------------------------


class BatchVolume(Section):
    """Storage that every node mounts: an EFS file system, or a folder of the nodes."""

    mount: ContainerPath
    """Where the container sees it. Folders that the job file names (`output`, `checkpoints`, `inputs`) lie in one."""

    efs: Annotated[str, matching("fs-[0-9a-f]+", "must be the id of a file system", "such as `fs-0123abcd`")] | None = (
        None
    )
    """The id of an EFS file system, such as `fs-0123456789abcdef0`."""

    host_path: ContainerPath | None = None
    """A folder of the nodes, such as FSx for Lustre that the launch template of the compute environment mounts."""

    read_only: bool = False
    """Mount it without the right to write."""

    def broken_rules(self) -> Iterable[Problem]:
        """Require one kind of volume."""
        if (self.efs is None) == (self.host_path is None):
            yield Problem((), "must have one of efs and host_path", "give one of them")


class Batch(Section):
    """How a job runs on AWS Batch: a multi-node parallel job, on the EC2 machines of the queue."""

    queue: Word | None = None
    """The job queue, by name or ARN. Required."""

    gpus: int | None = Field(default=None, ge=1)
    """GPUs of each node. The launcher gives each rank one."""

    cpus: int = Field(default=1, ge=1)
    """vCPUs of each node. A node is a machine of its own in any case."""

    memory_mib: int = Field(default=2048, ge=4)
    """Memory of each node, in MiB; a little less than the machine has."""

    shared_memory_mib: int | None = Field(default=None, ge=1)
    """Most that ranks may keep in `/dev/shm`, in MiB. Default: half of `memory_mib`."""

    instance_type: Word | None = None
    """The machines, where the queue's compute environment has several kinds."""

    role: Word | None = None
    """ARN of the IAM role of the job; it must be able to read what is below `staging`. Default: the job file's
    `role`."""

    staging: BucketUri | None = None
    """S3 URI below which sources and descriptions are put. Default: the job file's `code_location`."""

    volumes: list[BatchVolume] = Field(default_factory=list, max_length=20)
    """Storage that every node mounts."""

    efa: int = Field(default=0, ge=0, le=32)
    """Devices of AWS's fast network that the container gets."""

    privileged: bool = False
    """Give the container all devices of the machine."""

    port: int | None = Field(default=None, ge=1024, le=65_000)
    """The port at which the ranks meet; launchers take the next one. Default: 7777."""

    grace_seconds: int = Field(default=25, ge=1, le=110)
    """How long ranks may save after SIGTERM. ECS kills the container after its `ECS_CONTAINER_STOP_TIMEOUT`, 30 s by
    default; the compute environment's launch template sets it."""

    retries: int = Field(default=1, ge=1, le=10)
    """How often the job is tried if its machines are lost (spot), from its checkpoints."""

    priority: int | None = Field(default=None, ge=0, le=9999)
    """Priority in a queue with a scheduling policy."""

    share: Word | None = None
    """Share identifier in a queue with a scheduling policy."""

    log_group: Word = "/aws/batch/job"
    """The log group of CloudWatch."""

    refused: ClassVar[Mapping[str, tuple[str, str]]] = {
        "image": ("belongs to the top of the job file", "write `image: ...` there"),
        "nodes": ("is `compute.instance_count` for all back ends", "write `compute: {instance_count: ...}`"),
        "memory": ("is called `memory_mib` here", "rename it"),
        "timeout": ("is `compute.max_run_seconds` for all back ends", "write `compute: {max_run_seconds: ...}`"),
    }


# ---- the choice ------------------------------------------------------------------------------------------------------


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
