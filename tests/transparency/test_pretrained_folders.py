"""Hugging Face folders: written by ranks that hold parts, loadable by transformers, read back by other ranks."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from smpkit.errors import CheckpointError, UsageError
from tests.models import MODELS, Case, gpt2
from tests.ranks import run_ranks
from tests.torch.steps import in_a_row, on_ranks, train_step, wrap
from tests.train import Way, batch, training


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    yield
    smp.shutdown()


Values = dict[str, torch.Tensor]


def case_of(model: str, *, delayed: bool = False) -> Case:
    return replace(MODELS[model], build=partial(made, model, delayed), dtype=torch.float32)


def made(model: str, delayed: bool) -> nn.Module:
    with smp.delay_param_initialization(delayed):
        return MODELS[model].build()


def divided(pipeline: int, tensor: int) -> Way:
    return Way(pipeline, tensor=tensor, replicas=tensor, microbatches=2, prepare=smp.set_tensor_parallelism)


def save(model: str, way: Way, folder: Path) -> None:
    """Save what a step has made, in a folder and in a checkpoint."""
    case = case_of(model)
    with training(case, way) as trained:
        trained.step(*batch(case, 0, 4))
        smp.save_pretrained(folder / "out", max_shard_size=1500)
        smp.save_checkpoint(folder, "whole", partial=False)


def load(model: str, way: Way, folder: Path) -> Values:
    case = case_of(model, delayed=True)
    with training(case, way) as trained:
        smp.load_pretrained(folder / "out")
        if way.pipeline > 1:  # it knows in its first step what it holds
            smp.step(case.step)(trained.model, *batch(case, 0, 4))
        return trained.model.original_state_dict()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("model", "saved", "now"),
    [("Llama", divided(2, 2), divided(1, 2)), ("GPT-2", divided(1, 2), divided(2, 1))],
    ids=str,
)
def test_a_folder_loads_in_transformers_and_on_other_ranks(model: str, saved: Way, now: Way, tmp_path: Path) -> None:
    run_ranks(save, saved.ranks, model, saved, tmp_path)
    plain = loaded_by_transformers(tmp_path / "out")
    whole = torch.load(tmp_path / "whole", weights_only=True)
    assert whole.keys() == plain.keys()
    for values in (whole, *run_ranks(load, now.ranks, model, now, tmp_path)):
        for name, value in plain.items():
            assert torch.equal(values[name], value), name
    weights = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(weights.values())) > 2
    assert len({name for name in weights if "lm_head" in name}) == (0 if model == "GPT-2" else 1)


def save_with_transformers(way: Way, folder: Path) -> None:
    case = case_of("Llama")
    with training(case, way) as trained:
        trained.step(*batch(case, 0, 4))
        llama: Any = trained.model.get_module()
        with pytest.raises(UsageError, match="would write this rank's part of the weights only"):
            llama.save_pretrained(folder / "part")
        if way == SHARDED:
            vocabulary = llama.config.vocab_size
            with pytest.raises(UsageError, match="resize_token_embeddings was called after"):
                llama.resize_token_embeddings(vocabulary + 1)
            assert llama.resize_token_embeddings(vocabulary) is llama.get_input_embeddings()
        whole = trained.model.original_state_dict()
        if smp.rank() == 0:
            llama.save_pretrained(folder / "whole", state_dict=whole)


SHARDED = Way(replicas=2, microbatches=2, config={"sharded_data_parallel_degree": 2})


@pytest.mark.parametrize("way", [Way(2, microbatches=2), divided(1, 2), SHARDED], ids=str)
def test_transformers_own_way_of_saving_does_not_write_a_part(way: Way, tmp_path: Path) -> None:
    """It wrote NaN for the weights of other pipeline ranks, and pieces of divided ones, which load nowhere."""
    run_ranks(save_with_transformers, 2, way, tmp_path)
    assert all(value.isfinite().all() for value in loaded_by_transformers(tmp_path / "whole").values())
    assert not (tmp_path / "part").exists()


def loaded_by_transformers(folder: Path) -> Values:
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, report = loaded
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model.state_dict()


# --- one rank ---------------------------------------------------------------------------------------------------------


def plain_model(width: int = 4) -> Any:
    torch.manual_seed(0)
    return wrap(nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2).bfloat16()))


def test_a_model_without_a_configuration_is_a_file_of_the_safetensors_library(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = plain_model()
    smp.save_pretrained(tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
    values = {name: torch.randn_like(value) for name, value in found.items()}
    save_file(values, tmp_path / "model.safetensors")
    smp.load_pretrained(tmp_path)
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())


class ConfigMixin:
    """Stands for the base of diffusers' models, which the tests do without."""

    def save_config(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps({"_class_name": "OfDiffusers"}))


class OfDiffusers(nn.Sequential, ConfigMixin):
    def save_pretrained(self, folder: Path, **_: Any) -> None:
        raise AssertionError(folder)


def test_a_model_of_diffusers_comes_under_the_names_of_its_files(tmp_path: Path) -> None:
    model = wrap(OfDiffusers(nn.Linear(3, 4), nn.Linear(4, 2)))
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    smp.save_pretrained(tmp_path, max_shard_size=60)
    index = json.loads((tmp_path / "diffusion_pytorch_model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {
        f"diffusion_pytorch_model-0000{number}-of-00002.safetensors" for number in (1, 2)
    }
    smp.load_pretrained(tmp_path)
    smp.save_pretrained(tmp_path)
    files = ["config.json", "diffusion_pytorch_model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    for each in model.parameters():
        nn.init.zeros_(each)
    smp.load_pretrained(tmp_path)
    assert all(torch.equal(value, whole[name]) for name, value in model.state_dict().items())


@on_ranks(2)
def test_diffusers_own_way_of_saving_does_not_write_a_part() -> None:
    """It takes no state dict."""
    module = OfDiffusers(nn.Linear(2, 2), nn.Linear(2, 2))
    model = in_a_row(*module, around=module)
    train_step(model, torch.ones(2, 2))
    with pytest.raises(UsageError, match="would write this rank's part"):
        module.save_pretrained(Path("out"), state_dict=model.original_state_dict())


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_model_with_adapters_is_not_saved_under_names_that_nothing_loads(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    smp.init()
    smp.DistributedModel(peft.get_peft_model(gpt2(), peft.LoraConfig(r=2, fan_in_fan_out=True)))
    with pytest.raises(UsageError, match="the model has adapters of peft"):
        smp.save_pretrained(tmp_path / "out")


def test_a_folder_of_the_bare_model_fits_one_with_a_head_and_the_other_way_round(tmp_path: Path) -> None:
    model = wrap(gpt2())
    smp.save_pretrained(tmp_path / "head")
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    bare = wrap(gpt2().transformer)  # type: ignore[arg-type]
    smp.load_pretrained(tmp_path / "head")
    assert all(torch.equal(value, whole[f"transformer.{name}"]) for name, value in bare.state_dict().items())
    smp.save_pretrained(tmp_path / "bare")
    model = wrap(gpt2())
    smp.load_pretrained(tmp_path / "bare")
    assert all(torch.equal(value, whole[name]) for name, value in model.state_dict().items())


def test_a_link_to_a_folder_stays_and_its_folder_is_written(tmp_path: Path) -> None:
    """As a job's `SM_MODEL_DIR` is, where the job file names an `output`."""
    (tmp_path / "output").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "output")
    plain_model()
    smp.save_pretrained(tmp_path / "linked")
    assert (tmp_path / "linked").is_symlink()
    assert (tmp_path / "output" / "model.safetensors").is_file()


def test_nothing_is_touched_outside_of_the_folder(tmp_path: Path) -> None:
    """It removed what a save in the background wrote beside it, and could not rename to a folder on another disk."""
    other = tmp_path / ".one_partial.0123456789abcdef.tmp"
    other.mkdir()
    out = tmp_path / "out"
    out.mkdir()
    (out / ".weights.0123456789abcdef.tmp").mkdir()  # of a save that was killed
    plain_model()
    smp.save_pretrained(out)
    assert other.is_dir()
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]


def test_older_weights_are_replaced_and_other_files_stay(tmp_path: Path) -> None:
    plain_model()
    smp.save_pretrained(tmp_path / "out", max_shard_size=20)
    (tmp_path / "out" / "tokenizer.json").write_text("{}")
    smp.save_pretrained(tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model.safetensors", "tokenizer.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("missing", "holds no model.safetensors"),
        ("cut", "is no whole safetensors file"),
        ("other", r"`0.weight` is \[4, 3\] here and \[5, 3\] there"),
        ("surplus", "unexpected `more`"),
    ],
)
def test_what_is_wrong_with_a_folder_is_said(damage: str, message: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = plain_model(5 if damage == "other" else 4)
    values = dict(model.state_dict()) | ({"more": torch.zeros(1)} if damage == "surplus" else {})
    if damage != "missing":
        save_file(values, tmp_path / "model.safetensors")
    if damage == "cut":
        file = tmp_path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
    plain_model()
    with pytest.raises(CheckpointError, match=message):
        smp.load_pretrained(tmp_path)


@pytest.mark.parametrize("size", [0, "5 apples"], ids=repr)
def test_a_size_that_is_none_is_refused(size: Any, tmp_path: Path) -> None:
    plain_model()
    with pytest.raises(UsageError, match="max_shard_size is"):
        smp.save_pretrained(tmp_path / "out", max_shard_size=size)


# --- memory -----------------------------------------------------------------------------------------------------------


def growth(act: Callable[[], object]) -> int:
    """Return by how many bytes the memory of this process grew at most; not counted are files that are mapped."""
    before, ended, most = own_memory(), threading.Event(), [0]

    def watch() -> None:
        while not ended.wait(0.002):
            most[0] = max(most[0], own_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    act()
    ended.set()
    watcher.join()
    return most[0] - before


def own_memory() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells the memory of a process")
@on_ranks(2)
def test_no_rank_holds_the_model_while_saving(tmp_path: Path) -> None:
    model = in_a_row(*(nn.Linear(1024, 1024) for _ in range(16)), microbatches=1)
    smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train_step(model, torch.ones(1, 1024))
    smp.save_pretrained(tmp_path / "warm")  # imports and buffers of the first time
    for save in (
        lambda: smp.save_pretrained(tmp_path / "folder"),
        lambda: smp.save_checkpoint(tmp_path, "full", partial=False),
        lambda: smp.save_checkpoint(tmp_path, "parts"),
    ):
        whole = 16 * 1024 * 1024 * 4  # a tensor is a sixteenth, this rank's part a half
        assert growth(save) < whole / 4


def test_an_index_names_no_file_outside_its_folder(tmp_path: Path) -> None:
    plain_model()
    smp.save_pretrained(tmp_path)
    (tmp_path / "inside").mkdir()
    index = {"weight_map": {"0.weight": "../model.safetensors"}}
    (tmp_path / "inside" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="names files outside of its folder"):
        smp.load_pretrained(tmp_path / "inside")
