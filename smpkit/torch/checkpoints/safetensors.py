"""The safetensors format: one rank writes a file, or several fill it; readers map it, after checking what it claims.

::

    length of the header (8 bytes, little end first) | {"__metadata__": {"crc32": ..., "format": "pt"},
                                                        "wte.weight": {"dtype": "F32", "shape": [8, 4],
                                                                       "data_offsets": [0, 128]}, ...} | the tensors

The format has no checksums. What smpkit writes carries CRC-32 sums among the header's free texts, where other programs
leave them alone: eight hexadecimal digits for the header, computed as if they were zeros themselves, and eight for each
tensor. So the first eight stand for the whole file. Files of earlier versions have one sum of everything.

The tensors are written one after the other from the memory they are in, so that those of a device need the memory of
one of them on the host. The `safetensors` package takes all of them at once, on the host, and computes no sums.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch

from smpkit.errors import CheckpointError
from smpkit.torch.checkpoints import folder as files
from smpkit.torch.checkpoints.integrity import PIECE_BYTES, Member

__all__ = [
    "SUFFIX",
    "dtype_of",
    "header_of",
    "is_storable",
    "map_tensors",
    "members_of",
    "specs_of",
    "write_tensors",
]

SUFFIX: Final = ".safetensors"

_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}
_LONGEST_HEADER: Final = 100_000_000  # the format's own limit
_METADATA: Final = "__metadata__"
_CRC: Final = "crc32"
_NO_CRC: Final = "0" * 8
_CRC_AT: Final = 8 + len(f'{{"{_METADATA}":{{"{_CRC}":"')
"""Where the checksums begin in files of ours: their header begins with them."""


# --- writing ----------------------------------------------------------------------------------------------------------


def is_storable(value: object) -> bool:
    """Return whether a value is a tensor that the format has room for: dense, and of one of its dtypes."""
    if not isinstance(value, torch.Tensor):
        return False
    plain = value.detach()
    is_dense = type(plain) is torch.Tensor and plain.layout is torch.strided
    return is_dense and plain.dtype in _NAMES and not plain.is_conj() and not plain.is_neg()


def header_of(tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> tuple[bytes, dict[str, int]]:
    """Return the header of a file with these tensors, and the offset of each tensor in the file, in their order there.

    Raises:
        CheckpointError: the format has no name for a dtype, or uses the name of a tensor itself.
    """
    spec: dict[str, Any] = {_METADATA: {_CRC: _NO_CRC * (1 + len(tensors)), "format": "pt"}}
    at = 0
    # Wide dtypes first, so that every tensor is aligned.
    for name in sorted(tensors, key=lambda name: (-tensors[name][1].itemsize, name)):
        shape, dtype = tensors[name]
        if dtype not in _NAMES:
            raise CheckpointError(f"safetensors has no dtype {dtype} (`{name}`)")
        if name == _METADATA:
            raise CheckpointError(f"safetensors has no room for a tensor called `{name}`")
        size = math.prod(shape) * dtype.itemsize
        spec[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(spec, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    offsets = {name: start + each["data_offsets"][0] for name, each in spec.items() if name != _METADATA}
    return len(text).to_bytes(8, "little") + text, offsets


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
    """Write a file, one tensor after the other; return its size in bytes, and the checksum that stands for all of it.

    `torch.serialization.set_crc32_options(False)` leaves out the checksums of the tensors, as in files of `torch.save`.

    Raises:
        OSError: it cannot be written.
    """
    header, offsets = header_of({name: (tuple(each.shape), each.dtype) for name, each in tensors.items()})

    def write(file: BinaryIO) -> None:
        nonlocal header
        file.write(header)
        header = _with_checksums(header, [_write_tensor(file, tensors[name]) for name in offsets])
        file.seek(0)
        file.write(header)
        file.seek(0, os.SEEK_END)

    size = files.fsync_write(path, write)
    return size, int(header[_CRC_AT : _CRC_AT + 8], 16)


def _write_tensor(file: BinaryIO, tensor: torch.Tensor) -> int:
    """Write a tensor row-major; return its checksum."""
    data = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data
    crc, with_crc = 0, torch.serialization.get_crc32_options()
    for start in range(0, len(data), PIECE_BYTES):  # the piece is still in the processor's cache when it is written
        piece = data[start : start + PIECE_BYTES]
        crc = zlib.crc32(piece, crc) if with_crc else 0
        file.write(piece)
    return crc


def _with_checksums(header: bytes, crcs: Sequence[int]) -> bytes:
    """Return a header in which no checksums are filled in yet with those of the tensors, and its own."""
    end = _CRC_AT + 8
    digits = "".join(f"{crc:08x}" for crc in crcs).encode()
    filled = header[:end] + digits + header[end + len(digits) :]
    return filled[:_CRC_AT] + f"{zlib.crc32(filled):08x}".encode() + filled[end:]


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Header:
    """The header of a file.

    Args:
        raw: its bytes, with the length before them.
        tensors: dtype, shape and offsets by name, in the order of the file.
        digits: of smpkit's checksums, none in files of other programs.
    """

    path: Path
    raw: bytes
    tensors: Mapping[str, Any]
    digits: str

    @property
    def crc(self) -> int:
        """The checksum that it should carry."""
        return zlib.crc32(self.raw.replace(self.digits.encode(), f"{_NO_CRC}{self.digits[8:]}".encode(), 1))

    def members(self) -> list[Member]:
        """Return all tensors; those without a checksum have 0."""
        if len(self.digits) == 8 and self.tensors:  # one of everything, the header first
            size = self.path.stat().st_size - len(self.raw)
            return [Member(self.path, "tensors", len(self.raw), size, int(self.digits, 16), self.crc)]
        found = []
        for number, (name, each) in enumerate(self.tensors.items(), 1):
            begin, end = each["data_offsets"]
            crc = int(self.digits[8 * number : 8 * number + 8] or "0", 16)
            found.append(Member(self.path, name, len(self.raw) + begin, end - begin, crc))
        return found


def members_of(path: Path, crc: int = 0) -> list[Member]:
    """Return what has a checksum in a file, whose header is compared with its own at once.

    Args:
        crc: the checksum that stands for the file, if another one says which it must be.

    Raises:
        CheckpointError: it is damaged, or another file than that.
    """
    header = _read_header(path)
    try:
        members = header.members()
        wanted = crc or (int(header.digits[:8], 16) if len(header.digits) > 8 else 0)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if wanted and header.crc != wanted:
        raise CheckpointError(f"the header of {path} has the CRC-32 {header.crc:08x} instead of {wanted:08x}")
    return members


def map_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, mapped, so that only what is used is read.

    Raises:
        CheckpointError: it is no whole file of this format.
    """
    header = _read_header(path)
    raw = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8, device="cpu")
    return {name: _tensor(raw, len(header.raw), each) for name, each in header.tensors.items()}


def specs_of(path: Path) -> Mapping[str, Any]:
    """Return dtype and shape of the tensors of a file, by name.

    Raises:
        CheckpointError: it is no whole file of this format.
    """
    return _read_header(path).tensors


def _read_header(path: Path) -> _Header:
    """Read the header of a file, and check that each tensor is inside the file."""
    try:
        with path.open("rb") as file:
            raw = file.read(8)
            length = int.from_bytes(raw, "little")
            if length > _LONGEST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            raw += file.read(length)
        tensors: dict[str, Any] = json.loads(raw[8:])
        digits = str(tensors.pop(_METADATA, {}).get(_CRC, ""))
        room = path.stat().st_size - 8 - length
        for name, each in tensors.items():
            begin, end = each["data_offsets"]
            if not 0 <= begin <= end <= room or end - begin != math.prod(each["shape"]) * dtype_of(each).itemsize:
                raise ValueError(f"`{name}` is said to be at bytes {begin} to {end} of {room}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no whole safetensors file: {error}") from error
    return _Header(path, raw, tensors, digits)


def dtype_of(spec: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of a tensor that a header describes."""
    return _DTYPES[spec["dtype"]]


def _tensor(raw: torch.Tensor, start: int, spec: Mapping[str, Any]) -> torch.Tensor:
    begin, end = spec["data_offsets"]
    part = raw[start + begin : start + end]
    if (start + begin) % dtype_of(spec).itemsize:
        part = part.clone()  # files of other writers may be unaligned, and `view` needs alignment
    return part.view(dtype_of(spec)).view(spec["shape"])
