"""In scripts of SMP v1 distributed modules draw weights of their own, unless the script has loaded others."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from smpkit.drop_in import DROP_IN_PATH
from smpkit.errors import UsageError
from tests.ranks import run_ranks
from tests.torch.steps import on_ranks

STEPS = 3


def import_v1() -> None:
    sys.path.append(str(DROP_IN_PATH))
    importlib.import_module("smdistributed.modelparallel.torch")


def start(degree: int = 1, **more: Any) -> None:
    import_v1()
    smp.init({"tensor_parallel_degree": degree, "ddp": True, "microbatches": 1, "prescaled_batch": True, **more})


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    off: dict[str, Any] = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    off |= {"use_cache": False, "bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.05}
    return GPT2LMHeadModel(GPT2Config(vocab_size=96, n_positions=12, n_embd=32, n_layer=2, n_head=4, **off))


def tokens(step: int) -> torch.Tensor:
    return torch.randint(96, (4, 12), generator=torch.Generator().manual_seed(step))


@smp.step
def train_step(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=x, attention_mask=torch.ones_like(x), labels=x)["loss"]
    model.backward(loss)
    return loss


def train(degree: int, pipeline: int, seed: int, marks_late: bool, half: bool) -> list[float]:
    """Return the losses; the ranks of a tensor-parallel group may have any seeds but that of the first."""
    from transformers import PreTrainedModel

    start(degree, pipeline_parallel_degree=pipeline)
    torch.manual_seed(seed if smp.tp_rank() == 0 else 77)
    switched_off = mock.patch.object(PreTrainedModel, "init_weights", return_value=None)  # as public scripts do it
    with switched_off, smp.tensor_parallelism(enabled=not marks_late):
        module = gpt2()
    if marks_late:
        smp.set_tensor_parallelism(module)
    if half:
        module = module.half().float()  # moved and cast, but not written
    model: Any = smp.DistributedModel(module)
    embedding, norm = model.get_module().word_embedding.weight, model.get_module().layernorm
    assert embedding.std().item() == pytest.approx(0.05, rel=0.1)
    assert torch.equal(norm.weight, torch.ones(32))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(train_step(model, tokens(0)).reduce_mean().item())
        optimizer.step()
    smp.shutdown()
    return losses


def train_all(*cases: tuple[int, int, int, bool, bool]) -> list[list[float]]:
    return [train(*case) for case in cases]


def test_scripts_that_switch_initialisation_off_train_one_model_at_every_degree() -> None:
    other, losses = run_ranks(train_all, 1, (1, 1, 6, False, False), (1, 1, 5, True, True))[0]
    assert losses[-1] < losses[0]
    assert other != losses
    for of_rank in (
        *run_ranks(train_all, 2, (2, 1, 5, True, False), (1, 2, 5, False, False)),
        *run_ranks(train_all, 4, (2, 2, 5, False, True)),
    ):
        for each in of_rank:
            assert each == pytest.approx(losses, rel=1e-5)


# --- what the script has loaded stays ---------------------------------------------------------------------------------


@on_ranks(2)
def test_what_was_loaded_stays(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    import_v1()
    torch.manual_seed(1)
    gpt2().save_pretrained(tmp_path)
    for way in ("from_pretrained", "load_state_dict", "a part", "assign"):
        start(2)
        with smp.tensor_parallelism():
            module: Any = GPT2LMHeadModel.from_pretrained(tmp_path) if way == "from_pretrained" else gpt2()
        if way == "a part":
            module.transformer.load_state_dict(gpt2().transformer.state_dict())
        elif way != "from_pretrained":
            module.load_state_dict(gpt2().state_dict(), assign=way == "assign")
        expected = {name: value.clone() for name, value in module.state_dict().items()}
        kept = smp.DistributedModel(module).original_state_dict()
        for name, value in kept.items():
            assert torch.equal(value, expected[name]), (way, name)
        smp.shutdown()


def one_rank_loads(loading: int) -> None:
    """The first rank's weights are those of all, so only what it has loaded can be kept."""
    start(2)
    torch.manual_seed(2)
    with smp.tensor_parallelism():
        module, other = gpt2(), gpt2()
    if smp.tp_rank() == loading:
        module.load_state_dict(other.state_dict())
    if loading:
        with pytest.raises(UsageError, match="weights were loaded into `the model` on rank 1, but not on rank 0"):
            smp.DistributedModel(module)
    else:
        kept = smp.DistributedModel(module).original_state_dict()
        assert torch.equal(kept["transformer.wpe.weight"], other.state_dict()["transformer.wpe.weight"])
    smp.shutdown()


def keywords() -> None:
    for config, argument, fresh in [
        ({}, None, True),
        ({}, False, False),
        ({"_match_weights": True}, None, False),
        ({"_match_weights": True}, True, True),
    ]:
        start(1, **config)
        with smp.tensor_parallelism():
            module = gpt2()
        before = module.state_dict()["transformer.wpe.weight"].clone()
        after = smp.DistributedModel(module, fresh_weights=argument).original_state_dict()["transformer.wpe.weight"]
        assert torch.equal(before, after) is not fresh, (config, argument)
        smp.shutdown()


def single_modules() -> None:
    """Modules of one class draw different weights; one that was loaded keeps its own."""
    start(1)
    with smp.tensor_parallelism():
        module = nn.ModuleDict({"first": nn.Linear(8, 8), "second": nn.Linear(8, 8), "table": nn.Embedding(8, 8)})
        table: Any = module["table"]
        table.load_state_dict({"weight": torch.ones(8, 8)})
    first: Any = module["first"]
    before = first.weight.detach().clone()
    model: Any = smp.DistributedModel(module).get_module()
    assert not torch.equal(model["first"].weight, before)
    assert not torch.equal(model["first"].weight, model["second"].weight)
    assert torch.equal(model["table"].weight, torch.ones(8, 8))


def elsewhere() -> None:
    """Scripts of `smpkit.torch` keep their weights, and may ask for fresh ones."""
    for asked in (None, True):
        smp.init({"tensor_parallel_degree": 2, "ddp": True})
        torch.manual_seed(4)
        with smp.tensor_parallelism():
            module = gpt2()
        before = module.state_dict()["transformer.wpe.weight"].clone()
        after = smp.DistributedModel(module, fresh_weights=asked).original_state_dict()["transformer.wpe.weight"]
        assert torch.equal(before, after) is (asked is None)
        smp.shutdown()


@pytest.mark.parametrize(
    ("ranks", "decide", "arguments"),
    [
        (1, keywords, ()),
        (1, single_modules, ()),
        (2, elsewhere, ()),
        (2, one_rank_loads, (0,)),
        (2, one_rank_loads, (1,)),
    ],
)
def test_who_decides(ranks: int, decide: Any, arguments: tuple[int, ...]) -> None:
    run_ranks(decide, ranks, *arguments)
