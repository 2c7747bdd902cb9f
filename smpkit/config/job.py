"""The job file: what to run, with which settings, on which machines, from and to where."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar

from pydantic import Field

from smpkit.config.compute import Compute
from smpkit.config.confidential import masked
from smpkit.config.distribution import Distribution
from smpkit.config.mappings import Hyperparameters, Variables, channel_problems, tag_problems, variable_problems
from smpkit.config.places import Channel, Checkpoints, InputMode
from smpkit.config.section import KeyPath, Section, free_form
from smpkit.config.service import Container, Encryption, Experiment, Network, Secret
from smpkit.config.texts import BucketUri, JobName, Location, Pattern, Script, Word, name_from
from smpkit.errors import Problem

__all__ = ["Channel", "Checkpoints", "Compute", "JobConfig"]


class JobConfig(Section):
    """A job. Only `entry_point` is required."""

    entry_point: Script
    """The training script, relative to `source_dir`."""

    source_dir: Location = "."
    """The folder with the sources, relative to the job file, or an S3 URI. Default: the folder of the job file."""

    dependencies: list[Location] = Field(default_factory=list)
    """More files and folders, relative to the job file, that are put beside the script under their own names."""

    name: JobName = Field(default_factory=lambda data: name_from(PurePosixPath(data.get("entry_point", "")).stem))
    """Name of the job, the beginning of its name in the cloud. Default: made of the entry point's name."""

    hyperparameters: Hyperparameters = Field(default_factory=dict)
    """Arguments of the script: `{"epochs": 3}` becomes `--epochs 3`; null an empty text; lists and mappings JSON."""

    environment: Variables = Field(default_factory=dict)
    """Variables for the script. All values are text: put numbers in quotes. Whoever may describe the job reads them."""

    secrets: Annotated[dict[str, Secret], free_form(variable_problems)] = Field(default_factory=dict, max_length=50)
    """Variables for the script whose values stay out of job files, requests and logs: name -> where the value is."""

    distribution: Distribution = Field(default_factory=Distribution)
    """SageMaker's `distribution` dict: model parallelism and launcher."""

    compute: Compute = Field(default_factory=Compute)
    """How many machines of which kind, and for how long."""

    image: Word | None = None
    """The container image; not used on this machine."""

    role: Word | None = None
    """The IAM role (name or ARN) that SageMaker takes; not used on this machine."""

    inputs: Annotated[dict[str, Channel], free_form(channel_problems)] = Field(default_factory=dict)
    """Input channels: name -> folder or S3 URI, which the script finds in `SM_CHANNEL_<NAME>`."""

    input_mode: InputMode = "File"
    """How SageMaker brings the data of channels that do not say it themselves."""

    output: Location | None = None
    """Folder or S3 URI for the model and other results. Default in the cloud: SageMaker's bucket of your account."""

    compress_output: bool = True
    """Pack the model into one `model.tar.gz`; false leaves its files as they are."""

    code_location: BucketUri | None = None
    """S3 URI below which the packed sources are put. Default: the bucket of `output`."""

    checkpoints: Checkpoints | None = None
    """Where checkpoints are kept."""

    tags: Annotated[dict[str, str], free_form(tag_problems)] = Field(default_factory=dict, max_length=50)
    """Tags of the job, for finding it and for the bill."""

    metrics: dict[str, Pattern] = Field(default_factory=dict, max_length=40)
    """Numbers that SageMaker reads from the log: name -> regular expression with one group."""

    network: Network = Field(default_factory=Network)
    """The network of the machines."""

    encryption: Encryption = Field(default_factory=Encryption)
    """Keys for disks and results."""

    container: Container = Field(default_factory=Container)
    """What is started in the image."""

    experiment: Experiment = Field(default_factory=Experiment)
    """The place of the job in SageMaker Experiments."""

    stand_ins: ClassVar[Mapping[str, Any]] = {"entry_point": "stand_in.py"}

    refused: ClassVar[Mapping[str, tuple[str, str]]] = {
        "instance_type": ("belongs to `compute`", "write `compute: {instance_type: ...}`"),
        "instance_count": ("belongs to `compute`", "write `compute: {instance_count: ...}`"),
        "image_uri": ("is called `image` here", "rename it"),
        "output_path": ("is called `output` here", "rename it"),
        "checkpoint_s3_uri": ("is called `checkpoints` here", "rename it"),
        "base_job_name": ("is called `name` here", "rename it"),
        "max_run": ("belongs to `compute`", "write `compute: {max_run_seconds: ...}`"),
        "use_spot_instances": ("belongs to `compute`", "write `compute: {spot: true}`"),
        "env": ("is called `environment` here", "rename it"),
    }

    def cross_problems(self, _written: Mapping[str, Any], broken: frozenset[KeyPath], /) -> Iterable[Problem]:
        """Check variables that are given twice, and the degrees against the number of ranks where that is known."""
        twice = [name for name in self.secrets if name in self.environment]
        hint = "keep one of them"
        return [Problem(("secrets", name), "is in `environment` too", hint) for name in twice] + [
            *self._world_problems(broken)
        ]

    def _world_problems(self, broken: frozenset[KeyPath]) -> Iterable[Problem]:
        if self.distribution.processes_per_host is None or any(path[-1:] in _SIZES for path in broken):
            return ()
        problems = self.distribution.world_problems(self.num_processes(1))
        return [Problem(("distribution", *problem.path), problem.message, problem.hint) for problem in problems]

    def num_processes(self, default_per_host: int) -> int:
        """Number of ranks, with `default_per_host` of them on a host if the job does not say."""
        return self.compute.instance_count * (self.distribution.processes_per_host or default_per_host)

    def notices(self) -> list[Problem]:
        """Say which settings have no effect, and which show a secret to others."""
        found = self.distribution.notices()
        below = [Problem(("distribution", *problem.path), problem.message, problem.hint) for problem in found]
        return [*self.secret_notices(), *self._overwritten(), *below]

    def secret_notices(self) -> list[Problem]:
        """Say which values are probably secrets, and are about to be sent in clear."""
        message = "looks like a secret, and whoever may describe the job can read it"
        values: dict[tuple[str, str], object] = {
            ("environment", name): value for name, value in self.environment.items()
        }
        values |= {("hyperparameters", name): value for name, value in self.hyperparameters.items()}
        return [
            Problem(path, message, f"write `secrets: {{{path[1]}: <entry in AWS Secrets Manager>}}` instead")
            for path, value in values.items()
            if masked(path[1], value) != value
        ]

    def _overwritten(self) -> list[Problem]:
        names = [name for name in self.environment if name.startswith("SM_") or name in _OF_THE_LAUNCHER]
        return [Problem(("environment", name), "is set by the launcher, which overwrites it") for name in names]


_OF_THE_LAUNCHER = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"})

_SIZES = frozenset(
    (name,)
    for name in (
        *("compute", "distribution", "smdistributed", "modelparallel", "parameters", "mpi", "torch_distributed"),
        *("enabled", "instance_count", "processes_per_host", "partitions"),
        *("pipeline_parallel_degree", "tensor_parallel_degree", "sharded_data_parallel_degree"),
    )
)
"""Ends of the paths that the number of ranks depends on: if one of them is wrong, that is enough to tell."""
