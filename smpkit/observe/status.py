"""What a rank is doing, in one page of memory that its launcher reads: also after the rank was killed.

It says also which setting would save a rank most that ran out of memory, by what it held. `smpkit plan --model` weighs
the same changes by the simulated schedule, before anything runs (`smpkit.plan.tune.features`).

The page is a mapped file. Writing to it is no system call, so it may happen in every step and at every layer; and the
kernel keeps what was written when the process is gone, which a pipe or a log would have lost.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.observe.summary import KindBytes
from smpkit.plan.tune.neighbours import memory_changes
from smpkit.units import amount

STATUS_DIR: Final = "SMPKIT_STATUS_DIR"
"""The folder for the pages of one host's ranks, set by their launcher."""

ACTION_CELL: Final = 2
"""The cell of a page with the action that runs: its microbatch times 256, and the first letter of its kind; negative
between steps."""
LAYER_CELL: Final = 3
"""The cell with the number of the layer that runs; 0: none."""

_WRITES, _STEP, _LENGTH, _NAMES_LENGTH, _TRAINED, _STEP_NS = 0, 1, 4, 5, 6, 7
"""More cells: the number of writes to the text (odd while one goes on), the step, the lengths of text and names, how
many training steps have ended, and how long one takes on average."""
_CELLS: Final = struct.Struct("=8q")
_TEXT_AT: Final = 64
_NAMES_AT: Final = 4096
_SIZE: Final = 1 << 16
"""Of the file, which takes no more memory than was written to."""
_LONGEST_NAME: Final = 191
_ACTIONS: Final = {"F": "forward", "B": "backward", "W": "weight half of the backward"}


def page_of(folder: Path, rank: int) -> Path:
    return folder / f"status-{rank}"


@dataclass(frozen=True)
class Levers:
    """What a job could still switch on to save memory.

    Args:
        replicas: ranks that hold the same weights.
        settings: how a user would write each feature, by the feature's name.
    """

    replicas: int
    settings: Mapping[str, str]

    @classmethod
    def of(cls, config: ModelParallelConfig, replicas: int, *, is_checkpointed: bool) -> Levers:
        """Return what a configuration has not set."""
        changes = memory_changes(config, replicas, can_checkpoint=True, is_checkpointed=is_checkpointed)
        return cls(replicas, {change.feature: change.setting for change in changes if not change.is_on})


class _Numbers(dict[str, int]):
    """The numbers of layers, from 1; whoever asks for a new one writes its name into the page, if there is room."""

    def __init__(self, page: mmap.mmap, cells: memoryview) -> None:
        self._page, self._cells = page, cells

    def __missing__(self, name: str) -> int:
        entry = name.encode()[:_LONGEST_NAME].replace(b"\n", b" ") + b"\n"
        begin = _NAMES_AT + self._cells[_NAMES_LENGTH]
        has_room = begin + len(entry) <= _SIZE
        if has_room:
            self._page[begin : begin + len(entry)] = entry
            self._cells[_NAMES_LENGTH] += len(entry)
        self[name] = max(self.values(), default=0) + 1 if has_room else 0
        return self[name]


class StatusPage:
    """A rank's own page.

    What changes with every action and layer is one number in `cells`: whoever notes it there calls no function.
    """

    def __init__(self, folder: Path, rank: int, degrees: tuple[int, int, int] | None = None) -> None:
        with page_of(folder, rank).open("w+b") as file:
            file.truncate(_SIZE)
            self._page = mmap.mmap(file.fileno(), _SIZE)
        self.cells = memoryview(self._page)[: _CELLS.size].cast("q")
        self.layer_numbers = _Numbers(self._page, self.cells)
        """By name, what stands for a layer in its cell; a name is given a number when it is asked for."""
        self.begin_step(-1)
        self._degrees = degrees
        if degrees is not None:
            self.write(None, None, None)

    def begin_step(self, step: int) -> None:
        """Note that a step begins; -1: none has."""
        self.cells[_STEP], self.cells[ACTION_CELL] = step, 0

    def end_step(self, num_trained: int, seconds: float) -> None:
        """Note that the step has ended, how many training steps have, and how long one takes on average."""
        self.cells[_TRAINED], self.cells[_STEP_NS] = num_trained, round(seconds * 1e9)
        self.cells[ACTION_CELL], self.cells[LAYER_CELL] = -1, 0

    def write(self, held: KindBytes | None, planned: KindBytes | None, levers: Levers | None) -> None:
        """Note what the rank holds, what was planned, and what its job has set of all that saves memory."""
        noted = {"held": held, "planned": planned, "levers": levers}
        content = {name: None if value is None else asdict(value) for name, value in noted.items()}
        text = json.dumps({**content, "degrees": self._degrees}).encode()
        if len(text) > _NAMES_AT - _TEXT_AT:
            return
        self.cells[_WRITES] += 1
        self._page[_TEXT_AT : _TEXT_AT + len(text)] = text
        self.cells[_LENGTH] = len(text)
        self.cells[_WRITES] += 1

    def close(self) -> None:
        """Unmap the page; the file stays for the launcher."""
        self.cells.release()
        self._page.close()


@dataclass(frozen=True)
class RankStatus:
    """What a page says."""

    step: int
    """Number of the step that runs or ran last; -1: none has begun."""
    action: str = ""
    """`forward`, `backward` or its weight half; empty if none is known."""
    microbatch: int = 0
    layer: str = ""
    held: KindBytes | None = None
    """The most at once, to 2 %, in the steps that were measured since the warm-up; if an exception ended the last step,
    the most in that one."""
    planned: KindBytes | None = None
    levers: Levers | None = None
    num_trained: int = 0
    """Training steps that have ended."""
    step_seconds: float = 0.0
    """How long one takes on average; 0 before the first one has ended."""
    degrees: tuple[int, int, int] | None = None
    """Of pipeline, tensor and data parallelism."""
    has_ended: bool = False
    """Whether the step has ended and no other has begun."""

    def remedy(self, asked: int = 0) -> str:
        """Return the one setting that would save most of what the rank held; empty if that is not known to help.

        Args:
            asked: the bytes that could not be had. Between steps there are none of the activations that were held.
        """
        if self.held is None or self.levers is None or self.has_ended:
            return ""
        held, settings = self.held, self.levers.settings
        # A gradient is as large as its weight, and is not there yet in the first forward.
        updated, divided = held.weights + max(held.weights, held.gradients), 1 - 1 / self.levers.replicas
        saved = {
            "checkpointing": held.activations,
            "offloading": held.activations,
            "sharding": round((updated + held.states) * divided),
            "sharded states": round(held.states * divided),
            "microbatches": held.activations // 2,
        }
        best = max((feature for feature in saved if feature in settings), key=saved.__getitem__)
        if saved[best] < max(asked, 1):
            return ""
        up_to = "up to " if best in ("checkpointing", "offloading") else ""
        return f"`{settings[best]}` saves most: {up_to}{amount(saved[best])} of this rank's memory"


def read_status(folder: Path, rank: int) -> RankStatus | None:
    """Read a rank's page; None if it has none yet. Without a text that was written at this moment."""
    try:
        with page_of(folder, rank).open("rb", buffering=0) as file:
            data = file.read(_SIZE)
            file.seek(0)
            after = file.read(_CELLS.size)
    except OSError:
        return None
    if len(data) < _SIZE:
        return None
    writes, step, action, layer, length, names_length, num_trained, step_ns = _CELLS.unpack_from(data)
    names = data[_NAMES_AT : _NAMES_AT + names_length].decode("utf-8", errors="replace").split("\n")
    texts: dict[str, Any] = {}
    if writes and not writes % 2 and _CELLS.unpack(after)[_WRITES] == writes:
        with suppress(ValueError):
            texts = json.loads(data[_TEXT_AT : _TEXT_AT + length])
    held, planned, levers, degrees = (texts.get(name) for name in ("held", "planned", "levers", "degrees"))
    return RankStatus(
        step=step,
        action=_ACTIONS.get(chr(action % 256), ""),
        microbatch=max(0, action // 256),
        layer=names[layer - 1] if 0 < layer < len(names) else "",
        held=None if held is None else KindBytes(**held),
        planned=None if planned is None else KindBytes(**planned),
        levers=None if levers is None else Levers(**levers),
        num_trained=num_trained,
        step_seconds=step_ns * 1e-9,
        degrees=None if degrees is None else tuple(degrees),
        has_ended=action < 0,
    )
