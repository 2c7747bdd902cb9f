"""In scripts of SMP v1 distributed modules draw weights of their own, unless the script has loaded others."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from smpkit.drop_in import DROP_IN_PATH
from smpkit.errors import UsageError
from tests.models import Case, made_by_transformers, tokens
from tests.models_of_others import DIVIDED, TEXT_STEP
from tests.ranks import run_ranks
from tests.torch.steps import on_ranks
from tests.train import Way, batch, training, world

SIZES = {**DIVIDED, "vocab_size": 96, "hidden_size": 32, "initializer_range": 0.05, "use_cache": False}
gpt2: Any = partial(made_by_transformers, "GPT2", "LMHeadModel", SIZES)
POSITIONS = "transformer.wpe.weight"


def import_v1() -> None:
    sys.path.append(str(DROP_IN_PATH))
    importlib.import_module("smdistributed.modelparallel.torch")


def way_of(tensor: int, pipeline: int = 1, **config: Any) -> Way:
    return Way(pipeline, tensor=tensor, microbatches=1, optimizer="AdamW", config={"prescaled_batch": True, **config})


def marked(seed: int, late: bool, half: bool) -> nn.Module:
    """Make a model to be divided; the ranks of a tensor-parallel group may have any seeds but that of the first."""
    from transformers import PreTrainedModel

    torch.manual_seed(seed if smp.tp_rank() == 0 else 77)
    switched_off = mock.patch.object(PreTrainedModel, "init_weights", return_value=None)  # as public scripts do it
    with switched_off, smp.tensor_parallelism(enabled=not late):
        module = gpt2()
    if late:
        smp.set_tensor_parallelism(module)
    return module.half().float() if half else module  # moved and cast, but not written


def losses(way: Way, *how: Any) -> list[float]:
    import_v1()
    case = Case(partial(marked, *how), tokens, TEXT_STEP, torch.float32)
    with training(case, way) as trained:
        module: Any = trained.model.get_module()
        assert module.word_embedding.weight.std().item() == pytest.approx(0.05, rel=0.1)
        assert torch.equal(module.layernorm.weight, torch.ones(32))
        return [trained.step(*batch(case, 0, 4)).reduce_mean().item() for _ in range(3)]


def test_scripts_that_switch_initialisation_off_train_one_model_at_every_degree() -> None:
    [other] = run_ranks(losses, 1, way_of(1), 6, False, False)
    [expected] = run_ranks(losses, 1, way_of(1), 5, True, True)
    assert expected[-1] < expected[0]
    assert other != expected
    for found in (
        *run_ranks(losses, 2, way_of(2), 5, True, False),
        *run_ranks(losses, 2, way_of(1, pipeline=2), 5, False, False),
        *run_ranks(losses, 4, way_of(2, pipeline=2), 5, False, True),
    ):
        assert found == pytest.approx(expected, rel=1e-5)


# --- what the script has loaded stays ---------------------------------------------------------------------------------


@on_ranks(2)
def test_what_was_loaded_stays(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    import_v1()
    torch.manual_seed(1)
    gpt2().save_pretrained(tmp_path)
    for how in ("from_pretrained", "load_state_dict", "a part", "assign"):
        with world(way_of(2)):
            with smp.tensor_parallelism():
                module: Any = GPT2LMHeadModel.from_pretrained(tmp_path) if how == "from_pretrained" else gpt2()
            if how == "a part":
                module.transformer.load_state_dict(gpt2().transformer.state_dict())
            elif how != "from_pretrained":
                module.load_state_dict(gpt2().state_dict(), assign=how == "assign")
            expected = {name: value.clone() for name, value in module.state_dict().items()}
            for name, value in smp.DistributedModel(module).original_state_dict().items():
                assert torch.equal(value, expected[name]), (how, name)


@pytest.mark.parametrize("loading", [0, 1])
@on_ranks(2)
def test_what_one_rank_has_loaded_stays_if_it_is_the_first(loading: int) -> None:
    """The first rank's weights are those of all, so only what it has loaded can be kept."""
    import_v1()
    with world(way_of(2)):
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
            assert torch.equal(kept[POSITIONS], other.state_dict()[POSITIONS])


def draws(way: Way, fresh_weights: bool | None) -> bool:
    """Return whether a model got other weights than the script had made."""
    with world(way):
        torch.manual_seed(4)
        with smp.tensor_parallelism():
            module = gpt2()
        before = module.state_dict()[POSITIONS].clone()
        after = smp.DistributedModel(module, fresh_weights=fresh_weights).original_state_dict()
        return not torch.equal(before, after[POSITIONS])


@on_ranks(1)
def test_a_script_may_keep_its_weights_and_have_fresh_ones() -> None:
    import_v1()
    kept = way_of(1, _match_weights=True)
    assert draws(way_of(1), None)
    assert not draws(way_of(1), False)
    assert not draws(kept, None)
    assert draws(kept, True)


@on_ranks(1)
def test_modules_of_one_class_draw_different_weights_and_one_that_was_loaded_keeps_its_own() -> None:
    import_v1()
    with world(way_of(1)):
        with smp.tensor_parallelism():
            module: Any = nn.ModuleDict(
                {"first": nn.Linear(8, 8), "second": nn.Linear(8, 8), "table": nn.Embedding(8, 8)}
            )
            module["table"].load_state_dict({"weight": torch.ones(8, 8)})
        before = module["first"].weight.clone()
        model: Any = smp.DistributedModel(module).get_module()
        assert not torch.equal(model["first"].weight, before)
        assert not torch.equal(model["first"].weight, model["second"].weight)
        assert torch.equal(model["table"].weight, torch.ones(8, 8))


@on_ranks(2)
def test_scripts_of_smpkit_keep_their_weights_unless_they_ask_for_fresh_ones() -> None:
    way = Way(replicas=2, tensor=2)
    assert not draws(way, None)
    assert draws(way, True)
