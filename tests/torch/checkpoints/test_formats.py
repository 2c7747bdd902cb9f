"""Files of checkpoints: what is written needs no smpkit to be read, and all of it comes back."""

from __future__ import annotations

import io
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import smpkit.torch as smp
from smpkit.errors import CheckpointError
from smpkit.torch.checkpoints import tensors
from smpkit.torch.checkpoints.folder import fsync_write

pytestmark = pytest.mark.usefixtures("world")


class Odd(nn.Module):
    """A weight with two names, and buffers of kinds that are easily lost."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t())
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("narrow", torch.arange(3).to(torch.bfloat16))
        self.register_buffer("wide", torch.full((2,), 1 + 2j, dtype=torch.complex128))  # safetensors has no such dtype
        self.register_buffer("mirrored", torch.tensor([1 + 2j]).conj())
        self.register_buffer("part", torch.arange(100.0)[10:20])
        self.seen = {"rates": (0.5, float("inf"))}

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def test_all_kinds_of_state_come_back_and_a_tied_weight_is_written_once(tmp_path: Path) -> None:
    smp.init()
    module = Odd()
    smp.DistributedModel(module)
    smp.save_checkpoint(tmp_path, "one")
    folder = tmp_path / "one_partial"
    in_file = load_file(folder / "model_0_0_0.safetensors")
    assert {"first.weight", "turned", "empty", "count", "flags", "narrow", "part"} <= in_file.keys()
    assert "second.weight" not in in_file
    assert (folder / "model_0_0_0.safetensors").stat().st_size < 2000  # `part` without what it is a part of
    expected = {name: value.clone() for name, value in module.state_dict().items() if torch.is_tensor(value)}
    for value in module.state_dict().values():
        if torch.is_tensor(value):
            value.zero_()
    module.seen = {}
    smp.resume_from_checkpoint(tmp_path)
    for name, value in expected.items():
        assert torch.equal(module.state_dict()[name], value), name
    assert module.seen == {"rates": (0.5, float("inf"))}


def test_the_librarys_own_reader_reads_what_is_written(tmp_path: Path) -> None:
    values = {"b": torch.rand(3, 4), "a": torch.arange(5), "c": torch.empty(0), "d": torch.rand(3).half()}
    path = tmp_path / "ours.safetensors"
    size, crc = fsync_write(path, lambda file: tensors.write_tensors(file, values))
    assert (size, crc) == (path.stat().st_size, zlib.crc32(path.read_bytes()))
    found = load_file(path)
    assert found.keys() == values.keys()
    assert all(torch.equal(found[name], value) for name, value in values.items())


def test_a_name_that_the_format_uses_itself_is_refused() -> None:
    with pytest.raises(CheckpointError, match="no room for a tensor called `__metadata__`"):
        tensors.write_tensors(io.BytesIO(), {"__metadata__": torch.rand(4)})
