"""The places a job reads from and writes to: input channels and checkpoints."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from smpkit.config.section import Section
from smpkit.config.texts import ContainerPath, Location
from smpkit.errors import Problem

__all__ = ["Channel", "Checkpoints", "InputMode"]

InputMode = Literal["File", "FastFile", "Pipe"]


class Located(Section):
    """Something with a URI, for which the URI alone may be written."""

    uri: Location
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

    mode: InputMode | None = None
    """How SageMaker brings the data: copied before the start, read on demand, or streamed. Default: `input_mode`."""

    content_type: str | None = None
    """MIME type, told to the script and otherwise unused."""

    sharded: bool = False
    """Give each host its share of the objects instead of all of them."""

    data_type: Literal["S3Prefix", "ManifestFile", "AugmentedManifestFile"] = "S3Prefix"
    """What `uri` names: the beginning of objects' names, or a file that lists them."""

    compression: Literal["None", "Gzip"] | None = None
    """Compression of the data, for mode `Pipe`."""

    record_wrapping: Literal["None", "RecordIO"] | None = None
    """Form of the records, for mode `Pipe`."""

    attribute_names: list[str] = Field(default_factory=list, max_length=16)
    """With `AugmentedManifestFile`: the attributes to read."""

    shuffle_seed: int | None = None
    """Shuffle the objects (or the lines of a manifest) at the start of every epoch, with this seed."""


class Checkpoints(Located):
    """Where checkpoints are kept, so that an interrupted job goes on."""

    local_path: ContainerPath = "/opt/ml/checkpoints"
    """The folder inside the container that is kept in step with `uri`."""
