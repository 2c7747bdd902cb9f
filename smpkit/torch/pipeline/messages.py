"""What a message between the ranks of a pipeline is: its tag, what it brings, what is kept while it is on its way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from smpkit.torch.pipeline.record import P2PTransfer

__all__ = ["LEFT", "NO_GRADIENT", "Message", "MessageLabel", "SentMessage", "Tag", "describe_message", "version_of"]


class Tag:
    """Tags of everything that is no value or gradient of a microbatch."""

    OBJECT: Final = (1 << 30) + 1
    """Its size; the object itself comes under the next tag."""
    CALL_TRACES: Final = OBJECT + 2
    """As OBJECT."""
    TRACE_CHECKSUMS: Final = OBJECT + 4
    COSTS: Final = OBJECT + 5
    HEADERS: Final = OBJECT + 6
    """Of what travels on channels."""
    INPUTS_REST: Final = (1 << 30) + (1 << 24)
    """Plus the low 24 bits of a checksum of shapes: ranks that expect different bytes never meet in one message."""
    OUTPUTS: Final = (1 << 30) + (2 << 24)
    """As INPUTS_REST."""
    INPUTS_HEAD: Final = (1 << 30) + (3 << 24)
    """Plus its size."""


Message = tuple[int, "P2PTransfer", bool]
"""A microbatch, a transfer and whether it is the transfer's gradient."""
MessageLabel = str | Message
"""What a message is, for errors."""

NO_GRADIENT: Final = -1
"""In a header, instead of a number of bytes: there is no gradient. (Of values without elements there always is one.)"""

LEFT: Final = -2
"""In a header, instead of a tag: nothing more comes from this rank in this step."""


@dataclass(slots=True)
class SentMessage:
    """A message on its way; keeps the tensor, which others read without our knowing when."""

    work: dist.Work
    """Of the message, or of the header of one that takes a channel."""
    tensor: torch.Tensor
    version: int
    """How often the tensor had been changed in place: must stay so until it has arrived."""
    what: MessageLabel
    receive_index: int | None = None
    """Where the action that takes it stands in the receiver's list; None: not known."""
    on_channel: tuple[dist.Work, torch.Tensor] | None = None
    """The message after its header, and its bytes."""
    header: torch.Tensor | None = None


def describe_message(what: MessageLabel) -> str:
    if isinstance(what, str):
        return what
    microbatch, transfer, backward = what
    value = f"gradient of {transfer.spec}" if backward else str(transfer.spec)
    user = f" for `{transfer.consumer}`" if transfer.consumer else ""
    return f"{'backward' if backward else 'forward'} of microbatch {microbatch} ({value}{user})"


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor's memory has been changed in place; tensors of inference mode do not count it."""
    return 0 if tensor.is_inference() else tensor._version
