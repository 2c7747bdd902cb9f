"""What `smpkit export` writes is what AWS's script merges to the whole model, and what the hub's programs read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import smpkit.torch as smp
from smpkit.errors import CheckpointError, UsageError
from smpkit.torch.checkpoints import folder as files
from smpkit.torch.checkpoints.export import LAYOUTS, _write_hub, export
from tests.ranks import run_ranks
from tests.torch.steps import train_step, wrap

JOBS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "pipeline": (2, {"pipeline_parallel_degree": 2}),
    "tensor": (2, {"tensor_parallel_degree": 2, "ddp": True}),
    "sharded": (2, {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0, "ddp": True}),
    "fp16": (2, {"ddp": True, "fp16": True, "shard_optimizer_state": True}),
}
WHOLE = ("running_mean", "running_var", "nothing")


class Model(nn.Module):
    def __init__(self, scale_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        with smp.tensor_parallelism():
            self.inner = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.full(scale_shape, 2.0))
        self.out = nn.Linear(6, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("nothing", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.inner(self.embed(x))) * self.scale
        return self.head(self.out(hidden))


def job(path: str, config: dict[str, Any], sgd: bool = False) -> None:
    """Train a step, save what is exported, and save the whole model, too."""
    smp.init(config)
    torch.manual_seed(0)
    sharded = "sharded_data_parallel_degree" in config  # torch's FSDP takes no scalars
    model: Any = smp.DistributedModel(Model((1,) if sharded else ()))
    kind = torch.optim.SGD if sgd else torch.optim.AdamW
    scaling: dict[str, Any] = {"static_loss_scale": 8.0} if config.get("fp16") else {}
    optimizer = smp.DistributedOptimizer(kind(model.parameters(), lr=0.01), **scaling)
    train_step(model, torch.arange(4) % 5)
    optimizer.step()
    smp.save_checkpoint(path, "step", user_content={"step": 1})
    smp.save_checkpoint(f"{path}/whole", "model", partial=False, translate_if_full=False)
    smp.shutdown()


def saved(path: Path, name: str, **options: Any) -> tuple[Path, dict[str, torch.Tensor]]:
    """Return the checkpoint of a job, and the whole state dict of its model."""
    size, config = JOBS[name]
    run_ranks(job, size, str(path / "job"), config, **options)
    return path / "job" / "step_partial", torch.load(path / "job" / "whole" / "model")


def read_smp_v1(target: Path) -> dict[str, torch.Tensor]:
    """Read the three files as AWS's `sharded_data_parallel_checkpoint.py` does."""
    folder = target / (target / "newest").read_text()
    content = torch.load(folder / "user_content.pt")
    states = torch.load(folder / "optimizer_0.pt")
    assert (states["zero_stage"], states["partition_count"]) == (3, 1)
    module = torch.load(folder / "model_0.pt")["module"]
    found = {name: module[name] for name in content["buffer_names"]}
    flat, start = torch.cat(states["fp32_flat_groups"]), 0
    for name, shape in content["param_shapes"][0].items():
        found[name] = flat[start : start + shape.numel()].view(shape)
        start += shape.numel()
    assert start == flat.numel()
    return found


# --- what is merged is the model --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", JOBS)
def test_what_is_merged_is_the_whole_state_dict(name: str, tmp_path: Path) -> None:
    checkpoint, expected = saved(tmp_path, name)
    assert export(checkpoint, tmp_path / "v1") == checkpoint
    found = read_smp_v1(tmp_path / "v1")
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key].to(value.dtype), value), key
    trained = [key for key, value in expected.items() if value.is_floating_point() and key.split(".")[-1] not in WHOLE]
    assert {found[key].dtype for key in trained} == {torch.float32}
    if name == "fp16":  # masters are finer than the model's own weights
        assert not torch.equal(found["head.weight"], expected["head.weight"].float())
    export(checkpoint, tmp_path / "hub", "hub")
    in_hub = load_file(tmp_path / "hub" / "model.safetensors")
    assert expected.keys() - in_hub.keys() == {"head.weight"}, "a tied weight is written once"
    assert all(torch.equal(value.to(expected[key].dtype), expected[key]) for key, value in in_hub.items())
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]


def test_without_states_of_the_optimizer_every_number_is_trained(tmp_path: Path) -> None:
    run_ranks(job, 1, str(tmp_path / "job"), {}, True)
    export(tmp_path / "job", tmp_path / "out")
    found, expected = read_smp_v1(tmp_path / "out"), torch.load(tmp_path / "job" / "whole" / "model")
    assert all(torch.equal(found[key].to(value.dtype), value) for key, value in expected.items())


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("saved"), "one")[0]


def test_a_target_or_a_layout_that_cannot_be_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for target in [tmp_path, tmp_path / "file", tmp_path / "link"]:
        with pytest.raises(UsageError, match=f"`{target}` exists already"):
            export(checkpoint, target)
    with pytest.raises(UsageError, match="there is no folder"):
        export(checkpoint, tmp_path / "no" / "out")
    with pytest.raises(UsageError, match="there is no layout `deepspeed`"):
        export(checkpoint, tmp_path / "out", "deepspeed")


@pytest.mark.parametrize("name", ["index.json", "model_0_0_0.safetensors"])
def test_a_damaged_checkpoint_leaves_nothing(name: str, checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / checkpoint.name
    shutil.copytree(checkpoint, copy)
    data = (copy / name).read_bytes()
    middle = len(data) // 2  # of more bytes than are between two tensors
    changed = bytes(byte ^ 1 for byte in data[middle : middle + 256])
    (copy / name).write_bytes(data[:middle] + changed + data[middle + 256 :])
    with pytest.raises(CheckpointError, match=name):
        export(copy, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == [copy.name]


def test_a_parameter_that_float32_cannot_hold_is_refused(tmp_path: Path) -> None:
    wrap(nn.Linear(2, 2).double())
    smp.save_checkpoint(tmp_path, "one")
    smp.shutdown()
    with pytest.raises(UsageError, match="`weight` is float64, and SMP v1's files hold float32"):
        export(tmp_path, tmp_path / "out")


def test_a_failure_leaves_nothing(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for layout in LAYOUTS:
        monkeypatch.setattr(files, "sync_folder", full)
        with pytest.raises(CheckpointError, match="cannot be written: No space left on device"):
            export(checkpoint, tmp_path / layout, layout)
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_save_to_the_same_folder_leaves_the_export_alone(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_and_write(staged: Path, source: Path) -> None:
        files.remove_leftovers(tmp_path, files.new_save_id())  # as the job that runs does before each save
        _write_hub(staged, source)

    monkeypatch.setitem(LAYOUTS, "hub", save_and_write)
    export(checkpoint, tmp_path / "out", "hub")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_what_is_no_checkpoint_is_named(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name, message in [("none", "is no folder"), ("file", "is no folder"), ("empty", "holds no partial checkpoint")]:
        with pytest.raises(CheckpointError, match=message):
            export(tmp_path / name, tmp_path / "out")
