"""What a rank that ran out of memory advises, by what it holds."""

from __future__ import annotations

from typing import Any

import pytest

from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.plan.remedy import Remedy, best_remedy

HELD = {"weights": 100, "gradients": 100, "states": 200}


@pytest.mark.parametrize(
    ("parameters", "replicas", "activations", "is_checkpointed", "expected"),
    [
        ({}, 4, 50, False, Remedy("sharded_data_parallel_degree: 4", 300)),
        ({"sharded_data_parallel_degree": 4}, 4, 50, True, Remedy("offload_activations: true", 50, is_bound=True)),
        ({}, 4, 1000, True, Remedy("offload_activations: true", 1000, is_bound=True)),
        ({}, 1, 10, False, Remedy("smp.set_activation_checkpointing on each layer", 10, is_bound=True)),
        ({"offload_activations": True, "microbatches": 4}, 1, 10, True, Remedy("microbatches: 8", 5)),
        ({"offload_activations": True}, 1, 0, True, None),
    ],
)
def test_the_setting_that_saves_most_is_named(
    parameters: dict[str, Any], replicas: int, activations: int, is_checkpointed: bool, expected: Remedy | None
) -> None:
    config, _ = ModelParallelConfig.from_sources({"ddp": True, **parameters}, None)
    found = best_remedy(config, replicas, **HELD, activations=activations, is_checkpointed=is_checkpointed)
    assert found == expected
