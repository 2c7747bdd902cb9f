"""Hosts that share no folder: each keeps what its own ranks need, and says where the rest is."""

from __future__ import annotations

import contextlib
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import smpkit.torch as smp
from smpkit.errors import CheckpointError
from tests.models import MODELS
from tests.ranks import run_ranks
from tests.torch.steps import on_ranks
from tests.train import Training, Way, batch, training, world

CASE = MODELS["BatchNorm"]
PIPELINE = Way(pipeline=2, microbatches=2, optimizer="AdamW")
REPLICAS = Way(replicas=2, microbatches=2, optimizer="AdamW")


def train(job: Training, number: int) -> dict[str, Tensor]:
    """Train on the batch of this number, and return the weights."""
    job.step(*batch(CASE, number, 8))
    return {name: value.clone() for name, value in job.model.state_dict().items()}


def resumed(folder: Path, way: Way = PIPELINE) -> dict[str, Tensor]:
    with training(CASE, way) as job:
        assert smp.resume_from_checkpoint(folder) == {"step": 1}
        weights = train(job, 1)
        smp.barrier()
        return weights


def check_equal_indices(path: Path) -> None:
    first, second = ((path / host / "one_partial" / "index.json").read_text() for host in ("host_0", "host_1"))
    assert first == second, "either host's may replace the other's"


def refused(folder: Path, way: Way) -> str:
    with training(CASE, way), pytest.raises(CheckpointError) as caught:
        smp.resume_from_checkpoint(folder)
    return str(caught.value)


@on_ranks(2, hosts=2)
def test_a_pipeline_over_hosts_resumes_there_and_elsewhere_once_its_files_are_together(tmp_path: Path) -> None:
    with training(CASE, PIPELINE) as job:
        host = smp.rank() // smp.local_size()
        own, other = tmp_path / f"host_{host}", tmp_path / f"host_{1 - host}"
        train(job, 0)
        said = "each host keeps the parts of its own ranks.* bring the files of all hosts together"
        with contextlib.nullcontext() if host else pytest.warns(UserWarning, match=said):
            smp.save_checkpoint(own, "one", user_content={"step": 1})
        files = [f"model_{host}_0_0.safetensors", f"optimizer_{host}_0_0.pt", f"optimizer_{host}_0_0.safetensors"]
        content = "user_content_1.pt" if host else "user_content.pt"
        assert sorted(each.name for each in (own / "one_partial").iterdir()) == ["index.json", *files, content]
        expected = train(job, 1)
        smp.barrier()
    check_equal_indices(tmp_path)
    weights = [resumed(own)]
    message = refused(own, REPLICAS)
    assert f"lacks `model_{1 - host}_0_0.safetensors` (saved by rank {1 - host} on " in message
    assert "copy these files here" in message
    message = refused(own if host else tmp_path / "nowhere", PIPELINE)
    assert "there is no complete checkpoint in" in message
    assert "on rank 0, though there is one on the others" in message
    with world(PIPELINE):
        for file in (own / "one_partial").glob(f"*_{host}_0_0.*"):
            shutil.copy(file, other / "one_partial")
        smp.barrier()
    weights += [resumed(other), resumed(own, REPLICAS)]
    for found in weights:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


# --- copied into one folder -------------------------------------------------------------------------------------------


def save_on_two_hosts(path: Path) -> dict[str, Tensor]:
    smp.init(PIPELINE.init)
    job = Training(CASE, PIPELINE)
    own = path / f"host_{smp.rank() // smp.local_size()}"
    train(job, smp.dp_rank())
    smp.save_checkpoint(own, "zero")
    if smp.rank() == 2:
        shutil.rmtree(own / "zero_partial")  # hosts may have other checkpoints beside this one
    # Buffers differ from one replica to the other, and so may what the script saves.
    smp.save_checkpoint(own, "one", user_content={"host": own.name})
    return train(job, smp.dp_rank())


def resume_from_each(folders: list[Path]) -> list[tuple[Any, dict[str, Tensor]]]:
    results = []
    for folder in folders:
        with training(CASE, PIPELINE) as job:
            results.append((smp.resume_from_checkpoint(folder), train(job, smp.dp_rank())))
            smp.barrier()
    return results


def test_the_folders_of_two_hosts_make_one_whichever_files_of_equal_names_come_last(tmp_path: Path) -> None:
    """As with SageMaker, which copies the folders of all hosts to one place in S3."""
    expected = run_ranks(save_on_two_hosts, 4, tmp_path, hosts=2)
    check_equal_indices(tmp_path)
    mixtures: list[Path] = []
    by_dice = lambda file: random.Random(file.name).random() < 0.5  # noqa: E731
    for is_first in (lambda file: file.name == "index.json", lambda _: True, lambda _: False, by_dice):
        mixtures.append(tmp_path / f"mixture_{len(mixtures)}")
        for host in ("host_0", "host_1"):
            for file in sorted((tmp_path / host).rglob("*")):
                target = mixtures[-1] / file.relative_to(tmp_path / host)
                if file.is_file() and (not target.exists() or not is_first(file)):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(file, target)
    for rank, (results, weights) in enumerate(zip(run_ranks(resume_from_each, 4, mixtures), expected, strict=True)):
        for content, found in results:
            assert content == {"host": f"host_{rank // 2}"}
            torch.testing.assert_close(found, weights, rtol=0, atol=0)
