"""What is advised for a rank that ran out of memory, by what it held."""

from __future__ import annotations

from typing import Any

import pytest

from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.plan.remedy import Levers, memory_hint

HELD = {"weights": 100, "gradients": 100, "states": 200}


@pytest.mark.parametrize(
    ("parameters", "replicas", "activations", "is_checkpointed", "advice"),
    [
        ({}, 4, 50, False, "`sharded_data_parallel_degree: 4` saves most: 300 B"),
        ({"sharded_data_parallel_degree": 4}, 4, 50, True, "`offload_activations: true` saves most: up to 50 B"),
        ({}, 4, 1000, True, "`offload_activations: true` saves most: up to 1000 B"),
        ({}, 1, 10, False, "`smp.set_activation_checkpointing on each layer` saves most: up to 10 B"),
        ({"offload_activations": True, "microbatches": 4}, 1, 10, True, "`microbatches: 8` saves most: 5 B"),
        ({"offload_activations": True}, 1, 0, True, ""),
    ],
    ids=["states", "sharded", "activations", "one rank", "offloaded", "nothing"],
)
def test_the_setting_that_saves_most_is_named(
    parameters: dict[str, Any], replicas: int, activations: int, is_checkpointed: bool, advice: str
) -> None:
    config, _ = ModelParallelConfig.from_sources({"ddp": True, **parameters}, None)
    levers = Levers.of(config, replicas, is_checkpointed=is_checkpointed)
    hint = memory_hint(levers, **HELD, activations=activations)
    assert hint == (f"{advice} of this rank's memory" if advice else "")
