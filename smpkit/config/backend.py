"""Where a job file is sent, and what each back end needs beyond what all have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, JsonValue

from smpkit.config.fields import BucketUri, ContainerPath, Location, Word
from smpkit.config.section import Section, instead, matching
from smpkit.config.words import quoted, suggestion
from smpkit.errors import Problem

# ---- Slurm -----------------------------------------------------------------------------------------------------------

_TIME = r"\d+(:\d{2}){0,2}|\d+-\d{1,2}(:\d{2}){0,2}|UNLIMITED"
Time = Annotated[str, matching(_TIME, "must be a time as Slurm writes it", "`90` minutes, `2:00:00`, `3-12:00`")]
Line = Annotated[str, matching(r".*\S.*", "must be one printable line")]
_OPTION = r"--[a-z][a-z-]*(=\S.*)?|-[A-Za-z]\S*"
SbatchOption = Annotated[str, matching(_OPTION, "must be an option of `sbatch`", "for example `--mail-type=END`")]

_SAME = {"--array": "array", "-a": "array", "--nodes": "nodes", "-N": "nodes"}
"""Options of `sbatch` that are refused as keys, too."""


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
    """CPUs of each node. Default: all of them with `exclusive`, else one for each rank of `processes_per_host`."""

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

    def broken_rules(self) -> Iterable[Problem]:
        """Refuse options that contradict each other."""
        if self.gres is not None and self.gpus_per_node is not None:
            yield Problem(("gres",), "is given together with gpus_per_node", "keep one of them")
        for index, option in enumerate(self.options):
            name = option[:2] if option[1] != "-" else option.partition("=")[0]
            if name in _SAME:  # hosts would wait for others that never come, or jobs write into one folder
                yield Problem(("options", index), *self.refused[_SAME[name]])


# ---- Kubernetes ------------------------------------------------------------------------------------------------------

_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_LETTERS = "must have lower-case letters, digits, `-` and `.`, as names of Kubernetes"
Name = Annotated[str, matching(rf"{_LABEL}(\.{_LABEL})*", _LETTERS)]
_AMOUNT = "must be an amount as Kubernetes writes it"
Quantity = Annotated[str, matching(r"\d+(\.\d+)?([EPTGMk]i?|m)?", _AMOUNT, "`16`, `500m`, `64Gi`")]


class Volume(Section):
    """Storage that every pod mounts: exactly one of `claim`, `host_path`, `nfs` and `source`."""

    mount: ContainerPath
    """Where pods see it. Folders of `output`, `checkpoints` and `inputs` lie in a volume."""

    claim: Name | None = None
    """A PersistentVolumeClaim, with access mode ReadWriteMany for several hosts."""

    host_path: ContainerPath | None = None
    """A folder of the nodes, such as a parallel file system."""

    nfs: Annotated[str, matching(r"[^:/\s]+:/\S*", "must be `server:/path`")] | None = None
    """An NFS export, `server:/path`."""

    source: dict[str, JsonValue] | None = None
    """Any other volume, as in a pod's specification: `{csi: {driver: ...}}`."""

    read_only: bool = False
    """Mount it read-only."""

    def broken_rules(self) -> Iterable[Problem]:
        """Require one kind of volume."""
        kinds = ("claim", "host_path", "nfs", "source")
        chosen = [kind for kind in kinds if getattr(self, kind) is not None]
        if len(chosen) != 1:
            what = f"has {' and '.join(chosen)}" if chosen else "says nothing of what it is"
            yield Problem((), what, f"give one of {', '.join(kinds)}")


class Toleration(Section):
    """A taint of nodes that pods tolerate."""

    key: Word | None = None
    """The taint. Default: all."""

    operator: Literal["Exists", "Equal"] = "Exists"
    """Whether the taint must have `value`."""

    value: str | None = None
    """The value, with `operator: Equal`."""

    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """The effect. Default: all."""

    def broken_rules(self) -> Iterable[Problem]:
        """Require key and value with `Equal`, and no value without it."""
        if self.operator == "Equal" and self.key is None:
            yield Problem(("key",), "is required with `operator: Equal`")
        if (self.value is not None) != (self.operator == "Equal"):
            yield Problem(("value",), "belongs to `operator: Equal`", "give both or neither")


class Kubernetes(Section):
    """How a job runs on Kubernetes: an Indexed Job with one pod per host."""

    namespace: Name | None = None
    """The namespace. Default: `--region`, then the context's."""

    context: Word | None = None
    """The kubeconfig's context. Default: `--profile`, then the current one."""

    queue: Name | None = None
    """Kueue's LocalQueue."""

    priority_class: Name | None = None
    """The pods' PriorityClass; with `queue`, Kueue's WorkloadPriorityClass too."""

    gpus: int | None = Field(default=None, ge=1)
    """GPUs of each pod, one for each rank."""

    gpu_resource: Word = "nvidia.com/gpu"
    """The cluster's name for GPUs, such as `amd.com/gpu`."""

    cpus: Quantity | None = None
    """CPUs of each pod, such as `16`."""

    memory: Quantity | None = None
    """Memory of each pod, such as `64Gi`."""

    resources: dict[Word, Quantity] = Field(default_factory=dict, max_length=20)
    """More resources of each pod, such as `{rdma/hca: "1"}`."""

    shared_memory: Quantity | None = None
    """Limit of `/dev/shm`. Default: half of the node's memory."""

    node_selector: dict[Word, str] = Field(default_factory=dict, max_length=20)
    """Labels that nodes must have."""

    tolerations: list[Toleration] = Field(default_factory=list, max_length=20)
    """Taints that pods tolerate."""

    volumes: list[Volume] = Field(default_factory=list, max_length=20)
    """Storage that every pod mounts."""

    service_account: Name | None = None
    """The pods' service account. Without one they get no token for the API."""

    image_pull_secrets: list[Name] = Field(default_factory=list, max_length=10)
    """Secrets with the registry's credentials."""

    code: ContainerPath | None = None
    """A folder with the sources in the image or a volume, so that none are sent."""

    host_network: bool = False
    """Use the nodes' network, as some fabrics need."""

    port: int | None = Field(default=None, ge=1024, le=65_000)
    """The port at which ranks meet; launchers use the next one. Default: 7777."""

    interface: Word | None = None
    """The network interface between hosts. Default: that of the launchers."""

    grace_seconds: int = Field(default=110, ge=1, le=86_400)
    """How long ranks may save after SIGTERM; Kubernetes kills pods ten seconds later."""

    restarts: int = Field(default=3, ge=0, le=100)
    """How often a host restarts because another one was lost. Evicted and preempted pods do not count."""

    keep_seconds: int | None = Field(default=None, ge=0)
    """How long to keep the job after its end. Default: until it is deleted."""

    labels: dict[Word, str] = Field(default_factory=dict, max_length=20)
    """More labels, of all objects."""

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


FileSystemId = Annotated[str, matching("fs-[0-9a-f]+", "must be the id of a file system", "such as `fs-0123abcd`")]


class BatchVolume(Section):
    """Storage that every node mounts: `efs` or `host_path`."""

    mount: ContainerPath
    """Where the container sees it. Folders of `output`, `checkpoints` and `inputs` lie in a volume."""

    efs: FileSystemId | None = None
    """The id of an EFS file system, such as `fs-0123456789abcdef0`."""

    host_path: ContainerPath | None = None
    """A folder of the nodes, such as FSx for Lustre that the compute environment's launch template mounts."""

    read_only: bool = False
    """Mount it read-only."""

    def broken_rules(self) -> Iterable[Problem]:
        """Require one kind of volume."""
        if (self.efs is None) == (self.host_path is None):
            yield Problem((), "must have one of efs and host_path", "give one of them")


class Batch(Section):
    """How a job runs on AWS Batch: a multi-node parallel job on the queue's EC2 machines."""

    queue: Word | None = None
    """The job queue, by name or ARN. Required."""

    gpus: int | None = Field(default=None, ge=1)
    """GPUs of each node, one for each rank."""

    cpus: int = Field(default=1, ge=1)
    """vCPUs of each node, which has a machine of its own in any case."""

    memory_mib: int = Field(default=2048, ge=4)
    """Memory of each node, in MiB, a little less than the machine's."""

    shared_memory_mib: int | None = Field(default=None, ge=1)
    """Limit of `/dev/shm`, in MiB. Default: half of `memory_mib`."""

    instance_type: Word | None = None
    """The machine, if the queue has several kinds."""

    role: Word | None = None
    """ARN of the job's IAM role, which must read what is below `staging`. Default: the job file's `role`."""

    staging: BucketUri | None = None
    """S3 URI for sources and descriptions. Default: the job file's `code_location`."""

    volumes: list[BatchVolume] = Field(default_factory=list, max_length=20)
    """Storage that every node mounts."""

    efa: int = Field(default=0, ge=0, le=32)
    """Devices of AWS's fast network."""

    privileged: bool = False
    """Give the container all devices of the machine."""

    port: int | None = Field(default=None, ge=1024, le=65_000)
    """The port at which ranks meet; launchers use the next one. Default: 7777."""

    grace_seconds: int = Field(default=25, ge=1, le=110)
    """How long ranks may save after SIGTERM. ECS kills containers after `ECS_CONTAINER_STOP_TIMEOUT`, 30 s unless the
    launch template sets it."""

    retries: int = Field(default=1, ge=1, le=10)
    """How often to try the job when machines are lost (spot); it resumes from its checkpoints."""

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
    """Where `smpkit submit` sends the job; `backend: slurm` sets only the `name`."""

    name: Word | None = None
    """`sagemaker`, `slurm`, `kubernetes` or `batch`; `--backend` overrides it. Default: the one whose options are set,
    else `sagemaker`."""

    slurm: Slurm = Field(default_factory=Slurm)
    """Options of Slurm."""

    kubernetes: Kubernetes = Field(default_factory=Kubernetes)
    """Options of Kubernetes."""

    batch: Batch = Field(default_factory=Batch)
    """Options of AWS Batch."""

    short_form = "name"

    def broken_rules(self) -> Iterable[Problem]:
        """Refuse a back end that nobody has, and ask which one is meant where the options of several are given."""
        known = ("sagemaker", *_WITH_OPTIONS)
        if self.name not in (None, *known):
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
