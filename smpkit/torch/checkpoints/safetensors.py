"""The safetensors format: headers to write, and a reader of slices for `torch.distributed.checkpoint`.

::

    length of the header (8 bytes, little end first) | {"wte.weight": {"dtype": "F32", "shape": [8, 4],
                                                        "data_offsets": [0, 128]}, ...} | the tensors, row-major

The format has no checksums. What smpkit writes carries a CRC-32 of the whole file among the header's free texts, where
other programs leave it alone; it is computed as if it were eight zeros itself.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import Metadata

from smpkit.errors import CheckpointError
from smpkit.torch.checkpoints.integrity import Member, crc_of, find_corruption, share_of
from smpkit.torch.checkpoints.reader import PieceReader, metadata_of
from smpkit.torch.core.runtime import state

__all__ = ["INDEX", "SafetensorsReader", "add_checksum", "header_of"]

INDEX: Final = "model.safetensors.index.json"

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
_CRC: Final = "crc32"
_NO_CRC: Final = "0" * 8


def header_of(tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> tuple[bytes, dict[str, int]]:
    """Return the header of a file with these tensors, and the offset of each tensor in the file.

    Raises:
        CheckpointError: the format has no name for a dtype.
    """
    spec: dict[str, Any] = {"__metadata__": {_CRC: _NO_CRC, "format": "pt"}}  # first, where `add_checksum` finds it
    at = 0
    # Wide dtypes first, so that every tensor is aligned.
    for name in sorted(tensors, key=lambda name: (-tensors[name][1].itemsize, name)):
        shape, dtype = tensors[name]
        if dtype not in _NAMES:
            raise CheckpointError(f"safetensors has no dtype {dtype} (`{name}`)")
        size = math.prod(shape) * dtype.itemsize
        spec[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(spec, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    offsets = {name: start + each["data_offsets"][0] for name, each in spec.items() if name != "__metadata__"}
    return len(text).to_bytes(8, "little") + text, offsets


def add_checksum(path: Path) -> None:
    """Write the checksum of a file whose tensors several ranks have written into its header, reading it once.

    Raises:
        OSError: it cannot be read or written.
    """
    member = _member_of(path)
    if member is None:
        return
    crc = crc_of(member)
    with path.open("rb+") as file:
        file.seek(file.read(8 + 100).index(_NO_CRC.encode()))
        file.write(f"{crc:08x}".encode())
        file.flush()
        os.fsync(file.fileno())


def _member_of(path: Path) -> Member | None:
    """Return the tensors of a file as one member, whose checksum covers the header, too; None if it has none."""
    with path.open("rb") as file:
        length = file.read(8)
        text = file.read(min(int.from_bytes(length, "little"), _LONGEST_HEADER))
    known = json.loads(text).get("__metadata__", {}).get(_CRC)
    if known is None:
        return None
    start = zlib.crc32(length + text.replace(known.encode(), _NO_CRC.encode(), 1))
    size = path.stat().st_size - 8 - len(text)
    return Member(path, "tensors", 8 + len(text), size, int(known, 16), start)


class SafetensorsReader(PieceReader):
    """Reads the safetensors files of a folder.

    Args:
        rename: maps the names in the files to those to use; entries that it leaves out are ignored.
    """

    def __init__(self, folder: Path, rename: Callable[[list[str]], Mapping[str, str]]) -> None:
        super().__init__(folder)
        self._rename = rename

    def verify(self, position: int, count: int) -> None:
        """Compare files with their checksums; this rank is one of `count` that divide them.

        Raises:
            CheckpointError: one of this rank's is damaged.
        """
        members = []
        for name in self._files():
            _read_header(self.folder / name)  # names what cannot be a header at all
            try:
                members.append(_member_of(self.folder / name))
            except (OSError, ValueError, AttributeError) as error:
                raise CheckpointError(f"{self.folder / name} is damaged: {error}") from error
        mine = share_of([member for member in members if member is not None], position, count)
        if corruption := find_corruption(mine, state.local_size):
            raise CheckpointError(corruption)

    def _describe(self) -> Metadata:
        headers = {name: _read_header(self.folder / name)[0] for name in self._files()}
        found_in = dict[str, tuple[str, Any]]()
        for name, header in headers.items():
            found_in |= {key: (name, each) for key, each in header.items()}
        spec = {}
        for key, name in self._rename(list(found_in)).items():
            file, each = found_in[key]
            shape = [int(size) for size in each["shape"]]
            zeros = [0] * len(shape)
            dtype = str(_DTYPES[each["dtype"]]).removeprefix("torch.")
            spec[name] = {"dtype": dtype, "shape": shape, "pieces": [[file, [key], zeros, shape, zeros]]}
        return metadata_of(spec, dict.fromkeys(headers))  # each header has been compared with its file

    def _files(self) -> list[str]:
        if (self.folder / INDEX).is_file():
            try:
                names = set(json.loads((self.folder / INDEX).read_text())["weight_map"].values())
            except (OSError, ValueError, KeyError, AttributeError) as error:
                raise CheckpointError(f"{self.folder / INDEX} cannot be read: {error!r}") from error
            if any(not isinstance(name, str) or Path(name).name != name for name in names):
                raise CheckpointError(f"{self.folder / INDEX} names files outside of its folder")
            return sorted(names)
        if (self.folder / "model.safetensors").is_file():
            return ["model.safetensors"]
        raise CheckpointError(
            f"{self.folder} holds no model.safetensors and no {INDEX}",
            hint="load a folder with pytorch_model.bin with transformers, and save it again",
        )

    def _open(self, path: Path) -> dict[str, torch.Tensor]:
        header, start = _read_header(path)
        # Mapped, so that only the slices in use are read.
        raw = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
        return {name: _tensor(raw, start, each) for name, each in header.items()}


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a file, and where its tensors begin; checks that each tensor is inside the file."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _LONGEST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        room = path.stat().st_size - 8 - length
        for name, each in header.items():
            begin, end = each["data_offsets"]
            if not 0 <= begin <= end <= room or end - begin != _bytes_of(each["shape"], each["dtype"]):
                raise ValueError(f"`{name}` is said to be at bytes {begin} to {end} of {room}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no whole safetensors file: {error}") from error
    return header, 8 + length


def _bytes_of(shape: Sequence[int], dtype: str) -> int:
    return math.prod(shape) * _DTYPES[dtype].itemsize


def _tensor(raw: torch.Tensor, start: int, spec: Mapping[str, Any]) -> torch.Tensor:
    begin, end = spec["data_offsets"]
    dtype = _DTYPES[spec["dtype"]]
    part = raw[start + begin : start + end]
    if (start + begin) % dtype.itemsize:
        part = part.clone()  # files of other writers may be unaligned, and `view` needs alignment
    return part.view(dtype).view(spec["shape"])
