"""How a job runs on AWS Batch: what the job file may say under `backend.batch`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from smpkit.config.fields import BucketUri, ContainerPath, Word
from smpkit.config.section import Section, matching
from smpkit.errors import Problem

__all__ = ["Batch", "BatchVolume"]


class BatchVolume(Section):
    """Storage that every node mounts: `efs` or `host_path`."""

    mount: ContainerPath
    """Where the container sees it. Folders of `output`, `checkpoints` and `inputs` lie in a volume."""

    efs: Annotated[str, matching("fs-[0-9a-f]+", "must be the id of a file system", "such as `fs-0123abcd`")] | None = (
        None
    )
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
