"""What scripts put into checkpoints comes back, and what may not be loaded is refused by name and harms nothing."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import functools
import os
import pathlib
import subprocess
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from smpkit.errors import CheckpointError
from smpkit.torch.checkpoints.objects import find_allowed, read_file, write_file


@dataclasses.dataclass
class Settings:
    rate: float = 0.1
    layers: list[int] = dataclasses.field(default_factory=lambda: [1, 2])
    weight: torch.Tensor = dataclasses.field(default_factory=lambda: torch.ones(2))


class Place(NamedTuple):
    row: int
    column: int


class Phase(enum.Enum):
    WARM_UP = "warm-up"


class OlderPhase(enum.Enum):
    """As every enum of a Python before 3.11.4, such as Debian 12's."""

    WARM_UP = "warm-up"

    def __reduce_ex__(self, protocol: object) -> Any:
        return getattr, (type(self), self.name)


class Registry(dict):  # type: ignore[type-arg]
    """A dict of the script's with an attribute."""


class LossScaler:
    """As those of the scripts of 2021."""

    def __init__(self) -> None:
        self.scale = 2.0**16
        self.history = [1.0, 2.0]


class Runs:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("it ran",)


def data_loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(6.0)), 2, shuffle=True, drop_last=True)


DATA = TensorDataset(torch.arange(4.0))

KEPT: dict[str, Callable[[], Any]] = {
    "namespace": lambda: argparse.Namespace(lr=0.1, nested=argparse.Namespace(a=[1])),
    "namespace of objects": lambda: argparse.Namespace(settings=Settings(), phase=Phase.WARM_UP),
    "dataclass": Settings,
    "named tuple": lambda: Place(1, 2),
    "enum": lambda: Phase.WARM_UP,
    "enum of an older Python": lambda: OlderPhase.WARM_UP,
    "class of the script": LossScaler,
    "counter": lambda: collections.Counter("aab"),
    "simple namespace": lambda: types.SimpleNamespace(a=1),
    "date and time": lambda: [dt.datetime(2021, 5, 1, tzinfo=dt.timezone.utc), dt.timedelta(1), dt.date(2020, 1, 1)],
    "numbers": lambda: [decimal.Decimal("1.5"), fractions.Fraction(1, 3), 1j, range(3), slice(1, 2)],
    "sets": lambda: [{1, 2}, frozenset([3])],
    "bytes": lambda: [b"abc", bytearray(b"abc")],
    "path": lambda: pathlib.Path("a/b"),
    "numpy": lambda: [np.arange(3), np.float32(1.5), np.dtype("int64")],
    "torch": lambda: [torch.Size([2, 3]), torch.bfloat16, torch.device("cpu"), torch.nn.Parameter(torch.ones(2))],
    "grad scaler": lambda: torch.amp.GradScaler("cpu", init_scale=4.0),
    "data loader": data_loader,
    "samplers": lambda: [
        RandomSampler(DATA),
        BatchSampler(SubsetRandomSampler([1, 2]), 2, True),
        DistributedSampler(DATA, 2, 1, seed=3),
        WeightedRandomSampler([0.5, 0.5], 2),
        Subset(DATA, [1]),
    ],
}


def content(value: Any) -> Any:
    """Return what a value holds, for comparison."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return type(value), value.tolist()
    if isinstance(value, dict):
        return (
            type(value),
            [(key, content(each)) for key, each in value.items()],
            content(getattr(value, "__dict__", None)),
        )
    if isinstance(value, list | tuple | collections.deque):
        return type(value), [content(each) for each in value], getattr(value, "maxlen", None)
    if dataclasses.is_dataclass(value):
        return type(value), [content(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, enum.Enum | functools.partial | types.FunctionType) or not hasattr(value, "__dict__"):
        return value
    return type(value), content(vars(value))


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the folder of these tests the script's own."""
    monkeypatch.chdir(Path(__file__).parent)


@pytest.mark.parametrize("name", KEPT)
def test_what_scripts_save_comes_back(name: str, tmp_path: Path) -> None:
    saved = {"a": torch.arange(3), "object": KEPT[name](), "last": 1}
    write_file(tmp_path / "f", saved)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = read_file(tmp_path / "f", "cpu")
        mapped = read_file(tmp_path / "f", "cpu", mmap=True)
    assert content(found) == content(mapped) == content(saved)
    trusted = torch.load(tmp_path / "f", weights_only=False)  # without smpkit's reader
    assert content(trusted) == content(saved)


def test_hugging_face_configurations_come_back(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    saved = [transformers.GPT2Config(n_layer=3), transformers.BertConfig(), transformers.GenerationConfig(top_k=3)]
    write_file(tmp_path / "f", saved)
    found = read_file(tmp_path / "f")
    assert [type(each) for each in found] == [type(each) for each in saved]
    assert [each.to_dict() for each in found] == [each.to_dict() for each in saved]


@pytest.mark.parametrize(
    "value",
    [
        Registry(a=1),
        collections.defaultdict(list, {"a": [1]}),
        collections.deque([1, 2]),
        torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.5), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_containers_that_no_reader_fills_are_refused_when_they_are_saved(value: Any, tmp_path: Path) -> None:
    if isinstance(value, torch.optim.lr_scheduler.StepLR):
        value.optimizer.state[torch.ones(1)] = {}  # a defaultdict
    said = r"holds a .*(Registry|defaultdict|deque) with items(?s:.*)hint: .*save its state_dict\(\)"
    with pytest.raises(CheckpointError, match=said):
        write_file(tmp_path / "f", {"inside": [value]})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (Runs(), "`posix.mkdir`, and it is no class"),
        (subprocess.Popen, "`subprocess.Popen`, and it is neither a reviewed class nor one of the script's own"),
        (print, "`builtins.print`, and it is no class"),
        (Settings(), "Settings`, and it is neither a reviewed class nor one of the script's own source folder"),
    ],
    ids=["code", "class of Python", "function", "not of the script"],
)
def test_what_is_refused_is_named_with_the_way_out(
    value: Any, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_file(tmp_path / "f", {"model": torch.ones(3), "object": value})
    monkeypatch.chdir(tmp_path)  # which is not where the class of the tests comes from
    with pytest.raises(CheckpointError) as caught:
        read_file(tmp_path / "f")
    assert not (tmp_path / "it ran").exists()
    assert reason in str(caught.value)
    assert "damaged" not in str(caught.value)
    assert "weights_only=False" in str(caught.value.hint)


def test_who_trusts_a_file_reads_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(tmp_path / "f", {"settings": Settings(rate=3.0)})
    assert read_file(tmp_path / "f")["settings"].rate == 3.0
    monkeypatch.chdir(tmp_path)  # which is not where the class comes from
    assert read_file(tmp_path / "f", weights_only=False)["settings"].rate == 3.0
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    assert read_file(tmp_path / "f")["settings"].rate == 3.0


def test_only_damage_is_called_damage(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"\x80\x02cos\nsystem\nq\x00.")
    with pytest.raises(CheckpointError, match="f is damaged"):
        read_file(tmp_path / "f")


@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "builtins.eval",
        "subprocess.Popen",
        "functools.partial",
        "torch.load",
        "torch.optim.optimizer.os",
        "torch.optim.lr_scheduler.LRScheduler.step",
        "transformers.models.gpt2.configuration_gpt2.logging",
        f"{__name__}.Path",
        f"{__name__}.subprocess",
        f"{__name__}.data_loader",
        "no.such.module",
    ],
)
def test_names_that_are_no_classes_of_the_job_are_refused(name: str) -> None:
    assert find_allowed(name)[0] is None


def test_nothing_is_imported_because_a_file_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "setup_everything.py").write_text("raise SystemExit('imported')\nclass A: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert find_allowed("setup_everything.A")[0] is None
    assert "setup_everything" not in sys.modules
