"""What `smpkit export` writes is what the public scripts for these layouts merge to the whole model."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from smpkit.errors import CheckpointError, UsageError
from smpkit.torch.checkpoints import folder as files
from smpkit.torch.checkpoints.export import LAYOUTS, export, main
from tests.ranks import run_ranks

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
        result: torch.Tensor = self.head(self.out(hidden))
        return result


@smp.step
def train_step(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).float().pow(2).mean()
    model.backward(loss)
    return loss


def job(path: str, config: dict[str, Any], sgd: bool = False) -> None:
    """Train a step, save what is exported, and save the whole model, too."""
    smp.init(config)
    torch.manual_seed(0)
    sharded = "sharded_data_parallel_degree" in config  # torch's FSDP takes no scalars
    model: Any = smp.DistributedModel(Model((1,) if sharded else ()))
    if config.get("fp16"):
        inner: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer = smp.DistributedOptimizer(inner, static_loss_scale=8.0)
    else:
        inner = (torch.optim.SGD if sgd else torch.optim.AdamW)(model.parameters(), lr=0.01)
        optimizer = smp.DistributedOptimizer(inner)
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


# --- readers that follow the layouts ----------------------------------------------------------------------------------


def merged(parts: list[torch.Tensor], shapes: list[dict[str, torch.Size]]) -> dict[str, torch.Tensor]:
    """Put together what each rank has of each parameter, in the order of their shapes."""
    found, start = {}, 0
    for name, shape in (item for group in shapes for item in group.items()):
        length = -(-shape.numel() // len(parts))
        flat = torch.cat([part[start : start + length] for part in parts])
        assert not flat[shape.numel() :].any()
        found[name] = flat[: shape.numel()].view(shape)
        start += length
    assert all(part.numel() == start for part in parts)
    return found


def read_deepspeed(target: Path) -> dict[str, torch.Tensor]:
    folder = target / (target / "latest").read_text()
    model = torch.load(folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    states = [
        torch.load(folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", mmap=True)["optimizer_state_dict"]
        for rank in range(len(list(folder.glob("*_optim_states.pt"))))
    ]
    assert [(each["zero_stage"], each["partition_count"]) for each in states] == [(3, len(states))] * len(states)
    found = {name: value for name, value in model["module"].items() if name in model["buffer_names"]}
    found |= merged([torch.cat(each["fp32_flat_groups"]) for each in states], model["param_shapes"])
    return found | {other: found[name] for other, name in model["shared_params"].items()}


def read_smp_v1(target: Path) -> dict[str, torch.Tensor]:
    folder = target / (target / "newest").read_text()
    content = torch.load(folder / "user_content.pt")
    states = [torch.load(folder / f"optimizer_{rank}.pt") for rank in range(len(list(folder.glob("optimizer_*"))))]
    assert [each["partition_count"] for each in states] == [len(states)] * len(states)
    module = torch.load(folder / "model_0.pt")["module"]
    found = {name: module[name] for name in content["buffer_names"]}
    return found | merged([torch.cat(each["fp32_flat_groups"]) for each in states], content["param_shapes"])


READERS = {"deepspeed": read_deepspeed, "smp-v1": read_smp_v1}


# --- what is merged is the model --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", JOBS)
def test_the_merged_parts_are_the_whole_state_dict(name: str, tmp_path: Path) -> None:
    checkpoint, expected = saved(tmp_path, name)
    for layout, num_ranks in [("deepspeed", 1), ("deepspeed", 3), ("smp-v1", 2), ("smp-v1", 24)]:
        target = tmp_path / f"{layout}_{num_ranks}"
        assert export(checkpoint, target, layout, num_ranks) == checkpoint
        found = READERS[layout](target)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(found[key].to(value.dtype), value), key
        trained = [
            key for key, value in expected.items() if value.is_floating_point() and key.split(".")[-1] not in WHOLE
        ]
        assert {found[key].dtype for key in trained} == {torch.float32}
    assert not [path for path in tmp_path.rglob("*") if ".tmp" in path.name]


def test_master_weights_are_what_is_exported(tmp_path: Path) -> None:
    checkpoint, expected = saved(tmp_path, "fp16")
    export(checkpoint, tmp_path / "out", "deepspeed", 2)
    found = read_deepspeed(tmp_path / "out")["head.weight"]
    assert expected["head.weight"].dtype == torch.float16
    assert not torch.equal(found, expected["head.weight"].float())


def test_without_states_of_the_optimizer_every_number_is_divided(tmp_path: Path) -> None:
    run_ranks(job, 1, str(tmp_path / "job"), {}, True)
    export(tmp_path / "job", tmp_path / "out", "smp-v1", 2)
    found, expected = read_smp_v1(tmp_path / "out"), torch.load(tmp_path / "job" / "whole" / "model")
    assert all(torch.equal(found[key].to(value.dtype), value) for key, value in expected.items())


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs `pip install deepspeed`")
@pytest.mark.parametrize("name", JOBS)
def test_deepspeeds_own_script_merges_it(name: str, tmp_path: Path) -> None:
    from deepspeed.utils.zero_to_fp32 import (  # type: ignore[import-not-found, unused-ignore]
        get_fp32_state_dict_from_zero_checkpoint,
    )

    checkpoint, expected = saved(tmp_path, name)
    export(checkpoint, tmp_path / "out", "deepspeed", 3)
    found = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "out"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key].to(value.dtype), value) for key, value in expected.items())


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("saved"), "one")[0]


@pytest.mark.parametrize(
    ("layout", "num_ranks", "message"),
    [
        ("zero", 2, "there is no layout `zero`"),
        ("deepspeed", 0, "cannot be divided over 0 ranks"),
        ("deepspeed", -1, "cannot be divided over -1 ranks"),
        ("smp-v1", 25, "cannot be divided over 25 ranks"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    layout: str, num_ranks: int, message: str, checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        export(checkpoint, tmp_path / "out", layout, num_ranks)
    assert not list(tmp_path.iterdir())


def test_a_target_that_exists_or_has_no_folder_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for target in [tmp_path, tmp_path / "file", tmp_path / "link"]:
        with pytest.raises(UsageError, match=f"`{target}` exists already"):
            export(checkpoint, target, "deepspeed", 1)
    with pytest.raises(UsageError, match="there is no folder"):
        export(checkpoint, tmp_path / "no" / "out", "deepspeed", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def damaged(checkpoint: Path, folder: Path, name: str, change: Any) -> Path:
    copy = folder / checkpoint.name
    copy.mkdir()
    for each in checkpoint.iterdir():
        data = each.read_bytes()
        (copy / each.name).write_bytes(change(data) if each.name == name else data)
    return copy


def flip(data: bytes) -> bytes:
    """Change a run of bytes that is longer than the padding between the tensors of a file."""
    middle = len(data) // 2
    return data[:middle] + bytes(byte ^ 1 for byte in data[middle : middle + 256]) + data[middle + 256 :]


@pytest.mark.parametrize("name", ["index.json", "pieces.json", "model_0_0.safetensors"])
def test_a_damaged_checkpoint_is_refused_before_anything_is_written(
    name: str, checkpoint: Path, tmp_path: Path
) -> None:
    copy = damaged(checkpoint, tmp_path, name, flip)
    with pytest.raises(
        CheckpointError, match=f"{name}.* (is damaged|has the CRC-32|is no whole)|(whole|header).*{name}"
    ):
        export(copy, tmp_path / "out", "deepspeed", 2)
    assert [path.name for path in tmp_path.iterdir()] == [copy.name]


def test_a_tag_that_leaves_the_folder_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    index = json.loads((checkpoint / "index.json").read_text())
    del index["crc32"]
    forged = json.dumps(index | {"tag": "../../outside"}).encode()
    copy = damaged(checkpoint, tmp_path, "index.json", lambda _: forged)
    with pytest.raises(UsageError, match="cannot be the tag of a checkpoint"):
        export(copy, tmp_path / "out", "deepspeed", 1)
    assert [path.name for path in tmp_path.iterdir()] == [copy.name]


def test_a_parameter_that_float32_cannot_hold_is_refused(tmp_path: Path) -> None:
    smp.init()
    smp.DistributedModel(nn.Linear(2, 2).double())
    smp.save_checkpoint(tmp_path, "one")
    smp.shutdown()
    with pytest.raises(UsageError, match="`weight` is float64, and both layouts hold float32"):
        export(tmp_path, tmp_path / "out", "deepspeed", 1)


def test_a_failure_leaves_nothing(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for layout in LAYOUTS:
        monkeypatch.setattr(files, "sync_folder", full if layout == "deepspeed" else files.sync_folder)
        monkeypatch.setattr("smpkit.torch.checkpoints.export.add_checksums", full)
        with pytest.raises(CheckpointError, match="cannot be written: No space left on device"):
            export(checkpoint, tmp_path / "out", layout, 2)
        assert not list(tmp_path.iterdir())


def test_what_is_no_checkpoint_is_named(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name, message in [("none", "is no folder"), ("file", "is no folder"), ("empty", "holds no partial checkpoint")]:
        with pytest.raises(CheckpointError, match=message):
            export(tmp_path / name, tmp_path / "out", "deepspeed", 1)


def test_the_process_prints_one_object(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(checkpoint.parent), str(tmp_path / "out"), "smp-v1", "1"]) == 0
    assert json.loads(capsys.readouterr().out) == {"checkpoint": str(checkpoint)}
    assert main([str(checkpoint), str(tmp_path / "out"), "smp-v1", "1"]) == 2
    assert json.loads(capsys.readouterr().out)["error"] == f"`{tmp_path / 'out'}` exists already"
