from __future__ import annotations

from typing import Any

import pytest

from smpkit.config.documents import parse
from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.config.rules import unused_settings
from smpkit.errors import ConfigError


def read(parameters: str) -> Any:
    return parse(f"{{{parameters}}}", "parameters").value


@pytest.mark.parametrize(
    ("parameters", "key"),
    [
        ("tensor_parallel_degree: 2", "tensor_parallel_degree"),
        ("ddp_port: 1234", "ddp_port"),
        ("ddp_dist_backend: gloo", "ddp_dist_backend"),
        ("microbatches: 2, active_microbatches: 3", "active_microbatches"),
        ("pipeline_parallel_degree: 2, default_partition: 2", "default_partition"),
        ("pipeline_parallel_degree: 2, virtual_pipeline_degree: 2, default_partition: 4", "default_partition"),
        ("auto_partition: false", "auto_partition"),
        ("_shard_offloaded_activations: false", "_shard_offloaded_activations"),
        ("fp16: true, bf16: true, ddp: true, sharded_data_parallel_degree: 2", "bf16"),
        ("_fp32_grad_accumulation: true", "_fp32_grad_accumulation"),
        ("shard_optimizer_state: true, ddp: true, sharded_data_parallel_degree: 2", "shard_optimizer_state"),
        ("sharded_data_parallel_degree: 2", "sharded_data_parallel_degree"),
        ("sharded_data_parallel_degree: 2, ddp: true, pipeline_parallel_degree: 2", "sharded_data_parallel_degree"),
        ("sharded_data_parallel_degree: 2, ddp: true, tensor_parallel_degree: 2", "sharded_data_parallel_degree"),
        ("herring: true, ddp: true", "herring"),
    ],
)
def test_each_illegal_combination_names_its_key(parameters: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelParallelConfig.from_sources(read(parameters), None)
    assert [problem.path for problem in caught.value.problems] == [(key,)]


PIPELINE = "pipeline_parallel_degree: 2, microbatches: 4"
SHARDED = "sharded_data_parallel_degree: 2, ddp: true"


@pytest.mark.parametrize(
    ("parameters", "keys"),
    [
        ("pipeline_parallel_degree: 2, microbatches: 1", "microbatches"),
        ("pipeline_parallel_degree: 2", "pipeline_parallel_degree"),
        ("activation_loading_horizon: 4", "activation_loading_horizon"),
        ("activation_loading_horizon: 4, offload_activations: true", ""),
        (f"{PIPELINE}, default_partition: 1", "default_partition"),
        (f"{PIPELINE}, auto_partition: false, default_partition: 1, memory_weight: 0.5", "memory_weight"),
        ("virtual_pipeline_degree: 2", "virtual_pipeline_degree"),
        (f"{PIPELINE}, virtual_pipeline_degree: 2, active_microbatches: 3", "active_microbatches"),
        ("pipeline: interleaved, active_microbatches: 1", "all"),
        ("auto_partition: true, memory_weight: 1, default_partition: 0", "all"),
        ("ddp_dist_backend: nccl", "ddp_dist_backend"),
        ("ddp_dist_backend: nccl, ddp: true", ""),
        ("sdp_reduce_bucket_size: 1, sdp_param_persistence_threshold: 1, sdp_max_live_parameters: 1", "all"),
        ("sdp_hierarchical_allgather: true, sdp_gradient_clipping: 1.0", "all"),
        (f"sdp_gradient_clipping: 0.5, {SHARDED}", ""),
        (f"sdp_reduce_bucket_size: 1, {SHARDED}", "sdp_reduce_bucket_size"),
        (f"sdp_hierarchical_allgather: false, {SHARDED}", "sdp_hierarchical_allgather"),
        ("shard_optimizer_state: true", "shard_optimizer_state"),
        ("prescaled_batch: true, _match_weights: true", "prescaled_batch"),
        ("tensor_parallel_seed: 3", "tensor_parallel_seed"),
        ("prescaled_batch: false, tensor_parallel_seed: 0", ""),
        ("fp16_params: true", "fp16_params"),
        ("fp16: true", ""),
        ("load_partition: true, partition_file: x, static_mode: true, fast_mode: true, herring: true", "all"),
        ("load_partition: false, static_mode: false, partition_file: null", ""),
    ],
)
def test_settings_without_effect_are_noticed_where_they_were_given(parameters: str, keys: str) -> None:
    written = read(parameters)
    config = ModelParallelConfig(**written)
    told = sorted(problem.where for problem in unused_settings(config, written))
    assert told == (sorted(written) if keys == "all" else keys.split())


def test_a_key_that_the_reference_says_has_no_effect_says_so_itself() -> None:
    fields = ModelParallelConfig.model_fields.items()
    documented = {each.alias or name: each.default for name, each in fields if "No effect" in str(each.description)}
    for key, default in documented.items():
        other = "a file" if default is None else default + 1 if type(default) is int else not default
        # Some of v1's internal keys are errors without the first two.
        written: dict[str, Any] = {"fp16": True, "offload_activations": True, key: other}
        (notice,) = unused_settings(ModelParallelConfig(**written), written)
        assert notice.where == key
        assert notice.message.startswith("has no effect")
    assert len(documented) > 10


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
    pipeline, tensor, sharding = degrees
    config = ModelParallelConfig.model_construct(
        pipeline_parallel_degree=pipeline, tensor_parallel_degree=tensor, sharded_data_parallel_degree=sharding
    )
    problems = config.world_problems(world_size)
    assert [problem.where for problem in problems] == ([] if key is None else [key])
    assert all("`torchrun --nproc-per-node " in str(problem.hint) for problem in problems)
