"""The places a job reads from and writes to: input channels and checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import Field

from smpkit.config.section import KeyPath, Section
from smpkit.config.texts import ContainerPath, Location, Word
from smpkit.errors import Problem

__all__ = ["Channel", "Checkpoints", "FileSystem", "InputMode"]

InputMode = Literal["File", "FastFile", "Pipe"]


class Located(Section):
    """Something with a URI, for which the URI alone may be written."""

    @classmethod
    def prepare(cls, data: object) -> object:
        """Read a text as the URI."""
        return {"uri": data} if isinstance(data, str) else data

    @classmethod
    def as_written(cls, problem: Problem, data: Any) -> Problem:
        """Tell a problem of the URI at the text itself, if it was written as one."""
        return Problem((), problem.message, problem.hint) if isinstance(data, str) else problem


class FileSystem(Section):
    """A file system of AWS that the machines mount: no data is copied before the start. The job needs `network`."""

    id: Word
    """Its id, such as `fs-0123456789abcdef0`."""

    type: Literal["FSxLustre", "EFS"]
    """FSx for Lustre or EFS."""

    path: ContainerPath
    """The folder in it; on FSx for Lustre it begins with the mount name: `/fsx/tokens`."""

    access: Literal["ro", "rw"] = "ro"
    """Read only, or read and write."""


class Channel(Located):
    """One input of the job: `uri` or `file_system`. A text alone is the `uri`."""

    uri: Location | None = None
    """A folder, relative to the job file, or an S3 URI."""

    file_system: FileSystem | None = None
    """A file system in place of a URI."""

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

    accept_eula: bool | None = None
    """Accept the licence of the model that `uri` or `hub_content` names; whoever sets it has read it."""

    hub_content: str | None = None
    """ARN of a model in a private SageMaker hub, to which `uri` belongs."""

    def cross_problems(self, written: Mapping[str, Any], broken: frozenset[KeyPath], /) -> Iterable[Problem]:
        """Ask for one place, and refuse what only objects in S3 have."""
        if any(path[:1] in (("uri",), ("file_system",)) for path in broken):
            return
        if self.file_system is None:
            if self.uri is None:
                yield Problem(("uri",), "is required", "a folder or an S3 URI; or set `file_system`")
            return
        if self.uri is not None:
            yield Problem(("uri",), "is given together with file_system", "keep one of them")
        for name in written:
            if name in _ONLY_IN_S3 and not (name == "mode" and self.mode == "File"):
                yield Problem((name,), "is for objects in S3, and file_system has none", "remove it")


_ONLY_IN_S3 = (
    *("mode", "sharded", "data_type", "compression", "record_wrapping", "attribute_names", "shuffle_seed"),
    *("accept_eula", "hub_content"),
)


class Checkpoints(Located):
    """Where checkpoints are kept, so that an interrupted job goes on."""

    uri: Location
    """A folder, relative to the job file, or an S3 URI."""

    local_path: ContainerPath = "/opt/ml/checkpoints"
    """The folder inside the container that is kept in step with `uri`."""
