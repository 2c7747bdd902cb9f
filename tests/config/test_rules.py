from __future__ import annotations

from typing import Any

import pytest

from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.config.rules import unused_settings
from smpkit.errors import ConfigError


@pytest.mark.parametrize(
    ("parameters", "key"),
    [
        ({"tensor_parallel_degree": 2}, "tensor_parallel_degree"),
        ({"ddp_port": 1234}, "ddp_port"),
        ({"ddp_dist_backend": "gloo"}, "ddp_dist_backend"),
        ({"microbatches": 2, "active_microbatches": 3}, "active_microbatches"),
        ({"pipeline_parallel_degree": 2, "default_partition": 2}, "default_partition"),
        (
            {"pipeline_parallel_degree": 2, "virtual_pipeline_degree": 2, "default_partition": 4},
            "default_partition",
        ),
        ({"auto_partition": False}, "auto_partition"),
        ({"_shard_offloaded_activations": False}, "_shard_offloaded_activations"),
        ({"fp16": True, "bf16": True, "ddp": True, "sharded_data_parallel_degree": 2}, "bf16"),
        ({"_fp32_grad_accumulation": True}, "_fp32_grad_accumulation"),
        (
            {"shard_optimizer_state": True, "ddp": True, "sharded_data_parallel_degree": 2},
            "shard_optimizer_state",
        ),
        ({"sharded_data_parallel_degree": 2}, "sharded_data_parallel_degree"),
        (
            {"sharded_data_parallel_degree": 2, "ddp": True, "pipeline_parallel_degree": 2},
            "sharded_data_parallel_degree",
        ),
        (
            {"sharded_data_parallel_degree": 2, "ddp": True, "tensor_parallel_degree": 2},
            "sharded_data_parallel_degree",
        ),
        ({"herring": True, "ddp": True}, "herring"),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_each_illegal_combination_names_its_key(parameters: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelParallelConfig.from_sources(parameters, None)
    assert [problem.path for problem in caught.value.problems] == [(key,)]


@pytest.mark.parametrize(
    ("parameters", "keys"),
    [
        ({"pipeline_parallel_degree": 2, "microbatches": 1}, ["microbatches"]),
        ({"pipeline_parallel_degree": 2}, ["pipeline_parallel_degree"]),
        ({"activation_loading_horizon": 4}, ["activation_loading_horizon"]),
        ({"activation_loading_horizon": 4, "offload_activations": True}, []),
        ({"pipeline_parallel_degree": 2, "microbatches": 4, "default_partition": 1}, ["default_partition"]),
        (
            {
                "pipeline_parallel_degree": 2,
                "microbatches": 4,
                "auto_partition": False,
                "default_partition": 1,
                "memory_weight": 0.5,
            },
            ["memory_weight"],
        ),
        ({"virtual_pipeline_degree": 2}, ["virtual_pipeline_degree"]),
        (
            {
                "pipeline_parallel_degree": 2,
                "virtual_pipeline_degree": 2,
                "microbatches": 8,
                "active_microbatches": 3,
            },
            ["active_microbatches"],
        ),
        (
            {
                "pipeline": "interleaved",
                "active_microbatches": 1,
                "auto_partition": True,
                "memory_weight": 1,
                "default_partition": 0,
            },
            ["active_microbatches", "auto_partition", "default_partition", "memory_weight", "pipeline"],
        ),
        ({"ddp_dist_backend": "nccl"}, ["ddp_dist_backend"]),
        ({"ddp_dist_backend": "nccl", "ddp": True}, []),
        (
            {
                "sdp_reduce_bucket_size": 1,
                "sdp_param_persistence_threshold": 1,
                "sdp_max_live_parameters": 1,
                "sdp_hierarchical_allgather": True,
                "sdp_gradient_clipping": 1.0,
            },
            [
                "sdp_gradient_clipping",
                "sdp_hierarchical_allgather",
                "sdp_max_live_parameters",
                "sdp_param_persistence_threshold",
                "sdp_reduce_bucket_size",
            ],
        ),
        ({"sdp_gradient_clipping": 0.5, "sharded_data_parallel_degree": 2, "ddp": True}, []),
        (
            {
                "sdp_reduce_bucket_size": 1,
                "sdp_hierarchical_allgather": False,
                "sharded_data_parallel_degree": 2,
                "ddp": True,
            },
            ["sdp_hierarchical_allgather", "sdp_reduce_bucket_size"],
        ),
        ({"shard_optimizer_state": True}, ["shard_optimizer_state"]),
        (
            {"prescaled_batch": True, "tensor_parallel_seed": 3, "_match_weights": True},
            ["prescaled_batch", "tensor_parallel_seed"],
        ),
        ({"prescaled_batch": False, "tensor_parallel_seed": 0}, []),
        ({"fp16_params": True}, ["fp16_params"]),
        ({"fp16": True}, []),
        (
            {"load_partition": True, "partition_file": "x", "static_mode": True, "fast_mode": True, "herring": True},
            ["fast_mode", "herring", "load_partition", "partition_file", "static_mode"],
        ),
        ({"load_partition": False, "static_mode": False, "partition_file": None}, []),
    ],
    ids=lambda value: None if isinstance(value, list) else "+".join(value),
)
def test_settings_without_effect_are_noticed_where_they_were_given(parameters: dict[str, Any], keys: list[str]) -> None:
    config = ModelParallelConfig(**parameters)
    assert sorted(problem.where for problem in unused_settings(config, parameters)) == keys


@pytest.mark.parametrize(
    ("degrees", "world_size", "key"),
    [
        ((1, 1, 1), 7, None),
        ((2, 2, 1), 16, None),
        ((2, 2, 1), 6, "pipeline_parallel_degree"),
        ((4, 1, 1), 2, "pipeline_parallel_degree"),
        ((1, 4, 1), 6, "tensor_parallel_degree"),
        ((1, 1, 4), 8, None),
        ((1, 1, 3), 8, "sharded_data_parallel_degree"),
        ((1, 1, 16), 8, "sharded_data_parallel_degree"),
    ],
)
def test_degrees_must_fit_the_number_of_ranks(degrees: tuple[int, int, int], world_size: int, key: str | None) -> None:
    names = ("pipeline_parallel_degree", "tensor_parallel_degree", "sharded_data_parallel_degree")
    config = ModelParallelConfig.model_construct(**dict(zip(names, degrees, strict=True)))
    problems = config.world_problems(world_size)
    assert [problem.where for problem in problems] == ([] if key is None else [key])
