"""A model goes when the script drops it: notebooks and tests wrap one after the other in a process."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from tests.models import DROPOUT
from tests.ranks import run_ranks
from tests.train import KINDS, Way, batch, training

ALL = {**KINDS, "data, sharded": (DROPOUT, Way(replicas=2, config={"sharded_data_parallel_degree": 2, "bf16": True}))}


def still_there(names: list[str]) -> list[str]:
    """Train a model of each kind and drop it; return what outlives that."""
    watched: dict[str, weakref.ref[Any]] = {}
    for name in names:
        case, way = ALL[name]
        with training(case, way) as trained:
            for number in range(2):
                trained.step(*batch(case, number, 8))
            for part in (trained.model, trained.model.get_module(), trained.optimizer):
                watched[f"{name}: {type(part).__name__}"] = weakref.ref(part)
            del trained, part
    gc.collect()
    return [name for name, reference in watched.items() if reference() is not None]


@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_of_a_model_outlives_it(ranks: int) -> None:
    names = [name for name, (_, way) in ALL.items() if way.ranks == ranks]
    assert len(names) >= 3
    assert run_ranks(still_there, ranks, names) == [[]] * ranks
