"""What a run got, as data: the block at its end, `summary.json` in its folder.

Rank 0 writes it as the ranks end. `smpkit run` adds how the run ended, which a rank that was killed cannot say.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar, Final, Literal, TypeAlias

from pydantic import ConfigDict, TypeAdapter, ValidationError

from smpkit.errors import SmpkitError
from smpkit.observe.runs import SUMMARY

Basis: TypeAlias = Literal["simulated", "measured", "planned"]


class SummaryError(SmpkitError):
    """A summary that is missing or damaged, or cannot be written."""


@dataclass(frozen=True)
class Split:
    """Where a rank's time goes, in seconds of an average step; the sum is the step time.

    A step lasts from the start of one call of the step function to the start of the next, optimizer included.
    """

    compute: float = 0.0
    """Forwards, backwards and recomputation."""
    bubble: float = 0.0
    """Waiting for other stages of the pipeline."""
    communication: float = 0.0
    """Collectives and messages that nothing hides, such as the reduction of gradients."""
    stall: float = 0.0
    """Waiting for offloaded activations."""
    optimizer: float = 0.0
    other: float = 0.0
    """The rest: loading of data, logging, checkpoints, the runtime itself."""

    @property
    def total(self) -> float:
        return float(sum(vars(self).values()))


@dataclass(frozen=True)
class KindBytes:
    """Bytes by kind."""

    weights: int = 0
    gradients: int = 0
    states: int = 0
    """Of the optimizer."""
    activations: int = 0
    """That wait for their backward on the device."""
    parked: int = 0
    """Values of other ranks and of offloading, on the device, that are not used at the moment."""
    offloaded: int = 0
    """On the host."""
    other: int = 0

    @property
    def on_device(self) -> int:
        return int(sum(vars(self).values())) - self.offloaded


@dataclass(frozen=True)
class RankSummary:
    """One rank."""

    rank: int
    host: str
    split: Split
    peak: KindBytes
    """The most of each kind; their moments may differ, so `peak.on_device` may be more than `device_peak`."""
    device_peak: int | None = None
    """The most bytes of all kinds at one moment: as the device counts, or on the CPU what tensors hold."""
    device_size: int | None = None
    """Bytes of the device; None: the CPU."""
    planned: KindBytes | None = None
    """What `smpkit plan` expected; None where the plan has no model."""

    @property
    def most_bytes(self) -> int:
        """The peak that block, report and list of runs show."""
        return self.peak.on_device if self.device_peak is None else self.device_peak

    def share(self, part: str) -> float:
        """Return the share of a step that a part of its `split` takes."""
        total = self.split.total
        return float(getattr(self.split, part)) / total if total else 0.0


def parts_of(ranks: Sequence[RankSummary]) -> list[str]:
    """Return the parts of a step that are worth showing: those that are not next to nothing on all of these ranks."""
    return [part.name for part in fields(Split) if any(rank.share(part.name) >= 0.0005 for rank in ranks)]


@dataclass(frozen=True)
class Gain:
    """What one feature gained: a figure with it, and the same without it."""

    feature: str
    """As in the job file or API: `offload_activations`, `activation_checkpointing`."""
    rank: int
    """For which the figures are: the one that gains most."""
    bytes_with: int
    bytes_without: int
    basis: Basis
    """Where `bytes_without` and `slower` come from."""
    slower: float | None = None
    """By how much the step is longer with it, as a share; None where unknown."""


@dataclass(frozen=True)
class RunSummary:
    """One run."""

    name: str
    started: float
    """Seconds since 1970."""
    seconds: float
    """From `smp.init` to the end."""
    steps: int
    """Training steps: calls of a step function with a backward."""
    exit_reason: str
    """`finished`, `failed: ...`, `stopped`."""
    steps_per_s: float | None = None
    samples_per_s: float | None = None
    """Over all replicas."""
    tokens_per_s: float | None = None
    flops_share: float | None = None
    """Of the machine's peak: what forward and backward of the model compute, without what is recomputed."""
    flops_basis: str = ""
    """Where that peak is from, in words."""
    world_size: int = 1
    pipeline: int = 1
    tensor: int = 1
    data: int = 1
    ranks: tuple[RankSummary, ...] = ()
    gains: tuple[Gain, ...] = ()
    values: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Of the loss and what else was logged, the first and the last value."""
    notes: tuple[str, ...] = ()
    """What is missing in this summary, and why."""
    format: Literal[1] = 1
    __pydantic_config__: ClassVar[ConfigDict] = {"ser_json_inf_nan": "strings"}  # of a loss that diverged


_ADAPTER: Final = TypeAdapter(RunSummary)


def write_summary(folder: Path, summary: RunSummary) -> None:
    """Write `summary.json` into the folder of a run, whole or not at all."""
    path = folder / SUMMARY
    part = path.with_name(f".{SUMMARY}.{os.getpid()}")
    try:
        part.write_bytes(_ADAPTER.dump_json(summary, indent=2) + b"\n")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise SummaryError(f"the summary cannot be written to `{path}`: {error.strerror}") from None


def read_summary(folder: Path) -> RunSummary:
    """Read the summary of the run in `folder`; raise SummaryError if there is none, or if it is damaged."""
    path = folder / SUMMARY
    try:
        return _ADAPTER.validate_json(path.read_bytes())
    except FileNotFoundError:
        raise SummaryError(f"there is no `{path}`", hint="a run writes it at its end") from None
    except OSError as error:
        raise SummaryError(f"`{path}` cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{part}: " for part in first["loc"])
        raise SummaryError(f"`{path}` is damaged: {where}{first['msg']}") from None
