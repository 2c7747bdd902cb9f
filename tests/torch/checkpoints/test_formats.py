"""Files of checkpoints: what earlier versions wrote is read, what is written now needs no smpkit to be read."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit.errors import CheckpointError
from smpkit.torch.checkpoints import safetensors
from smpkit.torch.checkpoints.integrity import find_corruption
from smpkit.torch.distributed.init import shutdown
from tests.ranks import run_ranks
from tests.torch.checkpoints.format_2 import write_format_2


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    yield
    shutdown()


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def steps(model: Any, optimizer: Any, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()


def resume_and_train(path: Path) -> tuple[Any, dict[str, Tensor], Tensor]:
    smp.init({"ddp": True})
    model = smp.DistributedModel(plain())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.5))
    content = smp.resume_from_checkpoint(path)
    steps(model, optimizer, 2)
    smp.save_checkpoint(path, "next", user_content=content)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return content, weights, optimizer.state_dict()["state"][0]["exp_avg"].clone()


# --- format 2 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 3], ids=["one file", "divided over three ranks"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_of_format_2_goes_on_as_plain_torch_would(parts: int, ranks: int, tmp_path: Path) -> None:
    model = plain()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    steps(model, optimizer, 3)
    weights = {name: value.detach() for name, value in model.state_dict().items()}
    write_format_2(tmp_path, "one", weights, optimizer.state_dict(), user_content={"step": 3}, parts=parts)
    steps(model, optimizer, 2)
    for content, found, moment in run_ranks(resume_and_train, ranks, tmp_path):
        assert content == {"step": 3}
        assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
        assert torch.equal(moment, optimizer.state_dict()["state"][0]["exp_avg"])
    assert json.loads((tmp_path / "next_partial" / "index.json").read_text())["format"] == 3


def test_masters_of_format_2_are_read(tmp_path: Path) -> None:
    model = plain()
    optimizer = torch.optim.Adam(model.parameters())
    steps(model, optimizer, 1)
    masters = {name: value.detach().clone() for name, value in model.named_parameters()}
    weights = {name: value.half() for name, value in masters.items()}
    write_format_2(tmp_path, "one", weights, optimizer.state_dict(), masters=masters, parts=2)
    smp.init({"fp16": True})
    ours = smp.DistributedModel(plain())
    wrapped = smp.DistributedOptimizer(torch.optim.Adam(ours.parameters()))
    smp.resume_from_checkpoint(tmp_path)
    found = wrapped.state_dict()
    for index, (name, master) in enumerate(masters.items()):
        assert torch.equal(found["state"][index]["master"], master)
        assert torch.equal(ours.state_dict()[name], weights[name])
    assert found["loss_scaler"]["loss_scale"] == 1


@pytest.mark.parametrize("name", ["model_0_0.pt", "optimizer_0_0.pt", "pieces.json", "index.json"])
def test_damage_in_format_2_is_named(name: str, tmp_path: Path) -> None:
    model = plain()
    optimizer = torch.optim.Adam(model.parameters())
    steps(model, optimizer, 1)
    folder = write_format_2(tmp_path, "one", dict(model.state_dict()), optimizer.state_dict())
    data = bytearray((folder / name).read_bytes())
    at = data.index(b"/data/1") if name.endswith(".pt") else len(data) // 2
    data[at + 64 : at + 200] = bytes(byte ^ 1 for byte in data[at + 64 : at + 200])
    (folder / name).write_bytes(data)
    smp.init()
    ours = smp.DistributedModel(plain())
    smp.DistributedOptimizer(torch.optim.Adam(ours.parameters()))
    with pytest.raises(CheckpointError, match=name):
        smp.resume_from_checkpoint(tmp_path)


# --- format 3 ---------------------------------------------------------------------------------------------------------


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
    in_file = load_file(folder / "model_0_0.safetensors")
    assert {"first.weight", "turned", "empty", "count", "flags", "narrow", "part"} <= in_file.keys()
    assert "second.weight" not in in_file
    assert (folder / "model_0_0.safetensors").stat().st_size < 2000  # `part` without what it is a part of
    expected = {name: value.clone() for name, value in module.state_dict().items() if torch.is_tensor(value)}
    for value in module.state_dict().values():
        if torch.is_tensor(value):
            value.zero_()
    module.seen = {}
    smp.resume_from_checkpoint(tmp_path)
    for name, value in expected.items():
        assert torch.equal(module.state_dict()[name], value), name
    assert module.seen == {"rates": (0.5, float("inf"))}


def test_the_librarys_own_reader_reads_what_is_written_and_the_reverse(tmp_path: Path) -> None:
    tensors = {"b": torch.rand(3, 4), "a": torch.arange(5), "c": torch.empty(0), "d": torch.rand(3).half()}
    size, crc = safetensors.write_tensors(tmp_path / "ours.safetensors", tensors)
    assert (tmp_path / "ours.safetensors").stat().st_size == size
    with safe_open(tmp_path / "ours.safetensors", "pt") as file:
        assert file.metadata()["crc32"][:8] == f"{crc:08x}"
    for path in (tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"):
        if path.name.startswith("theirs"):
            save_file(tensors, path)
        for found in (load_file(path), safetensors.map_tensors(path)):
            assert found.keys() == tensors.keys()
            assert all(torch.equal(found[name], value) for name, value in tensors.items())
        assert find_corruption(safetensors.members_of(path)) is None


def test_a_file_with_one_checksum_of_everything_is_still_compared(tmp_path: Path) -> None:
    """Earlier versions of `smp.save_pretrained` wrote such."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.rand(40), "b": torch.rand(3)}, path, {"crc32": "0" * 8})
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"' + b"0" * 8, f'"{zlib.crc32(data):08x}'.encode(), 1))
    assert find_corruption(safetensors.members_of(path)) is None
    damaged = bytearray(path.read_bytes())
    damaged[-20] ^= 1
    path.write_bytes(damaged)
    assert "has the CRC-32" in (find_corruption(safetensors.members_of(path)) or "")


def test_without_torchs_checksums_tensors_have_none(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        safetensors.write_tensors(tmp_path / "x.safetensors", {"a": torch.rand(4)})
    finally:
        torch.serialization.set_crc32_options(True)
    assert [member.crc for member in safetensors.members_of(tmp_path / "x.safetensors")] == [0]


def test_a_name_that_the_format_uses_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no room for a tensor called `__metadata__`"):
        safetensors.write_tensors(tmp_path / "x.safetensors", {"__metadata__": torch.rand(4)})


# --- damage -----------------------------------------------------------------------------------------------------------

ANY = ["truncated", "renamed", "flipped in a tensor", "another save's"]
CASES = [("optimizer_0_0_0.pt", kind) for kind in ANY]
for name in ("model_0_0_0.safetensors", "optimizer_0_0_0.safetensors"):
    CASES += [(name, kind) for kind in (*ANY, "swapped", "flipped in the header")]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_damage_is_named_with_the_file_and_what_differs(name: str, kind: str, divided: Path, tmp_path: Path) -> None:
    shutil.copytree(divided, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "two_partial" / name
    expected = damage(path, kind)
    smp.init()
    model = smp.DistributedModel(plain())
    smp.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    with pytest.raises(CheckpointError, match=f"{name}.*{expected}|{expected}.*{name}"):
        smp.resume_from_checkpoint(tmp_path, "two")
    with pytest.warns(UserWarning, match=f"`one_partial` .* is used .*{name}"):
        assert smp.resume_from_checkpoint(tmp_path)["step"] == 1


def damage(path: Path, kind: str) -> str:
    """Damage a file; return what must be said of it."""
    data = bytearray(path.read_bytes())
    if kind == "truncated":
        path.write_bytes(data[: len(data) // 2])
        return f"has {len(data) // 2} bytes instead of {len(data)}"
    if kind == "renamed":
        path.rename(path.with_name("elsewhere"))
        return "is missing"
    if kind == "swapped":  # both have the same names, shapes and size
        stem, _, number = path.stem.rpartition("_")
        other = path.with_name(f"{stem}_{1 - int(number)}{path.suffix}")
        path.write_bytes(other.read_bytes())
        other.write_bytes(data)
        assert other.stat().st_size == path.stat().st_size
        return "has the CRC-32"
    if kind == "another save's":
        path.write_bytes((path.parent.parent / "one_partial" / path.name).read_bytes())
        assert path.stat().st_size == len(data)
        return "has the CRC-32"
    at = 12 if kind == "flipped in the header" else len(data) - 2
    if path.suffix == ".pt":
        at = data.index(b"param_groups")
    data[at] ^= 1
    path.write_bytes(data)
    return "has the CRC-32|is no whole safetensors file"


def save_divided(path: Path) -> None:
    smp.init({"ddp": True, "sharded_data_parallel_degree": 2})
    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1))

    @smp.step
    def train(model: Any, x: Tensor) -> None:
        model.backward(model(x).sum())

    for step, tag in enumerate(("one", "two"), 1):
        optimizer.param_groups[0]["lr"] = step / 10
        optimizer.zero_grad()
        train(model, torch.ones(2, 3))
        optimizer.step()
        smp.save_checkpoint(path, tag, user_content={"step": step})


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints, `one` and `two`, whose tensors are divided over two ranks."""
    path = tmp_path_factory.mktemp("divided")
    run_ranks(save_divided, 2, path)
    return path
