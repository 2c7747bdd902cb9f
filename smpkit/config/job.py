"""The job file: what to run, with which settings, on which machines, from and to where."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, JsonValue

from smpkit.config.distribution import Distribution
from smpkit.config.explain import validation_error
from smpkit.config.section import KeyPath, Section, free_form
from smpkit.config.words import quoted, typed
from smpkit.errors import Problem

__all__ = ["Channel", "Checkpoints", "Compute", "JobConfig"]

_MAX_DEPTH = 64


def _refuse(message: str, hint: str | None = None) -> Exception:
    return validation_error("value", [Problem((), message, hint)])


# --- Kinds of text ---------------------------------------------------------------------------------------------------


def _job_name(value: str) -> str:
    if re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", value) is None or len(value) > 63:
        message = "must have 1 to 63 letters, digits and hyphens, the first and last no hyphen"
        raise _refuse(f"{message}, got {quoted(value)}", f"for example `{_name_from(value)}`")
    return value


def _name_from(text: str) -> str:
    """Make a job name of any text."""
    return re.sub(r"[^a-zA-Z0-9]+", "-", text)[:63].strip("-") or "job"


def _script(value: str) -> str:
    path = PurePosixPath(value)
    if path.is_absolute() or ".." in path.parts:
        message = f"must be a path inside source_dir, got {quoted(value)}"
        raise _refuse(message, "set `source_dir` to the script's folder")
    if path.suffix != ".py" or not value.isprintable():
        raise _refuse(f"must be a Python script (`.py`), got {quoted(value)}")
    return value


def _location(value: str) -> str:
    if not value.strip() or not value.isprintable():
        raise _refuse(f"must be a folder or an S3 URI, got {quoted(value)}")
    if "://" in value and re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?", value) is None:
        raise _refuse(f"must be a folder or an S3 URI, got {quoted(value)}", "for example `s3://bucket/folder`")
    return value


def _absolute(value: str) -> str:
    if not value.startswith("/") or not value.isprintable():
        raise _refuse(f"must be an absolute path inside the container, got {quoted(value)}")
    return value


def _word(value: str) -> str:
    if re.fullmatch(r"\S{1,255}", value) is None or not value.isprintable():
        raise _refuse(f"must have 1 to 255 characters and no blanks, got {quoted(value)}")
    return value


_Name = Annotated[str, AfterValidator(_job_name)]
_Script = Annotated[str, AfterValidator(_script)]
_Location = Annotated[str, AfterValidator(_location)]
_ContainerPath = Annotated[str, AfterValidator(_absolute)]
_Word = Annotated[str, AfterValidator(_word)]


# --- Free-form mappings ----------------------------------------------------------------------------------------------


def _hyperparameter_problems(name: object, value: object) -> Iterable[Problem]:
    if not isinstance(name, str):
        yield Problem((quoted(name),), f"a name must be text, got {typed(name)}", "put it in quotes")
    elif not 1 <= len(name) <= 256:
        yield Problem((name,), f"a name must have 1 to 256 characters, got {len(name)}")
    elif name.startswith("sagemaker_") or name == "mp_parameters":
        hint = "use `distribution`" if name == "mp_parameters" else "choose another name"
        yield Problem((name,), "is a name that SageMaker keeps for itself", hint)
    else:
        yield from _json_problems((name,), value, 0)


def _json_problems(path: KeyPath, value: object, depth: int) -> Iterable[Problem]:
    """Say what in a value JSON cannot hold. Depth is bounded, which also ends values that contain themselves."""
    if depth > _MAX_DEPTH:
        yield Problem(path[:1], f"is nested more than {_MAX_DEPTH} levels deep")
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, str):
                yield from _json_problems((*path, key), item, depth + 1)
            else:
                yield Problem(path, f"a name must be text, got {typed(key)}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _json_problems((*path, index), item, depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        yield Problem(path, f"must be a finite number, got {quoted(value)}")
    elif not (value is None or isinstance(value, (str, bool, int, float))):
        yield Problem(path, f"must be something that JSON can hold, got {quoted(value)}")


def _variable_problems(name: object, _: object) -> Iterable[Problem]:
    if not isinstance(name, str) or re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]{0,511}", name) is None:
        message = "a variable's name must have at most 512 letters, digits and underscores, and not start with a digit"
        yield Problem((_shown(name),), f"{message}, got {quoted(name)}")


def _channel_problems(name: object, _: object) -> Iterable[Problem]:
    if not isinstance(name, str) or re.fullmatch(r"[A-Za-z0-9.\-_]{1,64}", name) is None:
        message = "a channel's name must have 1 to 64 letters, digits, `.`, `-` and `_`"
        yield Problem((_shown(name),), f"{message}, got {quoted(name)}")


def _shown(name: object) -> str:
    return name if isinstance(name, str) else quoted(name)


# --- Sections --------------------------------------------------------------------------------------------------------


class Compute(Section):
    """The machines."""

    instance_type: _Word = "local"
    """`local` for this machine, or a SageMaker instance type such as `ml.p4d.24xlarge`."""

    instance_count: int = Field(default=1, ge=1)
    """Number of hosts."""

    volume_gb: int = Field(default=30, ge=1)
    """Disk space of each host, in GB."""

    spot: bool = False
    """Use spare capacity: cheaper, may be interrupted, then starts again from the last checkpoint."""

    max_run_seconds: int = Field(default=86_400, ge=1)
    """The job is stopped after running this long, in seconds."""

    max_wait_seconds: int | None = Field(default=None, ge=1)
    """With `spot`: most time for waiting and running together, in seconds. Default: `max_run_seconds`."""

    keep_alive_seconds: int = Field(default=0, ge=0, le=21_600)
    """How long the machines stay reserved for a next job after this one, in seconds (a warm pool)."""

    def cross_problems(self, _written: Mapping[str, Any], broken: frozenset[KeyPath], /) -> Iterable[Problem]:
        """Check `max_wait_seconds` against `spot` and `max_run_seconds`."""
        if self.max_wait_seconds is None:
            return
        path = ("max_wait_seconds",)
        if not self.spot and ("spot",) not in broken:
            yield Problem(path, "requires spot", "set `spot: true`, or remove it")
        if self.max_wait_seconds < self.max_run_seconds and ("max_run_seconds",) not in broken:
            message = f"must be at least max_run_seconds ({self.max_run_seconds}), got {self.max_wait_seconds}"
            yield Problem(path, message, "waiting includes running")


class Located(Section):
    """Something with a URI, for which the URI alone may be written."""

    uri: _Location
    """A folder, relative to the job file, or an S3 URI."""

    @classmethod
    def prepare(cls, data: object) -> object:
        """Read a text as the URI."""
        return {"uri": data} if isinstance(data, str) else data

    @classmethod
    def as_written(cls, problem: Problem, data: Any) -> Problem:
        """Tell a problem of the URI at the text itself, if it was written as one."""
        return Problem((), problem.message, problem.hint) if isinstance(data, str) else problem


class Channel(Located):
    """One input of the job."""

    mode: Literal["File", "FastFile", "Pipe"] = "File"
    """How SageMaker brings the data: copied before the start, read on demand, or streamed."""

    content_type: str | None = None
    """MIME type, told to the script and otherwise unused."""

    sharded: bool = False
    """Give each host its share of the objects instead of all of them."""


class Checkpoints(Located):
    """Where checkpoints are kept, so that an interrupted job goes on."""

    local_path: _ContainerPath = "/opt/ml/checkpoints"
    """The folder inside the container that is kept in step with `uri`."""


class JobConfig(Section):
    """A job. Only `entry_point` is required."""

    entry_point: _Script
    """The training script, relative to `source_dir`."""

    source_dir: _Location = "."
    """The folder with the sources, relative to the job file, or an S3 URI. Default: the folder of the job file."""

    name: _Name = Field(default_factory=lambda data: _name_from(PurePosixPath(data.get("entry_point", "")).stem))
    """Name of the job, the beginning of its name in the cloud. Default: made of the entry point's name."""

    hyperparameters: Annotated[dict[str, JsonValue], free_form(_hyperparameter_problems)] = Field(default_factory=dict)
    """Arguments of the script: `{"epochs": 3}` becomes `--epochs 3`."""

    environment: Annotated[dict[str, str], free_form(_variable_problems)] = Field(default_factory=dict)
    """Variables for the script. All values are text: put numbers in quotes."""

    distribution: Distribution = Field(default_factory=Distribution)
    """SageMaker's `distribution` dict: model parallelism and launcher."""

    compute: Compute = Field(default_factory=Compute)
    """How many machines of which kind, and for how long."""

    image: _Word | None = None
    """The container image; not used on this machine."""

    role: _Word | None = None
    """The IAM role (name or ARN) that SageMaker takes; not used on this machine."""

    inputs: Annotated[dict[str, Channel], free_form(_channel_problems)] = Field(default_factory=dict)
    """Input channels: name -> folder or S3 URI, which the script finds in `SM_CHANNEL_<NAME>`."""

    output: _Location | None = None
    """Folder or S3 URI for the model and other results."""

    checkpoints: Checkpoints | None = None
    """Where checkpoints are kept."""

    stand_ins: ClassVar[Mapping[str, Any]] = {"entry_point": "stand_in.py"}

    refused: ClassVar[Mapping[str, tuple[str, str]]] = {
        "instance_type": ("belongs to `compute`", "write `compute: {instance_type: ...}`"),
        "instance_count": ("belongs to `compute`", "write `compute: {instance_count: ...}`"),
        "image_uri": ("is called `image` here", "rename it"),
        "env": ("is called `environment` here", "rename it"),
    }

    def cross_problems(self, _written: Mapping[str, Any], broken: frozenset[KeyPath], /) -> Iterable[Problem]:
        """Check the degrees against the number of ranks, where that is known."""
        if self.distribution.processes_per_host is None or any(path[-1:] in _SIZES for path in broken):
            return ()
        problems = self.distribution.world_problems(self.num_processes(1))
        return [Problem(("distribution", *problem.path), problem.message, problem.hint) for problem in problems]

    def num_processes(self, default_per_host: int) -> int:
        """Number of ranks, with `default_per_host` of them on a host if the job does not say."""
        return self.compute.instance_count * (self.distribution.processes_per_host or default_per_host)

    def notices(self) -> list[Problem]:
        """Say which settings have no effect."""
        found = self.distribution.notices()
        return [Problem(("distribution", *problem.path), problem.message, problem.hint) for problem in found]


_SIZES = frozenset(
    (name,)
    for name in (
        *("compute", "distribution", "smdistributed", "modelparallel", "parameters", "mpi", "torch_distributed"),
        *("enabled", "instance_count", "processes_per_host", "partitions"),
        *("pipeline_parallel_degree", "tensor_parallel_degree", "sharded_data_parallel_degree"),
    )
)
"""Ends of the paths that the number of ranks depends on: if one of them is wrong, that is enough to tell."""
