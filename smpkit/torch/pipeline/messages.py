"""What a message between the ranks of a pipeline is: its tag, what it brings, what is kept while it is on its way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from smpkit.torch.pipeline.record import Move

__all__ = ["ABSENT", "LEFT", "Message", "Sent", "Tag", "What", "text_of", "version_of"]


class Tag:
    """Tags of everything that is no value or gradient of a microbatch."""

    OBJECT: Final = (1 << 30) + 1
    """Its size; the object itself comes under the next tag."""
    WAYS: Final = OBJECT + 2
    """As OBJECT."""
    PATHS: Final = OBJECT + 4
    COSTS: Final = OBJECT + 5
    HEADERS: Final = OBJECT + 6
    """Of what travels in lanes."""
    INPUTS_REST: Final = (1 << 30) + (1 << 24)
    """Plus the low 24 bits of a checksum of shapes: ranks that expect different bytes never meet in one message."""
    OUTPUTS: Final = (1 << 30) + (2 << 24)
    """As INPUTS_REST."""
    INPUTS_HEAD: Final = (1 << 30) + (3 << 24)
    """Plus its size."""


Message = tuple[int, "Move", bool]
"""A microbatch, a move and whether it is the move's gradient."""
What = str | Message
"""What a message is, for errors."""

ABSENT: Final = -1
"""In a header, instead of a number of bytes: there is no gradient. (Of values without elements there always is one.)"""

LEFT: Final = -2
"""In a header, instead of a tag: nothing more comes from this rank in this step."""


@dataclass(slots=True)
class Sent:
    """A message on its way; keeps the tensor, which others read without our knowing when."""

    work: dist.Work
    """Of the message, or of the header of one that takes a lane."""
    tensor: torch.Tensor
    version: int
    """How often the tensor had been changed in place: must stay so until it has arrived."""
    what: What
    taken_at: int | None = None
    """Where the action that takes it stands in the receiver's list; None: not known."""
    in_lane: tuple[dist.Work, torch.Tensor] | None = None
    """The message after its header, and its bytes."""
    header: torch.Tensor | None = None


def text_of(what: What) -> str:
    if isinstance(what, str):
        return what
    microbatch, move, backward = what
    value = f"gradient of {move.spec}" if backward else str(move.spec)
    user = f" for `{move.unit}`" if move.unit else ""
    return f"{'backward' if backward else 'forward'} of microbatch {microbatch} ({value}{user})"


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor's memory has been changed in place; tensors of inference mode do not count it."""
    return 0 if tensor.is_inference() else tensor._version
