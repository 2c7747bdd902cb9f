"""Read what the platform says about a job: the files below `/opt/ml`, as one frozen `Environment`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smpkit.config.wire import (
    HOMOGENEOUS,
    INSTANCE_GROUPS,
    JOB_NAME,
    MP_PARAMETERS,
    PROCESSES_PER_HOST,
    PROGRAM,
    REGION,
    SECRETS,
    SUBMIT_DIRECTORY,
    TOKEN_FILE,
)
from smpkit.errors import ConfigError, Problem

DEFAULT_BASE = Path("/opt/ml")

_FRAMEWORK_PREFIX = "sagemaker_"
_OUR_PREFIX = "sagemaker_smpkit_"
_OURS = (PROCESSES_PER_HOST["torchrun"], SECRETS, TOKEN_FILE)
_LIVE_OUTPUT = "sagemaker_s3_output"
_TUNING_METRIC = "_tuning_objective_metric"
"""What SageMaker adds to the hyperparameters of a tuning job; it is not for the script."""
_FROM_VARIABLES = {PROGRAM: "SAGEMAKER_PROGRAM", SUBMIT_DIRECTORY: "SAGEMAKER_SUBMIT_DIRECTORY"}
"""What an image may say itself, as with `ENV SAGEMAKER_PROGRAM train.py`; a hyperparameter goes before it."""


class Folders:
    """The places below the base folder, named as on the platform."""

    def __init__(self, base: Path) -> None:
        self.code, self.model = base / "code", base / "model"
        self.input, self.config, self.data = base / "input", base / "input" / "config", base / "input" / "data"
        self.output, self.failure = base / "output", base / "output" / "failure"
        self.intermediate, self.output_data = self.output / "intermediate", self.output / "data"
        self.run = self.output_data / "run"
        """Where ranks leave their measurements, as SMPKIT_RUN_DIR, among the other results: so they are kept."""

    def make_writable_ones(self) -> None:
        """Create the folders that a script may write to."""
        for folder in (self.model, self.output_data, self.intermediate):
            folder.mkdir(parents=True, exist_ok=True)


@dataclass(frozen=True)
class Resources:
    """The machines of the job, as `resourceconfig.json` lists them; one machine when the file is missing."""

    hosts: tuple[str, ...] = ("algo-1",)
    current_host: str = "algo-1"
    instance_type: str = "local"
    group_name: str = HOMOGENEOUS
    groups: tuple[Mapping[str, Any], ...] = ()
    interface: str = ""
    address: str = ""
    """Where the first host is reached, if not by its name."""
    port: int | None = None
    """The port at which the ranks meet, where the platform keeps one free for the job."""
    raw: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Environment:
    """Everything the launcher knows about its job; `hyperparameters` are the user's, `framework` the platform's."""

    folders: Folders
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    framework: Mapping[str, Any] = field(default_factory=dict)
    resources: Resources = field(default_factory=Resources)
    channels: Mapping[str, Any] = field(default_factory=dict)
    checkpoints: Path = DEFAULT_BASE / "checkpoints"
    job_name: str = ""
    num_gpus: int = 0
    num_cpus: int = 1

    @classmethod
    def read(
        cls,
        base: Path,
        environ: Mapping[str, str],
        *,
        num_gpus: int,
        num_cpus: int,
        more: Mapping[str, str] | None = None,
        hosts: Mapping[str, Any] | None = None,
    ) -> Environment:
        """Read the files below `base`; a missing file means its default.

        Args:
            more: hyperparameters in the form of the file, for those that it does not have.
            hosts: what a scheduler says in place of `resourceconfig.json`.

        Raises:
            ConfigError: with all problems of the files.
        """
        folders = Folders(base)
        problems: list[Problem] = []
        sent = {**(more or {}), **_read(folders, "hyperparameters", problems)}
        values = {name: _decoded(value) for name, value in sent.items()}
        resources = _resources(dict(hosts or _read(folders, "resourceconfig", problems)), problems)
        channels = _read(folders, "inputdataconfig", problems)
        checkpoint = _read(folders, "checkpointconfig", problems)
        problems += _refused(values)
        if problems:
            raise ConfigError(problems, subject=f"job files in {folders.config}")
        framework = {name: environ[variable] for name, variable in _FROM_VARIABLES.items() if environ.get(variable)}
        for name in [name for name in values if name.startswith(_FRAMEWORK_PREFIX) or name == _TUNING_METRIC]:
            framework[name] = values.pop(name)
        return cls(
            folders=folders,
            hyperparameters=values,
            framework=framework,
            resources=resources,
            channels=channels,
            checkpoints=Path(str(checkpoint.get("LocalPath") or base / "checkpoints")),
            # All jobs of a tuner have one hyperparameter: its name for the estimator.
            job_name=str(environ.get("TRAINING_JOB_NAME") or framework.get(JOB_NAME) or ""),
            num_gpus=num_gpus,
            num_cpus=num_cpus,
        )

    @property
    def mp_parameters(self) -> Mapping[str, Any]:
        """The model-parallel configuration as the user gave it; empty when the job has none."""
        parameters = self.hyperparameters.get(MP_PARAMETERS, {})
        assert isinstance(parameters, dict)
        return parameters

    @property
    def region(self) -> str | None:
        """The AWS region of the job, where it is known."""
        return str(self.framework.get(REGION) or "") or None

    @property
    def script(self) -> str:
        """The entry point, relative to `code`."""
        return str(self.framework.get(PROGRAM) or "")

    @property
    def code(self) -> Path:
        """The folder of the script: a local submit folder as it is, else `/opt/ml/code`."""
        submitted = str(self.framework.get(SUBMIT_DIRECTORY) or "")
        return Path(submitted) if submitted.startswith("/") and Path(submitted).is_dir() else self.folders.code


def base_folder(environ: Mapping[str, str]) -> Path:
    """Return where the platform's files lie: `/opt/ml` unless the environment moves it (for tests and local runs)."""
    return Path(environ.get("SMPKIT_BASE_DIR") or environ.get("SAGEMAKER_BASE_DIR") or DEFAULT_BASE)


def count_cpus() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_gpus(environ: Mapping[str, str], command: tuple[str, ...] = ("nvidia-smi", "--list-gpus")) -> int:
    """Count the GPUs that a rank will see, by asking the driver's own tool; 0 where that is missing, fails or hangs.

    A process can use one slice of a divided GPU (MIG), so where there are slices this is 1: name another number of
    ranks with `processes_per_host`.

    Args:
        environ: the ranks' variables; `CUDA_VISIBLE_DEVICES` is read as CUDA does, up to the first entry that names no
            GPU: numbers, or the beginnings of UUIDs.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except OSError:  # the tool is missing
        return 0
    except subprocess.SubprocessError as error:
        words = getattr(error, "output", "") or error
        sys.stderr.write(f"warning: no GPUs are used, as they cannot be counted: {' '.join(str(words).split())}\n")
        return 0
    gpus = [line.rpartition("UUID: ")[2].strip(" )") for line in done.stdout.splitlines() if line.startswith("GPU ")]
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return 1 if "  MIG " in done.stdout else len(gpus)
    if visible.startswith("MIG-"):
        return 1
    chosen: list[int] = []
    for entry in (entry.strip() for entry in visible.split(",")):
        is_uuid = entry.startswith("GPU-")
        named = [gpu for gpu, uuid in enumerate(gpus) if entry == str(gpu) or (is_uuid and uuid.startswith(entry))]
        if len(named) != 1:
            break
        chosen += named
    return len(chosen) if len(set(chosen)) == len(chosen) else 0  # CUDA shows none if one is named twice


def _read(folders: Folders, name: str, problems: list[Problem]) -> dict[str, Any]:
    path = folders.config / f"{name}.json"
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        problems.append(Problem((name,), f"{path} cannot be read as JSON: {error}"))
        return {}
    if isinstance(value, dict):
        return value
    problems.append(Problem((name,), f"{path} must hold a JSON object, not a {type(value).__name__}"))
    return {}


def _decoded(value: Any) -> Any:
    """Undo the JSON encoding of one value; SDK v3 sends plain strings without quotes, which stay as they are."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _refused(values: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield what no process can be passed, and what other versions of smpkit, and other images, do with such names."""
    for name, value in values.items():
        path = ("hyperparameters", name)
        if "\0" in name or (isinstance(value, str) and "\0" in value):
            yield Problem(path, "holds a NUL character, which cannot be passed to a process")
        if name == MP_PARAMETERS and not isinstance(value, dict):
            yield Problem(path, "must be a JSON object")
        if name.startswith(_OUR_PREFIX) and name not in _OURS:
            hint = "submit the job with the same version of smpkit as the image has"
            yield Problem(path, "is not known to the smpkit in this image", hint)
        if name == _LIVE_OUTPUT:
            what = "asks for uploads of `output/intermediate` while the job runs, which smpkit does not do"
            yield Problem(path, what, "let the script write to `checkpoints`, which SageMaker uploads as the job runs")
        if name == INSTANCE_GROUPS and value:
            what = "names groups of a job whose machines are of several kinds; smpkit's ranks run on hosts of one kind"
            yield Problem(path, what, "submit a job for each kind")


def _resources(raw: dict[str, Any], problems: list[Problem]) -> Resources:
    default = Resources()
    hosts = raw.get("hosts", list(default.hosts))
    if not isinstance(hosts, list) or not hosts or not all(isinstance(host, str) and host for host in hosts):
        problems.append(Problem(("resourceconfig", "hosts"), f"must be a list of host names, not {hosts!r}"))
        return default
    current = str(raw.get("current_host", hosts[0]))
    if current not in hosts:
        listed = ", ".join(hosts)
        problems.append(Problem(("resourceconfig", "current_host"), f"`{current}` is not one of the hosts: {listed}"))
        return default
    return Resources(
        hosts=tuple(hosts),
        current_host=current,
        instance_type=str(raw.get("current_instance_type") or default.instance_type),
        group_name=str(raw.get("current_group_name") or default.group_name),
        groups=tuple(raw.get("instance_groups", ())),
        interface=str(raw.get("network_interface_name") or ""),
        address=str(raw.get("first_address") or ""),
        port=raw["port"] if type(raw.get("port")) is int else None,
        raw=raw,
    )
