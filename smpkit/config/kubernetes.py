"""How a job runs on Kubernetes: what the job file may say under `backend.kubernetes`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, JsonValue

from smpkit.config.fields import ContainerPath, Word
from smpkit.config.section import Section, matching
from smpkit.errors import Problem

__all__ = ["Kubernetes", "Toleration", "Volume"]

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
