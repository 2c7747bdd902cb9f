from __future__ import annotations

import argparse
import contextlib
import errno
import io
import json
import os
import resource
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import smpkit.torch as smp
from smpkit.errors import CheckpointError, UsageError
from smpkit.torch import latest_checkpoint, resume_from_checkpoint, save_checkpoint
from smpkit.torch.checkpoints import folder as checkpoint_files
from smpkit.torch.checkpoints import tensors
from smpkit.torch.checkpoints.folder import fsync_write
from tests.torch.checkpoints.two_layers import make, plain, train
from tests.torch.steps import in_a_row, on_ranks, train_step, wrap

pytestmark = pytest.mark.usefixtures("world")


def files(folder: str | Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())


def weights(model: Any) -> list[float]:
    return [round(value, 6) for parameter in model.parameters() for value in parameter.flatten().tolist()]


# --- what is saved comes back -----------------------------------------------------------------------------------------


@on_ranks(2)
def test_running_statistics_are_those_of_the_first_replica(tmp_path: Path) -> None:
    """Save those of a layer that has seen other samples on each rank, and resume."""
    found = []
    for resumes in (False, True):
        model = wrap(nn.Sequential(*[nn.BatchNorm1d(width) for width in (3, 3, 3)]), ddp=True)
        if resumes:
            resume_from_checkpoint(tmp_path)
        else:
            model(torch.randn(4, 3, generator=torch.Generator().manual_seed(smp.rank()))).sum().backward()
            save_checkpoint(tmp_path, "one")
        found.append([buffer.tolist() for buffer in model.buffers()])
    first, second = smp.allgather(found[0], smp.CommGroup.WORLD)
    assert first != second
    assert found[1] == first


def test_a_full_checkpoint_is_a_plain_state_dict(tmp_path: Path) -> None:
    model, _ = make()
    save_checkpoint(tmp_path, "whole", partial=False, user_content={"step": 7})
    assert files(tmp_path) == ["newest", "user_content_whole", "whole"]
    of_torch = plain()
    of_torch.load_state_dict(torch.load(tmp_path / "whole", weights_only=True))
    assert weights(of_torch) == weights(model)
    train(*make(seed=5))
    assert resume_from_checkpoint(tmp_path, partial=False) == {"step": 7}
    assert weights(smp.state.model) == weights(of_torch)
    save_checkpoint(tmp_path, "whole", partial=False)
    assert resume_from_checkpoint(tmp_path, "whole", partial=False) == {}, "the content is not of this save"


def test_trap_12_a_tag_may_be_a_plain_torch_file_beside_an_empty_user_content(tmp_path: Path) -> None:
    model, _ = make()
    twos = {name: torch.full_like(value, 2.0) for name, value in plain().state_dict().items()}
    torch.save(twos, tmp_path / "pytorch_model.bin")
    (tmp_path / "user_content.pt").touch()  # Hugging Face's marker
    (tmp_path / "user_content_pytorch_model.bin").touch()
    content = resume_from_checkpoint(tmp_path, tag="pytorch_model.bin", partial=False, load_optimizer=False)
    assert content.get("step") is None
    assert set(weights(model)) == {2.0}


def test_trap_14_a_full_dict_may_say_that_it_is_not_partial(tmp_path: Path) -> None:
    model, _ = make()
    torch.save({**model.module.state_dict(), "_smp_is_partial": False}, tmp_path / "x")
    before = weights(model)
    train(*make(seed=5))
    resume_from_checkpoint(tmp_path, "x", partial=False)
    assert weights(smp.state.model) == before


def test_a_translate_function_sees_the_full_state_dict(tmp_path: Path) -> None:
    model, _ = make()
    torch.save({f"old.{name}": torch.zeros_like(value) for name, value in plain().state_dict().items()}, tmp_path / "x")
    strip = lambda sd: {name.removeprefix("old."): value for name, value in sd.items()}  # noqa: E731
    resume_from_checkpoint(tmp_path, "x", partial=False, translate_function=strip)
    assert set(weights(model)) == {0.0}


@pytest.mark.parametrize("tag", ["one", "one_partial"])
def test_a_partial_tag_may_be_given_with_or_without_its_ending(tag: str, tmp_path: Path) -> None:
    make()
    save_checkpoint(tmp_path, "one", user_content=argparse.Namespace(lr=1))
    assert resume_from_checkpoint(tmp_path, tag).lr == 1


def test_states_go_to_the_optimizer_if_one_is_there_and_unless_told_otherwise(tmp_path: Path) -> None:
    train(*make())
    save_checkpoint(tmp_path, "one")
    _, optimizer = make(seed=5)
    resume_from_checkpoint(tmp_path, load_optimizer=False)
    assert not optimizer.state_dict()["state"]
    resume_from_checkpoint(tmp_path)
    assert len(optimizer.state_dict()["state"]) == 4
    wrap(plain())
    resume_from_checkpoint(tmp_path, load_optimizer=False)
    with pytest.warns(UserWarning, match="`one_partial` has an optimizer's states, but none is wrapped yet"):
        resume_from_checkpoint(tmp_path)


def test_a_checkpoint_without_optimizer_state_warns(tmp_path: Path) -> None:
    model = wrap(nn.Linear(1, 1))
    save_checkpoint(tmp_path, "one")
    smp.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    with pytest.warns(UserWarning, match="holds no optimizer state"):
        assert resume_from_checkpoint(tmp_path) == {}


def test_what_is_trained_beside_the_model_is_told(tmp_path: Path) -> None:
    model = wrap(plain())
    temperature = nn.Parameter(torch.ones(1))
    smp.DistributedOptimizer(torch.optim.Adam([*model.parameters(), temperature]))
    with pytest.warns(UserWarning, match=r"shape \[1\] that is not in the model: .* its states, but not its value"):
        save_checkpoint(tmp_path, "one")


@on_ranks(2)
def test_each_rank_gets_its_own_content_back_on_the_same_ranks(tmp_path: Path) -> None:
    wrap(plain(), ddp=True)
    for tag, passed in {"same": 3, "own": 3 + smp.rank(), "first": None if smp.rank() else 3}.items():
        save_checkpoint(tmp_path, tag, user_content=passed)
        assert resume_from_checkpoint(tmp_path, tag) == (3 if passed is None else passed)
    if smp.rank() == 0:
        contents = [name for name in files(tmp_path) if "user_content_" in name]
        assert contents == ["own_partial/user_content_1of2.pt"]
    wrap(plain(), pipeline_parallel_degree=2, microbatches=2)
    told = contextlib.nullcontext() if smp.rank() else pytest.warns(UserWarning, match="had different user content")
    with told:
        assert resume_from_checkpoint(tmp_path, "own") == 3


@on_ranks(2)
def test_replicas_that_the_script_seeds_apart_go_on_drawing_as_they_did(tmp_path: Path) -> None:
    seeds = []
    for is_resumed in (False, True):
        model = wrap(plain(), ddp=True)
        if is_resumed:
            resume_from_checkpoint(tmp_path)
        torch.manual_seed(9 if is_resumed else 100 * smp.rank())
        train_step(model, torch.ones(1, 3))
        if not is_resumed:
            save_checkpoint(tmp_path, "one")
        seeds.append(model.random_state())
    assert seeds == [{"seed": 100 * smp.rank(), "step": 1}, {"seed": 100 * smp.rank(), "step": 2}]


def test_what_is_left_out_without_strict_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make()
    save_checkpoint(tmp_path, "one")
    wrap(nn.Sequential(plain()[0], nn.Identity(), plain()[1]))
    with caplog.at_level("INFO"):
        resume_from_checkpoint(tmp_path, strict=False, load_optimizer=False)
    assert "(strict=False): missing `2.bias`, `2.weight`, unexpected `1.bias`, `1.weight`." in caplog.text


def pair(*, tied: bool) -> nn.Sequential:
    """Return two layers, whose weights may be one."""
    layers = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    if tied:
        layers[1].weight = layers[0].weight
    return layers


@pytest.mark.parametrize("tied", [False, True])
def test_weights_that_are_tied_or_untied_since_are_named(tied: bool, tmp_path: Path) -> None:
    wrap(pair(tied=not tied))
    save_checkpoint(tmp_path, "one")
    save_checkpoint(tmp_path, "whole", partial=False)
    smp.save_pretrained(tmp_path / "hub")
    wrap(pair(tied=tied))
    counts = "one weight here, two there" if tied else "one weight there, two here"
    with pytest.raises(CheckpointError, match=f"another model: `0.weight` and `1.weight` are {counts}"):
        resume_from_checkpoint(tmp_path, "one")
    resume_from_checkpoint(tmp_path, "one", strict=False)
    # Without states, only what has become one can lose something.
    with pytest.raises(CheckpointError, match=counts) if tied else contextlib.nullcontext():
        resume_from_checkpoint(tmp_path, "whole", partial=False)
    with pytest.raises(CheckpointError, match=counts if tied else "missing `1.weight`"):
        smp.load_pretrained(tmp_path / "hub")


class Counting(nn.Linear):
    """Has a state beside its tensors, as Transformer Engine's layers have."""

    calls = 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(values)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


@on_ranks(2)
def test_a_pipeline_saves_what_its_ranks_run_and_keeps_settings_that_change_after_a_resume(tmp_path: Path) -> None:
    """Save after two steps; resume, change the learning rate as scripts do, and take one more."""
    for is_resumed in (False, True):
        layers = Counting(2, 2), Counting(2, 2)
        model = in_a_row(*layers)
        optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1))
        if is_resumed:
            resume_from_checkpoint(tmp_path)
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.0)
        for _ in range(1 if is_resumed else 2):
            optimizer.zero_grad()
            train_step(model, torch.ones(1, 2))
            before = [each.detach().clone() for each in model.local_parameters()]
            optimizer.step()
        if not is_resumed:
            save_checkpoint(tmp_path, "one")
            smp.shutdown()
    assert all(map(torch.equal, before, model.local_parameters())), "the first step took the rate that was saved"
    assert [layer.calls for layer in layers] == ([2, 3] if smp.rank() else [3, 2])


# --- which one --------------------------------------------------------------------------------------------------------


def test_states_of_other_optimizers_are_missed_in_words(tmp_path: Path) -> None:
    model, last = make()
    first, last = [smp.DistributedOptimizer(torch.optim.SGD(half.parameters(), lr=0.1)) for half in model.module]
    train(model, last)
    first.step()
    save_checkpoint(tmp_path, "one", optimizer=first)
    with pytest.warns(UserWarning, match="several optimizers train, and a checkpoint has the states of the one"):
        save_checkpoint(tmp_path, "two")


def test_only_the_newest_are_kept_and_full_ones_are_not_counted(tmp_path: Path) -> None:
    make()
    (tmp_path / "mine_partial").mkdir()
    (tmp_path / "mine_partial" / "notes.txt").write_text("what is no complete checkpoint stays")
    save_checkpoint(tmp_path, "whole", partial=False)
    for step in range(4):
        save_checkpoint(tmp_path, f"step_{step}", num_kept_partial_checkpoints=2)
    kept = {str(path.relative_to(tmp_path)).split("/")[0] for path in tmp_path.rglob("*") if path.is_file()}
    assert kept == {"mine_partial", "newest", "step_2_partial", "step_3_partial", "whole"}


def test_nothing_saved_yet_is_none_to_ask_and_an_error_to_resume(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "missing") is None
    make()
    assert latest_checkpoint(tmp_path) is None
    with pytest.raises(CheckpointError, match="there is no complete checkpoint"):
        resume_from_checkpoint(tmp_path)


@pytest.mark.parametrize("damage", ["missing file", "cut file", "no index", "no folder"])
def test_an_incomplete_newest_falls_back_to_the_newest_complete_one(damage: str, tmp_path: Path) -> None:
    make()
    for step, tag in enumerate(("z", "a", "m"), 1):
        save_checkpoint(tmp_path, tag, user_content={"step": step})
    assert latest_checkpoint(tmp_path) == "m_partial"
    folder = tmp_path / "m_partial"
    if damage == "no folder":
        folder.rename(tmp_path / "elsewhere")
    elif damage == "cut file":
        os.truncate(folder / "optimizer_0_0_0.pt", 10)
    else:
        (folder / ("index.json" if damage == "no index" else "model_0_0_0.safetensors")).unlink()
    with pytest.warns(UserWarning, match=r"`a_partial` in .* is used instead .*; `m_partial`: "):
        assert latest_checkpoint(tmp_path) == "a_partial"
    with pytest.warns(UserWarning, match="a_partial"):
        assert resume_from_checkpoint(tmp_path) == {"step": 2}


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_another_model_or_other_parameter_groups_are_named(tmp_path: Path) -> None:
    train(*make())
    save_checkpoint(tmp_path, "one")
    wrap(nn.Linear(9, 9))
    with pytest.raises(CheckpointError, match="rank 0: the checkpoint belongs to another model: missing `bias`"):
        resume_from_checkpoint(tmp_path)
    make(3, 4, 5)
    with pytest.raises(CheckpointError, match=r"another model: `1.weight` is \[5, 4\] here and \[2, 4\] there"):
        resume_from_checkpoint(tmp_path)
    model = wrap(plain())
    groups = [{"params": [parameter]} for parameter in model.parameters()]
    smp.DistributedOptimizer(torch.optim.Adam(groups))
    with pytest.raises(CheckpointError, match="an optimizer with 1 parameter groups, this one has 4"):
        resume_from_checkpoint(tmp_path)


def matrices_first(model: Any, order: int) -> torch.optim.Optimizer:
    """Return an optimizer that decays matrices only, with its groups in one order or, with -1, the other."""
    parts = [[each for each in model.parameters() if (each.ndim > 1) == is_matrix] for is_matrix in (True, False)]
    groups = [{"params": part, "weight_decay": decay} for part, decay in zip(parts, (0.1, 0.0), strict=True)]
    return torch.optim.AdamW(groups[::order], lr=0.1)


def test_parameters_in_other_groups_are_named_and_new_ones_may_be_in_any(tmp_path: Path) -> None:
    layers = plain()
    layers[0].requires_grad_(False)
    model = wrap(layers)
    trained = [each for each in model.parameters() if each.requires_grad]
    smp.DistributedOptimizer(torch.optim.AdamW([{"params": trained[:1]}, {"params": trained[1:]}]))
    save_checkpoint(tmp_path, "one")
    model = wrap(plain())
    smp.DistributedOptimizer(matrices_first(model, -1))
    with pytest.raises(CheckpointError, match=r"`1.bias` is in parameter group 0 here and in 1 there"):
        resume_from_checkpoint(tmp_path)
    smp.DistributedOptimizer(matrices_first(model, 1))
    resume_from_checkpoint(tmp_path)


class WithMore(torch.optim.SGD):
    """Has more in its state dict than torch's optimizers, as timm's first Lookahead had."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow_state": {}}


def test_an_optimizer_whose_state_would_be_saved_in_part_is_named(tmp_path: Path) -> None:
    model = wrap(plain())
    smp.DistributedOptimizer(WithMore(model.parameters(), lr=0.1))
    with pytest.raises(CheckpointError, match=r"WithMore has not the layout of .* but `slow_state` too"):
        save_checkpoint(tmp_path, "one")


@pytest.mark.parametrize(
    "tag", [" one", "one\n", "on\x1be", "one_partial", "a/b", ".one", "..", "newest", "", 3], ids=repr
)
def test_a_tag_that_would_not_be_found_again_is_refused(tag: Any, tmp_path: Path) -> None:
    make()
    with pytest.raises(UsageError, match="cannot be the tag of a "):
        save_checkpoint(tmp_path, tag)
    assert not files(tmp_path)


def test_a_save_that_another_job_cleans_up_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make()
    publish = checkpoint_files.publish_folder

    def meanwhile(staged: Path, *arguments: Any) -> None:
        (staged / "model_0_0_0.safetensors").unlink()
        publish(staged, *arguments)

    monkeypatch.setattr(checkpoint_files, "publish_folder", meanwhile)
    with pytest.raises(CheckpointError, match=r"model_0_0_0.safetensors is missing: does another job save to"):
        save_checkpoint(tmp_path, "one")
    assert latest_checkpoint(tmp_path) is None


@pytest.mark.parametrize(("act", "what"), [("fsync_write", "not saved"), ("atomic_write", "not marked as newest")])
def test_a_save_whose_files_another_job_removes_says_so(
    act: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make()
    original = getattr(checkpoint_files, act)

    def meanwhile(path: Path, *arguments: Any) -> Any:
        if act == "fsync_write":
            checkpoint_files.remove_leftovers(tmp_path, "another save")
            return original(path, *arguments)
        return original(tmp_path / "removed" / path.name, *arguments)

    monkeypatch.setattr(checkpoint_files, act, meanwhile)
    hint = r"does another job save there, too\? Each needs a folder of its own"
    with pytest.raises(CheckpointError, match=rf"{what}; rank 0: files are gone that it had written.*\nhint: {hint}$"):
        save_checkpoint(tmp_path, "one")


def test_a_folder_that_another_job_has_saved_to_meanwhile_is_refused(tmp_path: Path) -> None:
    """Two runs of one script, whose tags are the same: each replaced what the other had saved, without a word."""
    make()
    save_checkpoint(tmp_path, "before")
    make()  # another job: it goes on with what is there
    save_checkpoint(tmp_path, "one")
    save_checkpoint(tmp_path, "model.pt", partial=False)
    save_checkpoint(tmp_path, "two")
    folder = tmp_path / "two_partial"
    ours = checkpoint_files.read_index(folder)
    theirs = replace(ours, order=ours.order + 1, save_id=checkpoint_files.new_save_id())
    (folder / checkpoint_files.INDEX).write_text(theirs.to_text())
    said = r"another job has saved `two_partial` to .* since(?s:.*)each job needs a folder of its own"
    with pytest.raises(CheckpointError, match=said):
        save_checkpoint(tmp_path, "three")
    assert not list(tmp_path.glob(".*"))


def test_a_save_that_another_host_could_not_publish_is_not_taken_for_another_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make()
    save_checkpoint(tmp_path, "one")
    publish = checkpoint_files.publish_folder

    def publish_and_fail(*places: Any) -> None:
        publish(*places)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files, "publish_folder", publish_and_fail)
        with pytest.raises(CheckpointError, match="two_partial cannot be written"):
            save_checkpoint(tmp_path, "two")
    save_checkpoint(tmp_path, "three")
    assert latest_checkpoint(tmp_path) == "three_partial"


def test_user_content_that_resuming_would_refuse_is_named_when_it_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # so that the class is none of the script's own
    make()
    save_checkpoint(tmp_path, "one", user_content={"step": 1})
    content = {"step": 2, "object": Unreviewed()}
    with pytest.raises(CheckpointError, match=r"`two` was not saved; rank 0: .*user_content.pt needs .*Unreviewed"):
        save_checkpoint(tmp_path, "two", user_content=content)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["newest", "one_partial"]
    assert resume_from_checkpoint(tmp_path) == {"step": 1}
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # of a job that trusts its files
    save_checkpoint(tmp_path, "two", user_content=content)
    monkeypatch.delenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    with pytest.raises(CheckpointError, match="Unreviewed"):
        resume_from_checkpoint(tmp_path)
    assert isinstance(resume_from_checkpoint(tmp_path, weights_only=False)["object"], Unreviewed)


class Unreviewed:
    """Not of the script, where the working directory is another."""


def test_without_a_model_or_with_a_count_that_keeps_nothing_there_is_no_save(tmp_path: Path) -> None:
    smp.init()
    for call in (lambda: save_checkpoint(tmp_path, "one"), lambda: resume_from_checkpoint(tmp_path)):
        with pytest.raises(UsageError, match="there is no model"):
            call()
    make()
    kept: Any
    for kept in (0, -1, True, 1.5):
        with pytest.raises(UsageError, match=f"num_kept_partial_checkpoints is {kept}"):
            save_checkpoint(tmp_path, "one", num_kept_partial_checkpoints=kept)


@pytest.mark.parametrize(
    ("failing", "phase"), [(0, "write"), (1, "write"), (0, "publish"), (0, "whole"), (0, "newest")]
)
@on_ranks(2)
def test_a_rank_that_cannot_write_fails_the_save_on_all_and_harms_nothing(
    failing: int, phase: str, tmp_path: Path
) -> None:
    make(ddp=True)
    save_checkpoint(tmp_path, "good", user_content={"step": 1})

    def fail(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    if smp.rank() == failing and phase == "whole":
        resource.setrlimit(resource.RLIMIT_FSIZE, (50, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    elif smp.rank() == failing:
        name = {"write": "fsync_write", "publish": "publish_folder", "newest": "atomic_write"}[phase]
        setattr(checkpoint_files, name, fail)
    said = "is saved, but not marked as newest" if phase == "newest" else "was not saved"
    why = "File too large" if phase == "whole" else "No space left on device"
    with pytest.raises(CheckpointError, match=rf"^checkpoint `bad` {said}; rank {failing}.*{why}(\n|$)"):
        save_checkpoint(tmp_path, "bad", partial=phase != "whole", user_content={"step": 2})
    smp.barrier()
    left = files(tmp_path)
    assert ("bad_partial/index.json" in left) == (phase == "newest")
    assert phase == "newest" or all(name == "newest" or name.startswith("good_partial/") for name in left)
    assert {"newest", "good_partial/index.json", "good_partial/user_content.pt"} <= set(left)


@on_ranks(2)
def test_ranks_that_save_different_tags_get_an_error(tmp_path: Path) -> None:
    make(ddp=True)
    said = r"^rank 0 saves 'tag_0' \(partial=True\), but rank 1 saves 'tag_1' \(partial=True\)"
    with pytest.raises(UsageError, match=said):
        save_checkpoint(tmp_path, f"tag_{smp.rank()}")
    assert files(tmp_path) == []


@on_ranks(4, hosts=2)
def test_hosts_that_share_no_folder_each_have_what_their_ranks_need(tmp_path: Path) -> None:
    make(ddp=True)
    own = tmp_path / f"host_{smp.rank() // smp.local_size()}"
    for tag, passed in (("one", "of all"), ("two", "abba"[smp.rank()])):
        save_checkpoint(own, tag, user_content=passed, num_kept_partial_checkpoints=1)
    left = files(own)
    parts = [name for name in left if name.startswith(("two_partial/model", "two_partial/optim"))]
    assert left[0] == "newest"
    assert {name.split(".")[0][-1] for name in parts} == set("01" if smp.rank() < 2 else "23")
    assert resume_from_checkpoint(own) == passed


@on_ranks(4, hosts=2)
def test_hosts_that_share_a_folder_write_each_part_once(tmp_path: Path) -> None:
    make(ddp=True)
    with mock.patch.object(checkpoint_files, "fsync_write", wraps=checkpoint_files.fsync_write) as write:
        save_checkpoint(tmp_path, "one")
    written = [name for call in write.call_args_list if not (name := call.args[0].name).startswith(".")]
    assert f"model_0_0_{smp.rank()}.safetensors" in written
    names = sorted(name for names in smp.allgather(written) for name in names)
    assert names == sorted(path.name for path in (tmp_path / "one_partial").iterdir())


# --- what others read -------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_own_loader_reads_a_partial_checkpoint(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import state_dict_loader as dcp

    model, optimizer = make()
    train(model, optimizer)
    save_checkpoint(tmp_path, "one")
    of_torch, moment = plain(), torch.zeros(4, 3)
    found = {"model": of_torch.state_dict(), "optim": {"state": {"0.weight": {"exp_avg": moment}}}}
    dcp.load(found, storage_reader=smp.CheckpointReader(tmp_path / "one_partial"))
    assert weights(of_torch) == weights(model)
    assert torch.equal(moment, optimizer.state[model.module[0].weight]["exp_avg"])


PIECE = ["model_0_0_0.safetensors", "0.weight", [0, 0], [4, 3], [0, 0]]
SENSELESS: dict[str, Any] = {
    "outside": {"dtype": "float32", "shape": [4, 3], "pieces": [["../x.safetensors", *PIECE[1:]]]},
    "dtype": {"dtype": "save", "shape": [4, 3], "pieces": [PIECE]},
    "larger than its pieces": {"dtype": "float32", "shape": [1 << 20, 1 << 20], "pieces": [PIECE]},
    "negative piece": {"dtype": "float32", "shape": [4, 3], "pieces": [[*PIECE[:3], [-4, -3], [0, 0]]]},
    "lacks": {"shape": [4, 3]},
    "null": None,
}


@pytest.mark.parametrize("spec", SENSELESS.values(), ids=SENSELESS)
def test_an_index_that_makes_no_sense_is_refused(spec: Any, tmp_path: Path) -> None:
    make()
    save_checkpoint(tmp_path, "one")
    path = tmp_path / "one_partial" / "index.json"
    index = json.loads(path.read_text())
    index["tensors"]["model.0.weight"] = spec
    del index["crc32"]  # as forged
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"can be used; `one_partial`: .*index\.json is damaged"):
        resume_from_checkpoint(tmp_path)


def test_a_full_save_keeps_tied_weights_one_and_needs_no_copy_of_the_model(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    module[1].weight = module[0].weight
    wrap(module)
    save_checkpoint(tmp_path, "whole", partial=False)
    assert (tmp_path / "whole").stat().st_size < 64 * 64 * 4 * 1.5
    found = torch.load(tmp_path / "whole", weights_only=True)
    assert found["0.weight"].data_ptr() == found["1.weight"].data_ptr()
    assert torch.equal(found["0.weight"], module.get_parameter("0.weight"))


@on_ranks(2)
def test_replicas_that_train_apart_and_hold_other_states_are_not_saved_as_one(tmp_path: Path) -> None:
    model, optimizer = make(ddp=False)
    if smp.rank() == 0:
        train(model, optimizer)
    with pytest.raises(CheckpointError, match="ranks 0 and 1 hold the same part of the model, but not the same states"):
        save_checkpoint(tmp_path, "one")


def test_masters_follow_a_full_checkpoint(tmp_path: Path) -> None:
    model, optimizer = make(bf16=True)
    train(model, optimizer)
    save_checkpoint(tmp_path, "one", partial=False)
    train(model, optimizer)
    resume_from_checkpoint(tmp_path, "one", partial=False)
    masters = optimizer.masters.masters()
    for parameter in model.parameters():
        assert torch.equal(masters[id(parameter)], parameter.float())


# --- what is written needs no smpkit to be read, and all of it comes back ---------------------------------------------


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
    module = Odd()
    wrap(module)
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
    with pytest.raises(CheckpointError, match="no room for a tensor called `__metadata__`"):
        tensors.write_tensors(io.BytesIO(), {"__metadata__": torch.rand(4)})
