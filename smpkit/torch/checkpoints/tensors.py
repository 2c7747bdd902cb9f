"""Files of safetensors: written as a stream, read by the `safetensors` package.

::

    length of the header (8 bytes, little end first) | {"__metadata__": {"format": "pt"},
                                                        "wte.weight": {"dtype": "F32", "shape": [8, 4],
                                                                       "data_offsets": [0, 128]}, ...} | the tensors

The package would take all tensors of a file at once, on the host. Here one after the other is written from where it is,
so those of a device need the memory of one of them on the host.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

import torch
from safetensors import SafetensorError, safe_open

from smpkit.errors import CheckpointError
from smpkit.torch.core.tensor_spec import as_bytes

SUFFIX: Final = ".safetensors"
_NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES: Final = {name: dtype for dtype, name in _NAMES.items()}
_METADATA: Final = "__metadata__"


def is_storable(tensor: torch.Tensor) -> bool:
    """Return whether the format has room for a detached tensor: dense, of no subclass, and of one of its dtypes."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.dtype in _NAMES


def header_of(specs: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> tuple[bytes, dict[str, int]]:
    """Return the header of a file with these tensors, and the offset of each in the file, in their order there."""
    content: dict[str, Any] = {_METADATA: {"format": "pt"}}
    at = 0
    # Wide dtypes first, so that every tensor is aligned.
    for name in sorted(specs, key=lambda name: (-specs[name][1].itemsize, name)):
        shape, dtype = specs[name]
        if dtype not in _NAMES:
            raise CheckpointError(f"safetensors has no dtype {dtype} (`{name}`)")
        if name == _METADATA:
            raise CheckpointError(f"safetensors has no room for a tensor called `{name}`")
        size = math.prod(shape) * dtype.itemsize
        content[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    offsets = {name: start + spec["data_offsets"][0] for name, spec in content.items() if name != _METADATA}
    return len(text).to_bytes(8, "little") + text, offsets


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the elements of a tensor row-major, on the host."""
    plain = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    data: memoryview = as_bytes(plain).numpy().data
    return data


def write_tensors(file: IO[bytes], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a file, one tensor after the other."""
    header, offsets = header_of({name: (tuple(value.shape), value.dtype) for name, value in tensors.items()})
    file.write(header)
    for name in offsets:
        file.write(bytes_of(tensors[name]))


@contextlib.contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a file with the package's `safe_open`: only what is asked for is read."""
    try:
        with torch.device("cpu"), safe_open(path, "pt") as file:  # or slices come on the script's default device
            yield file
    except SafetensorError as error:
        raise CheckpointError(f"{path} is no whole safetensors file: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def specs_in(opened: Any) -> dict[str, tuple[list[int], torch.dtype]]:
    """Return shape and dtype of the tensors of an open file, by name."""
    slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
    return {name: (part.get_shape(), _DTYPES[part.get_dtype()]) for name, part in slices.items()}
