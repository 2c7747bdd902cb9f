from __future__ import annotations

import re

from smpkit.config.migrate import V2_KEYS
from smpkit.config.modelparallel import ModelParallelConfig


def test_a_hint_about_a_key_of_v2_names_a_key_of_v1() -> None:
    named = {key for hint in V2_KEYS.values() for key in re.findall(r"`(\w+)`", hint)}
    assert named == {"sharded_data_parallel_degree", "offload_activations", "tensor_parallel_seed"}
    assert named <= set(ModelParallelConfig.keys())


def test_no_key_of_v2_is_one_of_v1() -> None:
    assert not set(V2_KEYS) & set(ModelParallelConfig.keys())
