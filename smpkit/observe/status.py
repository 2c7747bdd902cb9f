"""What a rank is doing, in one page of memory that its launcher reads: also after the rank was killed.

The page is a mapped file. Writing to it is no system call, so it may happen in every step and at every layer; and the
kernel keeps what was written when the process is gone, which a pipe or a log would have lost.
"""

from __future__ import annotations

import json
import mmap
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from smpkit.observe.summary import KindBytes

__all__ = ["STATUS_DIR", "RankStatus", "StatusPage", "page_of", "read_status"]

STATUS_DIR: Final = "SMPKIT_STATUS_DIR"
"""The folder for the pages of one host's ranks, set by their launcher."""

_SIZE: Final = 4096
_HEAD: Final = struct.Struct("<IqqIB")
"""Number of writes to the text (odd while one goes on), step, microbatch, length of the text, first letter of the
action's kind."""
_COUNT: Final = struct.Struct("<I")
_STEP: Final = struct.Struct("<q")
_LAYER_AT: Final = 64
_LAYER_SIZE: Final = 192
_TEXT_AT: Final = _LAYER_AT + _LAYER_SIZE
_NOTHING: Final = bytes(_LAYER_SIZE)
_ACTIONS: Final = {"F": "forward", "B": "backward", "W": "weight half of the backward"}


def page_of(folder: Path, rank: int) -> Path:
    """Return the file of a rank's page."""
    return folder / f"status-{rank}"


class StatusPage:
    """A rank's own page.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        with page_of(folder, rank).open("w+b") as file:
            file.truncate(_SIZE)
            self._page = mmap.mmap(file.fileno(), _SIZE)
        self._writes = 0
        self._layers: dict[str, bytes] = {}
        self.begin_step(-1)

    def begin_step(self, step: int) -> None:
        """Note that a step begins; -1: none has."""
        _STEP.pack_into(self._page, 4, step)

    def begin_action(self, kind: str, microbatch: int) -> None:
        """Note that an action of a microbatch begins."""
        self._page[12:20] = _STEP.pack(microbatch)
        self._page[24] = ord(kind[0])

    def begin_layer(self, name: str) -> None:
        """Note that a layer begins."""
        packed = self._layers.get(name)
        if packed is None:
            packed = self._layers[name] = name.encode()[: _LAYER_SIZE - 1].ljust(_LAYER_SIZE, b"\0")
        self._page[_LAYER_AT:_TEXT_AT] = packed

    def end_layers(self) -> None:
        """Note that no layer runs, as in a backward or between steps."""
        self._page[_LAYER_AT:_TEXT_AT] = _NOTHING

    def write(self, held: KindBytes, planned: KindBytes | None, remedy: str) -> None:
        """Note what the rank holds, what was planned, and the setting that would save most."""
        content = {"held": asdict(held), "planned": None if planned is None else asdict(planned), "remedy": remedy}
        text = json.dumps(content).encode()
        if len(text) > _SIZE - _TEXT_AT:
            return
        self._writes += 1
        _COUNT.pack_into(self._page, 0, self._writes)
        self._page[_TEXT_AT : _TEXT_AT + len(text)] = text
        _COUNT.pack_into(self._page, 20, len(text))
        self._writes += 1
        _COUNT.pack_into(self._page, 0, self._writes)

    def close(self) -> None:
        """Unmap the page; the file stays for the launcher."""
        self._page.close()


@dataclass(frozen=True)
class RankStatus:
    """What a page says."""

    step: int
    """Number of the step that runs or ran last; -1: none has begun."""
    action: str = ""
    """`forward` or `backward`, if one is known."""
    microbatch: int = 0
    layer: str = ""
    held: KindBytes | None = None
    """As of the last step that was measured."""
    planned: KindBytes | None = None
    remedy: str = ""


def read_status(folder: Path, rank: int) -> RankStatus | None:
    """Read a rank's page; None if it has none yet, or writes at this moment."""
    try:
        data = page_of(folder, rank).read_bytes()
    except OSError:
        return None
    if len(data) < _SIZE:
        return None
    writes, step, microbatch, length, kind = _HEAD.unpack_from(data)
    layer = data[_LAYER_AT:_TEXT_AT].rstrip(b"\0").decode("utf-8", errors="replace")
    told: dict[str, Any] = {}
    if writes and not writes % 2:
        try:
            told = json.loads(data[_TEXT_AT : _TEXT_AT + length])
        except ValueError:
            told = {}
    held, planned = told.get("held"), told.get("planned")
    return RankStatus(
        step=step,
        action=_ACTIONS.get(chr(kind), ""),
        microbatch=microbatch,
        layer=layer,
        held=None if held is None else KindBytes(**held),
        planned=None if planned is None else KindBytes(**planned),
        remedy=str(told.get("remedy", "")),
    )
