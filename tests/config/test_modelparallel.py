from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smpkit.config.modelparallel import HISTORIC, V2_KEYS, ModelParallelConfig
from smpkit.errors import ConfigError
from tests.config.strategies import anything, patient, texts

SEED: dict[str, Any] = {
    "microbatches": 4,
    "pipeline_parallel_degree": 2,
    "placement_strategy": "cluster",
    "tensor_parallel_degree": 2,
    "ddp": True,
    "offload_activations": True,
    "activation_loading_horizon": 4,
}

# Section 1.2 of the specification: every key of the PyTorch library with its (documented) default.
DEFAULTS: dict[str, object] = {
    "pipeline_parallel_degree": 1,
    "tensor_parallel_degree": 1,
    "microbatches": 1,
    "virtual_pipeline_degree": 1,
    "active_microbatches": 1,
    "pipeline": "interleaved",
    "optimize": "memory",
    "memory_weight": 0.8,
    "auto_partition": True,
    "default_partition": 0,
    "placement_strategy": "cluster",
    "ddp": False,
    "ddp_port": None,
    "ddp_dist_backend": "auto",
    "offload_activations": False,
    "memory_budget_gib": None,
    "activation_loading_horizon": 4,
    "_shard_offloaded_activations": True,
    "fp16": False,
    "fp16_params": False,
    "bf16": False,
    "_fp32_grad_accumulation": False,
    "shard_optimizer_state": False,
    "prescaled_batch": False,
    "skip_tracing": False,
    "tensor_parallel_seed": 0,
    "delayed_parameter_initialization": False,
    "sharded_data_parallel_degree": 1,
    "sdp_reduce_bucket_size": 500_000_000,
    "sdp_param_persistence_threshold": 1_000_000,
    "sdp_max_live_parameters": 1_000_000_000,
    "sdp_hierarchical_allgather": True,
    "sdp_gradient_clipping": 1.0,
    "load_partition": False,
    "partition_file": None,
    "checkpoint_attentions": False,
    "_match_weights": False,
    "static_mode": False,
    "fast_mode": False,
    "herring": False,
    "timeout_seconds": 600,
}


def config(
    parameters: Mapping[str, Any] | ModelParallelConfig | None = None, environment: str | None = None
) -> ModelParallelConfig:
    return ModelParallelConfig.from_sources(parameters, environment)[0]


def notices(parameters: Mapping[str, Any], environment: str | None = None) -> list[str]:
    return [problem.where for problem in ModelParallelConfig.from_sources(parameters, environment)[1]]


def problems(parameters: Mapping[Any, Any], environment: str | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        ModelParallelConfig.from_sources(parameters, environment)
    return [str(problem).split("\n")[0] for problem in caught.value.problems]


def test_every_v1_key_has_its_documented_default() -> None:
    assert config().model_dump() == DEFAULTS


@pytest.mark.parametrize("key", DEFAULTS)
def test_every_default_may_be_spelled_out(key: str) -> None:
    # Rule 1.1.7: `requires` and `conflicts` are for values that differ from the default.
    assert config({key: DEFAULTS[key]}).model_dump() == DEFAULTS


def test_the_log_of_the_effective_configuration_leaves_out_internal_keys() -> None:
    effective = config(SEED).effective()
    assert effective["microbatches"] == 4
    assert effective["active_microbatches"] == 4
    internal = {"load_partition", "partition_file", "checkpoint_attentions", "static_mode", "fast_mode", "herring"}
    assert set(DEFAULTS) - set(effective) == internal | {key for key in DEFAULTS if key.startswith("_")}


# The compatibility traps of the specification's section 7 that concern the configuration
def test_trap_1_environment_overrides_init_dict_key_by_key() -> None:
    made = config({"microbatches": 2, "ddp": True}, '{"microbatches": 8, "pipeline_parallel_degree": 2}')
    assert (made.microbatches, made.ddp, made.pipeline_parallel_degree) == (8, True, 2)


def test_trap_1_alias_conflict_raises_even_across_sources() -> None:
    (problem,) = problems({"pipeline_parallel_degree": 1}, '{"partitions": 2}')
    assert problem == "partitions: is 2, but pipeline_parallel_degree, which it is the older name of, is 1"
    assert config({"pipeline_parallel_degree": 2}, '{"partitions": 2}').pipeline_parallel_degree == 2
    assert config({"partitions": 4}, '{"partitions": 2}').pipeline_parallel_degree == 2


NOT_OF_ITS_TYPE: dict[str, tuple[object, ...]] = {
    "microbatches": (True, "4", 4.0, None, 4097),
    "ddp": (1, "True"),
    "fp16": (0,),
    "memory_weight": ("0.5", True),
    "pipeline": (1,),
    "activation_loading_horizon": (True, "4"),
    "offload_activations": ("True", 1),
    "memory_budget_gib": ("24", 0),
    "sdp_reduce_bucket_size": (5e8,),
    "partitions": (True,),
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key in NOT_OF_ITS_TYPE for value in NOT_OF_ITS_TYPE[key]])
def test_trap_2_types_are_exact(key: str, value: object) -> None:
    (problem,) = problems({key: value})
    assert problem.startswith(f"{key}: must be ")


def test_trap_3_active_microbatches_below_total_force_interleaved() -> None:
    parameters = {"pipeline": "simple", "pipeline_parallel_degree": 2, "microbatches": 8}
    made, said = ModelParallelConfig.from_sources(parameters, None)
    assert made.active_microbatches == 4
    assert made.pipeline == "interleaved"
    assert [(problem.where, "becomes `interleaved`" in problem.message) for problem in said] == [("pipeline", True)]
    assert config({**parameters, "active_microbatches": 8}).pipeline == "simple"
    assert config({**parameters, "microbatches": 4}).pipeline == "simple"


@pytest.mark.parametrize("strategy", ["cluster", "spread", "DPT", "DTP", "PDT", "PTD", "TDP", "TPD"])
def test_trap_22_placement_letters_are_accepted(strategy: str) -> None:
    assert config({"placement_strategy": strategy}).placement_strategy == strategy


@pytest.mark.parametrize(
    ("degree", "microbatches", "virtual", "active"),
    [
        *((1, 1, 1, 1), (1, 8, 1, 3), (2, 8, 1, 4), (4, 4, 1, 4), (8, 2, 1, 2), (4, 16, 1, 6)),
        *((4, 16, 2, 8), (4, 16, 3, 8), (4, 6, 2, 6), (4, 9, 2, 9), (4, 18, 2, 10), (1, 8, 2, 3), (2, 8, 2, 4)),
    ],
)
def test_default_of_active_microbatches(degree: int, microbatches: int, virtual: int, active: int) -> None:
    """Two above the degree, or two groups of virtual stages, and no more than there are."""
    parameters = {"pipeline_parallel_degree": degree, "microbatches": microbatches, "virtual_pipeline_degree": virtual}
    assert config(parameters).active_microbatches == active


@pytest.mark.parametrize(
    ("parameters", "optimize", "weight"),
    [
        ({}, "memory", 0.8),
        ({"optimize": "speed"}, "speed", 0.2),
        ({"optimize": "speed", "memory_weight": 1}, "speed", 1.0),
        ({"prescaled_batch": True}, "speed", 0.2),
    ],
)
def test_defaults_of_optimize_and_memory_weight(parameters: dict[str, Any], optimize: str, weight: float) -> None:
    effective = config(parameters)
    assert (effective.optimize, effective.memory_weight) == (optimize, weight)


def test_checkpoint_attentions_is_switched_off_in_a_pipeline() -> None:
    parameters = {"pipeline_parallel_degree": 2, "microbatches": 2, "checkpoint_attentions": True}
    assert config(parameters).checkpoint_attentions is False
    assert notices(parameters) == ["checkpoint_attentions"]
    assert config({"checkpoint_attentions": True}).checkpoint_attentions is True


@pytest.mark.parametrize("key", ["checkpoint_attentions", "_shard_offloaded_activations"])
def test_internal_keys_that_nothing_reads_are_told_so(key: str) -> None:
    parameters = {"offload_activations": True, key: not DEFAULTS[key]}
    assert notices(parameters) == [key]


@pytest.mark.parametrize("key", HISTORIC)
def test_historic_keys_are_accepted_with_a_warning(key: str) -> None:
    assert config({key: object()}) == config()
    assert notices({key: True}) == [key]


def test_tensorflow_keys_are_refused_by_name_unless_their_default_is_spelled_out() -> None:
    assert notices({"horovod": False, "contiguous": True}) == ["horovod", "contiguous"]
    assert problems({"horovod": 0})
    assert problems({"horovod": True, "contiguous": False}) == [
        "horovod: belongs to the TensorFlow library; smpkit is for PyTorch",
        "contiguous: belongs to the TensorFlow library; smpkit is for PyTorch",
    ]


@pytest.mark.parametrize("key", V2_KEYS)
def test_v2_keys_are_refused_with_their_v1_counterpart(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config({key: 1})
    (problem,) = caught.value.problems
    assert (problem.where, problem.hint) == (key, f"a key of SMP v2: {V2_KEYS[key]}")


def test_unknown_keys_get_the_closest_name() -> None:
    for name, meant in (("microbatchs", "microbatches"), ("partitons", "partitions")):
        with pytest.raises(ConfigError, match=f"did you mean `{meant}`"):
            config({name: 4})


def test_the_alias_is_named_as_it_was_written() -> None:
    assert problems({"partitions": 0}) == ["partitions: must be at least 1, got 0"]
    assert notices({"partitions": 2}) == ["partitions"]


def test_all_problems_are_told_at_once() -> None:
    wrong = {"microbatches": 0, "tensor_parallel_degree": 2, "foo": 1, "ddp_port": -1, "bf16": True, "fp16": True}
    names = [line.split(":")[0] for line in problems(wrong)]
    assert names == ["microbatches", "ddp_port", "foo", "tensor_parallel_degree", "bf16"]


def test_rules_that_read_a_wrong_value_are_silent() -> None:
    for wrong, key in (
        ({"tensor_parallel_degree": 2, "ddp": "yes", "ddp_port": 1}, "ddp"),
        ({"virtual_pipeline_degree": "x", "pipeline_parallel_degree": 2, "default_partition": 3}, "virtual_pipeline_d"),
    ):
        (problem,) = problems(wrong)
        assert problem.startswith(key)


def test_json_that_cannot_be_read_says_where() -> None:
    assert problems({}, '{"microbatches": four}') == ["SM_HP_MP_PARAMETERS:1:18: is not JSON: expecting value"]


@pytest.mark.parametrize("text", ["", "[]", "3", "null", '{"a": NaN}', '{"ddp": true, "ddp": false}'])
def test_an_environment_that_is_no_plain_object_is_refused(text: str) -> None:
    assert problems({}, text)


def test_a_configuration_object_is_taken_as_a_script_would_give_it() -> None:
    made = config(ModelParallelConfig(microbatches=4), '{"pipeline_parallel_degree": 2}')
    assert made.given() == {"microbatches": 4, "pipeline_parallel_degree": 2}


@pytest.mark.parametrize("argument", [[], "x", 3], ids=repr)
def test_an_argument_that_is_no_mapping_is_refused(argument: Any) -> None:
    assert problems(argument)[0].startswith("must be a mapping of parameters, got")


def test_the_constructor_says_the_same_without_showing_pydantics_view() -> None:
    with pytest.raises(ValueError, match="must be at least 1, got 0") as caught:
        ModelParallelConfig(microbatches=0)
    assert "input_value" not in str(caught.value)


NAMES = (*DEFAULTS, *V2_KEYS, *HISTORIC, "partitions", "horovod", "contiguous")


@patient
@given(st.dictionaries(st.one_of(st.sampled_from(NAMES), texts), anything(*NAMES)))
def test_no_input_makes_anything_but_a_config_error(parameters: dict[str, Any]) -> None:
    with suppress(ConfigError):
        ModelParallelConfig.from_sources(parameters, None)


@patient
@given(st.text())
def test_no_environment_makes_anything_but_a_config_error(text: str) -> None:
    with suppress(ConfigError):
        ModelParallelConfig.from_sources(None, text)
