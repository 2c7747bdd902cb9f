"""In scripts of SMP v1, marked modules are replaced at every degree: one model, one set of names, one checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from tests.compat.test_fresh_weights import gpt2, import_v1, way_of
from tests.models import Case, tokens
from tests.models_of_others import TEXT_STEP
from tests.ranks import run_ranks
from tests.torch.steps import on_ranks
from tests.train import Training, Way, reference, training, world


def marked() -> nn.Module:
    with smp.tensor_parallelism():
        return gpt2()


CASE, PLAIN = (Case(build, tokens, TEXT_STEP) for build in (marked, gpt2))
Found = tuple[list[float], list[str]]
"""The losses, and the names of the first parameters."""


def train(trained: Training, numbers: range, folder: Path) -> Found:
    """Train on some batches, saving after the second."""
    losses = []
    for number in numbers:
        losses.append(trained.run(number)[0].item())
        if number == 1:
            smp.save_checkpoint(folder, "half")
            smp.save_checkpoint(folder, "whole", partial=False)
    module: Any = trained.model.get_module()
    assert len(module.transformer.seq_layers) == 2
    return losses, [name for name, _ in trained.model.named_parameters()][:3]


def save(way: Way, folder: Path) -> Found:
    import_v1()
    with training(CASE, way) as trained:
        return train(trained, range(4), folder)


def resume(way: Way, folder: Path) -> Found:
    with training(CASE, way) as trained:
        smp.resume_from_checkpoint(folder, tag="half")
        return train(trained, range(2, 4), folder)


@pytest.mark.parametrize(("saved", "resumed"), [(1, 2), (2, 1)])
def test_one_model_at_every_degree(saved: int, resumed: int, tmp_path: Path) -> None:
    way = replace(way_of(saved, _match_weights=True), batches=(8,) * 4)
    losses = [each.item() for [each] in reference(PLAIN, way)[0].outputs]
    [half] = reference(PLAIN, replace(way, batches=(8,) * 2))
    first = run_ranks(save, saved, way, tmp_path)
    then = run_ranks(resume, resumed, replace(way, tensor=resumed, model={"replace_at_degree_1": True}), tmp_path)
    for found, _ in first:
        assert found == pytest.approx(losses, rel=1e-6)  # Hugging Face computes the loss in float32
    for found, names in then:
        assert found == pytest.approx(losses[2:], rel=1e-6)
        assert names == first[0][1]
    whole = torch.load(tmp_path / "whole", weights_only=True)  # with the names of the script's own model
    assert whole.keys() >= half.values.keys() - {"lm_head.weight"}
    for name, value in half.values.items():
        torch.testing.assert_close(whole[name], value, rtol=1e-4, atol=1e-6)


@on_ranks(1)
def test_elsewhere_one_rank_keeps_the_modules_of_the_script() -> None:
    with world(Way()):
        assert type(smp.DistributedModel(marked()).module).__name__ == "GPT2LMHeadModel"
