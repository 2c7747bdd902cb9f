"""The job file: what to run, with which settings, on which machines, from and to where."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError

from smpkit.config.backend import BackendChoice
from smpkit.config.confidential import masked
from smpkit.config.distribution import INSTANCE_GROUPS, Distribution, misplaced
from smpkit.config.fields import (
    BucketUri,
    ContainerPath,
    Hyperparameters,
    InstanceType,
    JobName,
    Location,
    Pattern,
    Role,
    Script,
    VariableName,
    Variables,
    Word,
    name_from,
)
from smpkit.config.section import RIGHT_FIELDS, Section, checked, matching
from smpkit.config.words import quoted
from smpkit.errors import Problem

Tracker = Literal["tensorboard", "wandb", "mlflow", "comet_ml", "aim", "clearml", "dvclive", "swanlab", "trackio"]
"""Those of accelerate."""


_CHANNEL = "a channel's name must have 1 to 64 letters, digits, `.`, `-` and `_`"
ChannelName = Annotated[str, matching(r"[A-Za-z0-9.\-_]{1,64}", _CHANNEL)]


def _tag_key(value: str) -> str | tuple[str, str] | None:
    if not 1 <= len(value) <= 128:
        return f"the key of a tag must have 1 to 128 characters, got {quoted(value)}"
    if value.lower().startswith("aws:"):
        return "is a key that AWS keeps for itself", "choose one that does not begin with `aws:`"
    return None


TagKey = Annotated[str, checked(_tag_key)]


class Compute(Section):
    """The machines."""

    instance_type: InstanceType = "local"
    """`local` for this machine, or a SageMaker instance type such as `ml.p4d.24xlarge`."""

    instance_count: int = Field(default=1, ge=1, le=100_000)
    """Number of hosts."""

    volume_gb: int = Field(default=30, ge=1)
    """Disk space of each host, in GB."""

    spot: bool = False
    """Use spare capacity: cheaper, but may be interrupted; the job then resumes from its last checkpoint."""

    max_run_seconds: int = Field(default=86_400, ge=1)
    """Stop the job after this long, in seconds."""

    max_wait_seconds: int | None = Field(default=None, ge=1)
    """With `spot`: limit for waiting and running together, in seconds. Default: `max_run_seconds`."""

    keep_alive_seconds: int | None = Field(default=None, ge=0, le=21_600)
    """Keep the machines for a next job this long, in seconds (a warm pool)."""

    retries: int | None = Field(default=None, ge=1, le=30)
    """How often SageMaker restarts the job after an error of its own."""

    training_plan: Word | None = None
    """ARN of a SageMaker training plan: machines reserved beforehand."""

    infra_check: bool | None = None
    """Let SageMaker check the machines before the job starts."""

    refused: ClassVar[Mapping[str, tuple[str, str]]] = {"instance_groups": INSTANCE_GROUPS}

    def broken_rules(self) -> Iterable[Problem]:
        """Check `max_wait_seconds` against `spot` and `max_run_seconds`."""
        if self.max_wait_seconds is None:
            return
        path = ("max_wait_seconds",)
        if not self.spot:
            yield Problem(path, "requires spot", "set `spot: true`, or remove it")
        if self.max_wait_seconds < self.max_run_seconds:
            message = f"must be at least max_run_seconds ({self.max_run_seconds}), got {self.max_wait_seconds}"
            yield Problem(path, message, "waiting includes running")

    @property
    def is_local(self) -> bool:
        """Whether the job is for this machine."""
        return self.instance_type == "local"


InputMode = Literal["File", "FastFile", "Pipe"]


class UriSection(Section):
    """Something with a URI, for which the URI alone may be written."""

    short_form = "uri"

    refused: ClassVar[Mapping[str, tuple[str, str]]] = {"url": ("is called `uri` here", "rename it")}


class FileSystem(Section):
    """A file system of AWS that the machines mount, so nothing is copied before the start. Requires `network`."""

    id: Word
    """Its id, such as `fs-0123456789abcdef0`."""

    type: Literal["FSxLustre", "EFS"]
    """The kind of file system."""

    path: ContainerPath
    """The folder in it, with the mount name on FSx for Lustre: `/fsx/tokens`."""

    access: Literal["ro", "rw"] = "ro"
    """Read only, or read and write."""


class Channel(UriSection):
    """One input of the job: `uri` or `file_system`. A text alone is the `uri`."""

    uri: Location | None = None
    """A folder, relative to the job file, or an S3 URI."""

    file_system: FileSystem | None = None
    """A file system in place of a URI."""

    mode: InputMode | None = None
    """Copied before the start, read on demand, or streamed. Default: `input_mode`."""

    content_type: str | None = None
    """MIME type, for the script only."""

    sharded: bool = False
    """Give each host a share of the objects instead of all."""

    data_type: Literal["S3Prefix", "ManifestFile", "AugmentedManifestFile"] = "S3Prefix"
    """Whether `uri` is the beginning of objects' names, or a file that lists them."""

    compression: Literal["None", "Gzip"] | None = None
    """With mode `Pipe`: compression of the data."""

    record_wrapping: Literal["None", "RecordIO"] | None = None
    """With mode `Pipe`: form of the records."""

    attribute_names: list[str] = Field(default_factory=list, max_length=16)
    """With `AugmentedManifestFile`: the attributes to read."""

    shuffle_seed: int | None = None
    """Shuffle objects, or lines of a manifest, in each epoch with this seed."""

    accept_eula: bool | None = None
    """You have read and accept the licence of the model."""

    hub_content: str | None = None
    """ARN of a model in a private SageMaker hub, to which `uri` belongs."""

    refused: ClassVar[Mapping[str, tuple[str, str]]] = {
        **UriSection.refused,
        **dict.fromkeys(("instance_groups", "instance_group_names"), INSTANCE_GROUPS),
    }

    def broken_rules(self) -> Iterable[Problem]:
        """Require either `uri` or `file_system`, and refuse options that only objects in S3 have."""
        if self.file_system is None:
            if self.uri is None:
                yield Problem(("uri",), "is required", "a folder or an S3 URI; or set `file_system`")
            return
        if self.uri is not None:
            yield Problem(("uri",), "is given together with file_system", "keep one of them")
        for name in _ONLY_IN_S3:
            if name in self.model_fields_set and not (name == "mode" and self.mode == "File"):
                yield Problem((name,), "is for objects in S3, and file_system has none", "remove it")


_ONLY_IN_S3 = (
    *("mode", "sharded", "data_type", "compression", "record_wrapping", "attribute_names", "shuffle_seed"),
    *("accept_eula", "hub_content"),
)


class Checkpoints(UriSection):
    """Where checkpoints are kept, so that an interrupted job goes on."""

    hints: ClassVar[Mapping[str, str]] = {
        "uri": "name one in S3; or, where the script saves to a file system that is mounted, remove the local path"
    }

    uri: Location
    """A folder, relative to the job file, or an S3 URI."""

    local_path: ContainerPath = "/opt/ml/checkpoints"
    """The container's folder that is kept in step with `uri`."""


class Network(Section):
    """The network of the machines. `subnets` and `security_groups` belong together."""

    subnets: list[Word] = Field(default_factory=list, max_length=16)
    """Subnets of your VPC, by id."""

    security_groups: list[Word] = Field(default_factory=list, max_length=5)
    """Security groups of your VPC, by id."""

    isolation: bool = False
    """Cut the container off from the network, S3 included; SageMaker brings the sources."""

    encrypt_traffic: bool = False
    """Encrypt what the hosts send each other; slower."""

    def broken_rules(self) -> Iterable[Problem]:
        """Require subnets and security groups together."""
        if bool(self.subnets) == bool(self.security_groups):
            return
        missing, there = ("security_groups", "subnets") if self.subnets else ("subnets", "security_groups")
        yield Problem((missing,), f"is required with {there}", "a VPC needs both")


class Encryption(Section):
    """Keys of AWS KMS, by id or ARN. Default: those of bucket and volume."""

    output_key: Word | None = None
    """Encrypts the results and the sources in S3."""

    volume_key: Word | None = None
    """Encrypts the disks of the machines."""


class Container(Section):
    """What is started in the image. Default: the image's entry point, with the argument `train`."""

    entry_point: list[str] = Field(default_factory=list, max_length=100)
    """Program and arguments, instead of the image's entry point."""

    arguments: list[str] = Field(default_factory=list, max_length=100)
    """Arguments for the entry point, instead of `train`."""

    log_level: int = Field(default=20, ge=0)
    """Lowest level to log: 10 debug, 20 info, 30 warning."""

    remote_debug: bool | None = None
    """Allow a shell in the container, by AWS Systems Manager."""

    registry_access: Literal["Platform", "Vpc"] | None = None
    """The image's registry: `Platform` for ECR, `Vpc` for a private one that your VPC (`network`) reaches."""

    registry_credentials: str | None = Field(default=None, min_length=1, max_length=2048)
    """ARN of a Lambda function that returns the credentials of a private registry."""

    def broken_rules(self) -> Iterable[Problem]:
        """Refuse credentials for a registry that needs none."""
        if self.registry_credentials is not None and self.registry_access != "Vpc":
            yield Problem(("registry_credentials",), "requires registry_access", "set `registry_access: Vpc`")


_LABEL = "must have at most 120 letters, digits and hyphens, the first and last no hyphen"
Label = Annotated[str, matching(r"(?=.{1,120}$)[a-zA-Z0-9](-*[a-zA-Z0-9])*", _LABEL)]


class Experiment(Section):
    """The place of a job in SageMaker Experiments. Default: your account's, if any."""

    name: Label | None = None
    """The experiment."""

    trial: Label | None = None
    """The trial in it."""

    display_name: Label | None = None
    """The job's name in it."""

    run: Label | None = None
    """The run in it."""


class Secret(Section):
    """A value for a variable of the script, kept out of job file and request. A text alone is the `entry`."""

    entry: Word | None = None
    """On SageMaker: the entry in AWS Secrets Manager, by name or ARN, which the container reads. The job's role needs
    `secretsmanager:GetSecretValue`."""

    key: str | None = Field(default=None, min_length=1, max_length=256)
    """The key, if the entry holds a JSON object, as the console makes them. Default: the whole text."""

    variable: VariableName | None = None
    """On this machine and in Docker: the variable of your environment. Default: the same name."""

    short_form = "entry"


_IN_THE_IMAGE = "is decided by the image"


def _of_the_distribution() -> dict[str, tuple[str, str]]:
    """Return refusals of what belongs into the distribution, each with its place."""
    places = {name: name for name in Distribution.model_fields} | {
        "modelparallel": "smdistributed: {modelparallel",
        "parameters": "smdistributed: {modelparallel: {enabled: true, parameters",
        "processes_per_host": "torch_distributed: {enabled: true, processes_per_host",
    }
    return {
        name: ("belongs to `distribution`", f"write `distribution: {{{place}: ...{'}' * place.count('{')}}}`")
        for name, place in places.items()
    }


class JobConfig(Section):
    """The keys of the first level."""

    entry_point: Script
    """The training script, relative to `source_dir`.

    A shell script (`.sh`) runs once on each host, without a launcher. Begin its last command with `exec`, so that it
    receives SIGTERM when the job is stopped.
    """

    source_dir: Location = "."
    """The folder with the sources, relative to the job file, or an S3 URI. Python imports from it and from the script's
    own folder."""

    dependencies: list[Location] = Field(default_factory=list)
    """More files and folders, relative to the job file, put into the folder with the sources."""

    name: JobName = Field(default_factory=lambda data: name_from(PurePosixPath(data.get("entry_point", "")).stem))
    """The beginning of the job's name. Default: from `entry_point`."""

    hyperparameters: Hyperparameters = Field(default_factory=dict)
    """Arguments of the script: `{"epochs": 3}` becomes `--epochs 3`; null: empty; lists, mappings: JSON."""

    environment: Variables = Field(default_factory=dict)
    """Variables for the script. Put numbers in quotes. Whoever may describe the job can read them."""

    secrets: dict[VariableName, Secret] = Field(default_factory=dict, max_length=50)
    """Variables for the script that stay out of job files, requests and logs: name → where the value is."""

    track: list[Tracker] = Field(default_factory=list, max_length=9)
    """Trackers that `smp.log` writes to, from: `tensorboard`, `wandb`, `mlflow`, `comet_ml`, `aim`, `clearml`,
    `dvclive`, `swanlab`, `trackio`. Install them where the ranks run."""

    distribution: Distribution = Field(default_factory=Distribution)
    """Model parallelism and launcher."""

    backend: BackendChoice = Field(default_factory=BackendChoice)
    """Where the job is sent, and options of that back end."""

    compute: Compute = Field(default_factory=Compute)
    """The machines, and for how long."""

    image: Word | None = None
    """The container image; not used on this machine."""

    role: Role | None = None
    """The IAM role for SageMaker, by name or ARN; not used on this machine."""

    inputs: dict[ChannelName, Channel] = Field(default_factory=dict)
    """Input channels: name → folder or S3 URI, which the script finds in `SM_CHANNEL_<NAME>`."""

    input_mode: InputMode = "File"
    """The default `mode` of channels."""

    output: Location | None = None
    """Folder or S3 URI for model and results. Default on SageMaker: your account's SageMaker bucket."""

    compress_output: bool = True
    """Pack the model into one `model.tar.gz`."""

    code_location: BucketUri | None = None
    """S3 URI for the packed sources. Default: the bucket of `output`."""

    checkpoints: Checkpoints | None = None
    """Where checkpoints are kept."""

    tags: dict[TagKey, str] = Field(default_factory=dict, max_length=50)
    """Tags of the job."""

    metrics: dict[str, Pattern] = Field(default_factory=dict, max_length=40)
    """Numbers that SageMaker reads from the log: name → regular expression with one group."""

    network: Network = Field(default_factory=Network)
    """The network of the machines."""

    encryption: Encryption = Field(default_factory=Encryption)
    """Keys for disks and results."""

    container: Container = Field(default_factory=Container)
    """What is started in the image."""

    experiment: Experiment = Field(default_factory=Experiment)
    """Its place in SageMaker Experiments."""

    refused: ClassVar[Mapping[str, tuple[str, str]]] = {
        **misplaced("`distribution.smdistributed.modelparallel.parameters`"),
        **_of_the_distribution(),
        "instance_type": ("belongs to `compute`", "write `compute: {instance_type: ...}`"),
        "instance_count": ("belongs to `compute`", "write `compute: {instance_count: ...}`"),
        "instance_groups": INSTANCE_GROUPS,
        "image_uri": ("is called `image` here", "rename it"),
        "output_path": ("is called `output` here", "rename it"),
        "checkpoint_s3_uri": ("is called `checkpoints` here", "rename it"),
        "base_job_name": ("is called `name` here", "rename it"),
        "max_run": ("belongs to `compute`", "write `compute: {max_run_seconds: ...}`"),
        "use_spot_instances": ("belongs to `compute`", "write `compute: {spot: true}`"),
        "env": ("is called `environment` here", "rename it"),
        "metric_definitions": ("is called `metrics` here", "write `metrics: {name: regular expression}`"),
        "framework_version": (_IN_THE_IMAGE, "name an image in `image`"),
        "py_version": (_IN_THE_IMAGE, "name an image in `image`"),
        "subnets": ("belongs to `network`", "write `network: {subnets: [...]}`"),
        "security_group_ids": ("belongs to `network`", "write `network: {security_groups: [...]}`"),
        "live_output": (
            "has no meaning: results are uploaded when the job is over",
            "write to `checkpoints`, which SageMaker uploads while the job runs",
        ),
    }

    @classmethod
    def further_problems(cls, data: Mapping[str, Any], problems: Sequence[Problem]) -> Iterable[Problem]:  # noqa: ARG003
        """Check the degrees against the number of ranks although something else in the file is wrong."""
        compute = data.get("compute")
        count = compute.get("instance_count", 1) if isinstance(compute, Mapping) else 1
        try:
            distribution = Distribution.model_validate(data.get("distribution", {}), context=RIGHT_FIELDS)
            hosts = Compute(instance_count=count).instance_count
        except ValidationError:
            return ()  # their own problems have been reported
        return _world_problems(distribution, hosts)

    def broken_rules(self) -> Iterable[Problem]:
        """Check variables that are given twice, shell scripts, and the degrees against a known number of ranks."""
        for name in self.secrets:
            if name in self.environment:
                yield Problem(("secrets", name), "is in `environment` too", "keep one of them")
        asked = self.distribution.launcher_asked_for
        if self.is_shell_script and asked is not None:
            message = f"is a shell script, which runs once on each host, without the launcher that `{asked}` asks for"
            yield Problem(("entry_point",), message, "name a Python script, or remove `distribution`")
        yield from _world_problems(self.distribution, self.compute.instance_count)

    @property
    def is_shell_script(self) -> bool:
        """Whether the job runs a shell script once on each host, and not ranks."""
        return self.entry_point.endswith(".sh")

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that the ranks get, without secrets."""
        own = {"SMPKIT_TRACK": ",".join(self.track)} if self.track else {}
        return {**own, **self.environment}

    def notices(self) -> list[Problem]:
        """Say which settings have no effect, and which show a secret to others."""
        below = [problem.below("distribution") for problem in self.distribution.notices()]
        return [*self.secret_notices(), *self._overwritten(), *below]

    def secret_notices(self) -> list[Problem]:
        """Say which values are probably secrets, and are about to be sent in clear."""
        message = "looks like a secret, and whoever may describe the job can read it"
        return [
            Problem((key, name), message, f"write `secrets: {{{name}: <entry in AWS Secrets Manager>}}` instead")
            for key, values in (("environment", self.environment), ("hyperparameters", self.hyperparameters))
            for name, value in values.items()
            if masked(name, value) != value
        ]

    def _overwritten(self) -> list[Problem]:
        names = [name for name in self.environment if name.startswith("SM_") or name in _OF_THE_LAUNCHER]
        notices = [Problem(("environment", name), "is set by the launcher, which overwrites it") for name in names]
        if "LD_PRELOAD" in self.environment:
            message = "is loaded into every process of the container, the launcher's own too"
            hint = "keep it only if every program of the image works with it"
            notices.append(Problem(("environment", "LD_PRELOAD"), message, hint))
        return notices


def _world_problems(distribution: Distribution, hosts: int) -> Iterable[Problem]:
    """Check the degrees against the number of ranks, if the job says how many a host has."""
    if distribution.processes_per_host is not None:
        for problem in distribution.world_problems(hosts * distribution.processes_per_host):
            yield problem.below("distribution")


_OF_THE_LAUNCHER = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"})
