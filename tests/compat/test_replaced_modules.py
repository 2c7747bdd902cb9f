"""In scripts of SMP v1, marked modules are replaced at every degree: one model, one set of names, one checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import smpkit.torch as smp
from tests.compat.test_fresh_weights import gpt2 as small_gpt2
from tests.compat.test_fresh_weights import import_v1, tokens, train_step
from tests.ranks import run_ranks
from tests.torch.steps import on_ranks

STEPS = 4


def gpt2() -> Any:
    torch.manual_seed(0)
    return small_gpt2().double()


def train(degree: int, folder: str, v1: bool, save_at: int, resume: bool) -> tuple[list[float], list[str]]:
    """Return the losses, and the names of the first parameters."""
    if v1:
        import_v1()
    parameters = {"tensor_parallel_degree": degree, "ddp": True, "microbatches": 1, "prescaled_batch": True}
    smp.init({**parameters, "_match_weights": True})
    with smp.tensor_parallelism():
        module = gpt2()
    model: Any = smp.DistributedModel(module) if v1 else smp.DistributedModel(module, replace_at_degree_1=True)
    assert len(model.get_module().transformer.seq_layers) == 2
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    start = smp.resume_from_checkpoint(folder, tag="half")["step"] if resume else 0
    losses = []
    for step in range(start, STEPS):
        optimizer.zero_grad()
        losses.append(train_step(model, tokens(step)).reduce_mean().item())
        optimizer.step()
        if step + 1 == save_at:
            smp.save_checkpoint(folder, "half", user_content={"step": step + 1})
            smp.save_checkpoint(folder, "whole", partial=False)
    return losses, [name for name, _ in model.named_parameters()][:3]


def plainly() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses of plain PyTorch, and the weights after two steps."""
    model, losses = gpt2(), []
    optimizer, half = torch.optim.AdamW(model.parameters(), lr=1e-2), {}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(input_ids=tokens(step), attention_mask=torch.ones(4, 12), labels=tokens(step))["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 1:
            half = {name: value.clone() for name, value in model.state_dict().items()}
    return losses, half


@pytest.mark.parametrize(("saved", "resumed"), [(1, 2), (2, 1)])
def test_one_model_at_every_degree(saved: int, resumed: int, tmp_path: Path) -> None:
    [(losses, half)] = run_ranks(plainly, 1)
    first = run_ranks(train, saved, saved, str(tmp_path), True, 2, False)
    then = run_ranks(train, resumed, resumed, str(tmp_path), False, 0, True)
    for each in first:
        assert each[0] == pytest.approx(losses, rel=1e-6)  # Hugging Face computes the loss in float32
    for each in then:
        assert each[0] == pytest.approx(losses[2:], rel=1e-6)
        assert each[1] == first[0][1]
    whole = torch.load(tmp_path / "whole", weights_only=True)  # with the names of the script's own model
    assert whole.keys() >= half.keys() - {"lm_head.weight"}
    for name, value in half.items():
        torch.testing.assert_close(whole[name], value, rtol=1e-4, atol=1e-6)


@on_ranks(1)
def test_elsewhere_one_rank_keeps_the_modules_of_the_script() -> None:
    smp.init()
    with smp.tensor_parallelism():
        module = gpt2()
    assert type(smp.DistributedModel(module).module).__name__ == "GPT2LMHeadModel"
