"""State dicts of a model on two pipeline ranks and two tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import smpkit.torch as smp
from smpkit.errors import UsageError
from smpkit.torch.placement.shards import shard_of
from smpkit.torch.state_dict import PARTIAL_KEY
from tests.models import MODELS
from tests.models_of_others import DIVISIBLE
from tests.torch.steps import on_ranks
from tests.train import Training, Way, batch, build, world


def equal(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


CASE = MODELS["encoder and decoder"]
WAY = Way(2, 2, 2, microbatches=2, batches=(4,), prepare=smp.set_tensor_parallelism)


@on_ranks(4)
def test_a_model_is_saved_and_loaded_whole_and_in_parts() -> None:
    with world(WAY):
        before = {name: value.clone() for name, value in build(CASE).state_dict().items()}
        model = Training(CASE, WAY).model
        assert equal(model.state_dict(), before), "joined, before the model is partitioned"
        smp.step(CASE.step)(model, *batch(CASE, 0, 4))
        check_whole(model, before)


def check_whole(model: smp.DistributedModel, before: dict[str, Tensor]) -> None:
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    assert equal(whole, before), "no optimizer has stepped"
    first = model.state_dict(gather_to_rank0=True)
    assert equal(first, before) if smp.mp_rank() == 0 else first == {}
    own = model.local_state_dict()
    assert own.pop(PARTIAL_KEY) is True
    assert all(own[name].shape == p.shape for name, p in model.local_named_parameters())
    own = {name: value.clone() for name, value in own.items()}

    def scramble() -> None:
        with torch.no_grad():
            for parameter in model.local_parameters():
                parameter.fill_(3.0)

    for given, options in (
        (whole, {}),
        ({**whole, PARTIAL_KEY: False}, {}),
        ({**own, PARTIAL_KEY: True}, {}),
        ({**own, PARTIAL_KEY: True}, {"same_partition_load": True}),
    ):
        scramble()
        assert not equal(model.state_dict(), before)
        model.load_state_dict(given, **options)
        assert equal(model.state_dict(), before)
    del whole["head.bias"]
    with pytest.raises(UsageError, match=r"missing \['head.bias'\]"):
        model.load_state_dict(whole)

    pieces = [p for p in model.parameters() if (shard := shard_of(p)) is not None and shard.is_distributed]
    assert pieces
    assert all(model.is_distributed_parameter(p) and model.is_scaled_batch_parameter(p) for p in pieces)
    reduced = [dict(model.default_reducer_named_parameters()), dict(model.scaled_batch_reducer_named_parameters())]
    assert reduced[0].keys() | reduced[1].keys() == dict(model.named_parameters()).keys()
    assert not reduced[0].keys() & reduced[1].keys()
    assert len(list(model.distributed_modules())) == 6


@on_ranks(4)
def test_whole_dicts_under_hugging_faces_names_are_translated() -> None:
    case = DIVISIBLE["GPT2"]
    before = {name: value.clone() for name, value in build(case).state_dict().items()}
    other = {name: value + 1 for name, value in before.items()}
    with world(WAY):
        model = Training(case, WAY).model
        assert equal(model.original_state_dict(), before)
        model.load_state_dict(other)
        assert equal(model.original_state_dict(), other), "loaded before the model is partitioned"
        smp.step(case.step)(model, *batch(case, 0, 4))
        model.load_state_dict(before)
        assert equal(model.original_state_dict(), before), "and afterwards"
        translated = model.original_state_dict(gather_to_rank0=True)
        assert equal(translated, before) if smp.mp_rank() == 0 else translated == {}
