from __future__ import annotations

from smpkit.config.migrate import V2_KEYS, from_v2
from smpkit.config.modelparallel import ModelParallelConfig


def test_v2_parameters_become_v1_parameters_with_notes() -> None:
    translated, notes = from_v2(
        {
            "hybrid_shard_degree": 4,
            "sm_activation_offloading": True,
            "activation_loading_horizon": 2,
            "tensor_parallel_degree": 1,
            "context_parallel_degree": 1,
            "random_seed": 7,
        }
    )
    assert translated == {
        "sharded_data_parallel_degree": 4,
        "offload_activations": True,
        "tensor_parallel_degree": 1,
        "tensor_parallel_seed": 7,
        "ddp": True,
    }
    assert [note.where for note in notes] == [
        "hybrid_shard_degree",
        "sm_activation_offloading",
        "activation_loading_horizon",
        "context_parallel_degree",
        "random_seed",
        "ddp",
    ]
    ModelParallelConfig.from_sources(translated, None)


def test_a_degree_that_lets_v2_choose_is_left_to_the_user() -> None:
    translated, (note,) = from_v2({"hybrid_shard_degree": 0})
    assert translated == {}
    assert note.hint == "set `sharded_data_parallel_degree`"


def test_ddp_is_added_only_where_it_is_needed_and_not_said() -> None:
    assert "ddp" not in from_v2({"tensor_parallel_degree": 1})[0]
    assert from_v2({"tensor_parallel_degree": 2, "ddp": False})[0]["ddp"] is False


def test_every_counterpart_is_a_key_of_v1() -> None:
    assert {entry.key for entry in V2_KEYS.values()} - {None} <= set(ModelParallelConfig.keys())
