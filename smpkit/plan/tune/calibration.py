"""What `smpkit calibrate` has measured of a machine: read, checked, and compared with the machine it is used for."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, ValidationError

from smpkit.config.documents import read_document
from smpkit.config.section import Section, explain
from smpkit.config.words import printable
from smpkit.errors import ConfigError, UsageError

CALIBRATION: Final = "calibration.json"
"""What `smpkit calibrate` writes, if it is told no other name."""
_Positive = Annotated[float, Field(gt=0)]
_Count = Annotated[int, Field(ge=1)]


class Identity(Section):
    """Which machine was measured, and with what: a calibration of another one says nothing about this one."""

    host: str
    """Name of the machine."""
    processor: str
    """Model of its processor."""
    cores: _Count
    """That the ranks could use together."""
    memory_bytes: _Count
    """Of the host."""
    device: str
    """What ranks compute on: the model of an accelerator, or `cpu`."""
    devices: Annotated[int, Field(ge=0)] = 0
    """Number of accelerators."""
    device_memory_bytes: Annotated[int, Field(ge=0)] = 0
    """Of each; 0: ranks compute on the host."""
    system: str = ""
    python: str = ""
    torch: str = ""
    smpkit: str = ""

    @property
    def kind(self) -> str:
        """What the ranks compute on, as messages name it."""
        return self.processor if self.device == "cpu" else self.device


class Matmul(Section):
    """A product of two square matrices."""

    dtype: str
    size: _Count
    flops_per_second: _Positive
    """Of one rank while the others rest."""
    shared_flops_per_second: _Positive
    """Of one rank while all compute: less where ranks share cores."""


class HostLink(Section):
    """The link between an accelerator and the host's pinned memory."""

    out_bytes_per_second: _Positive
    back_bytes_per_second: _Positive
    both_bytes_per_second: _Positive
    """Both directions together while both copy."""
    latency_seconds: Annotated[float, Field(ge=0)]


class Message(Section):
    """One value from a rank to the next."""

    num_bytes: _Count
    seconds: _Positive


class Collective(Section):
    """A collective over the first so many ranks."""

    operation: Literal["all_reduce", "all_gather", "reduce_scatter"]
    ranks: Annotated[int, Field(ge=2)]
    num_bytes: _Count
    """Of the whole value: what an all-gather ends with, and what a reduce-scatter begins with."""
    seconds: _Positive


class Calibration(Section):
    """The facts of one machine."""

    format: Literal[1]
    machine: Identity
    ranks: _Count
    """That were started."""
    seconds: _Positive
    """How long it took to measure."""
    matmul: Annotated[list[Matmul], Field(min_length=1)]
    memory_bytes_per_second: _Positive
    """Read and written by a copy within the memory that a rank computes in."""
    link: HostLink | None = None
    """None where ranks compute on the host."""
    messages: list[Message] = Field(default_factory=list)
    collectives: list[Collective] = Field(default_factory=list)
    updates_per_second: _Positive
    """Parameters that AdamW updates per second on a rank's cores."""
    action_seconds: Annotated[float, Field(ge=0)] = 0.0
    """What the runtime itself spends on the forward or the backward of a microbatch on a stage, and on its message."""
    operation_seconds: Annotated[float, Field(ge=0)] = 0.0
    """What the host spends on an operator in a forward, and on half of one in a backward: small ones, with autograd."""
    split_seconds: Annotated[float, Field(ge=0)] = 0.0
    """How much more a backward in two halves (`zero_bubble`) costs the host, for each product with a weight."""
    elementwise_bytes_per_second: Annotated[float, Field(ge=0)] = 0.0
    """What an elementwise operator reads and writes of a value of a layer's size, which caches may hold."""


def read_calibration(path: Path) -> Calibration:
    """Read what `smpkit calibrate` wrote; raise UsageError, in one sentence, if it is not that."""
    shown = printable(str(path))
    hint = f"make one with `smpkit calibrate --output {shown}`"
    try:
        content = read_document(path).value
        return Calibration.model_validate(content)
    except ConfigError as error:
        problem = error.problems[0]
        raise UsageError(f"`{shown}` is no calibration: {problem.message}", hint=problem.hint or hint) from None
    except ValidationError as error:
        first, *others = explain(error)
        more = f" (and {len(others)} more problems)" if others else ""
        where = f"`{first.where}` " if first.path else ""
        raise UsageError(f"`{shown}` is no calibration: {where}{first.message}{more}", hint=hint) from None


def measured_flops(folder: Path, half: str | None) -> float | None:
    """Return the fastest matrix product of a rank, while all compute, in half precision or (None) single.

    None if the folder has no calibration of this machine.
    """
    if not (path := folder / CALIBRATION).is_file():
        return None
    try:
        calibration = read_calibration(path)
    except UsageError:
        return None
    refusal, others = differences(calibration.machine, this_machine())
    rates = [rate.shared_flops_per_second for rate in calibration.matmul if rate.dtype == (half or "float32")]
    return None if refusal or others else max(rates, default=None)


def this_machine() -> Identity:
    """Return which machine this is, as far as can be told without torch."""
    device, devices, device_memory = _accelerators()
    return Identity(
        host=platform.node() or "unknown",
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        device=device,
        devices=devices,
        device_memory_bytes=device_memory,
        system=platform.platform(),
        python=platform.python_version(),
    )


def _processor() -> str:
    try:
        match = re.search(r"^model name\s*: *(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        match = None
    return match[1].strip() if match else platform.processor() or platform.machine() or "unknown"


def _accelerators() -> tuple[str, int, int]:
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "cpu", 0, 0
    lines = [line.split(",") for line in done.stdout.splitlines() if line.count(",") == 1]
    if not lines:
        return "cpu", 0, 0
    memory = lines[0][1].strip()
    return lines[0][0].strip(), len(lines), int(memory) * 2**20 if memory.isdecimal() else 0


def differences(measured: Identity, present: Identity) -> tuple[str | None, list[str]]:
    """Compare the machine of a calibration with the one that it is used for.

    Returns:
        Why it cannot be used, if ranks compute on something else there; and what else differs, in words.
    """
    if (measured.kind, measured.device == "cpu") != (present.kind, present.device == "cpu"):
        return f"was measured on `{measured.host}`, whose ranks compute on {measured.kind}, not {present.kind}", []
    counts = (
        ("cores", measured.cores, present.cores),
        ("accelerators", measured.devices, present.devices),
        ("GiB of memory", measured.memory_bytes >> 30, present.memory_bytes >> 30),
    )
    others = [f"{one} {name} there, {other} here" for name, one, other in counts if one != other]
    if measured.host != present.host:
        others.insert(0, f"it was measured on `{measured.host}`, and this is `{present.host}`")
    return None, others
