"""What must hold between SMP v1's parameters, and which settings have no effect: two tables over plain values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from smpkit.errors import Problem

__all__ = ["broken_rules", "microbatches_of_virtual_stages", "unused_settings", "world_problems"]

Values = Mapping[str, Any]
Test = Callable[[Values, Collection[str]], bool]


@dataclass(frozen=True)
class Rule:
    """Something to say about `key` when `applies`; the texts may name values as `{microbatches}`."""

    key: str
    applies: Test
    message: str
    hint: str

    def judge(self, values: Values, given: Collection[str]) -> Problem | None:
        """Say the rule's sentence if it applies."""
        try:
            if self.applies(values, given):
                return Problem((self.key,), self.message.format_map(values), self.hint.format_map(values))
        except KeyError:  # a value that this rule reads is wrong by itself and left out: nothing to judge
            pass
        return None


def broken_rules(values: Values, given: Collection[str]) -> Iterator[Problem]:
    """Yield every rule between parameters that does not hold.

    Args:
        values: effective values by v1 key, without those that are wrong by themselves.
        given: the keys that the user wrote.
    """
    yield from _judge(_RULES, values, given)


def unused_settings(values: Values, given: Collection[str]) -> Iterator[Problem]:
    """Yield a notice for every setting the user wrote that does nothing, or not what it says."""
    yield from _judge([notice for notice in _NOTICES if notice.key in given], values, given)


def _judge(rules: Collection[Rule], values: Values, given: Collection[str]) -> Iterator[Problem]:
    for rule in rules:
        problem = rule.judge(values, given)
        if problem is not None:
            yield problem


# "Requires" and "conflicts" speak only of values that differ from the default, so spelling out a default is always
# legal; `nccl` and `auto` were both the default of ddp_dist_backend, each in its time.
_RULES = (
    Rule(
        "tensor_parallel_degree",
        lambda v, _: v["tensor_parallel_degree"] > 1 and not v["ddp"],
        "a degree of {tensor_parallel_degree} requires ddp",
        "set `ddp: true`",
    ),
    Rule("ddp_port", lambda v, _: v["ddp_port"] is not None and not v["ddp"], "requires ddp", "set `ddp: true`"),
    Rule(
        "ddp_dist_backend",
        lambda v, _: v["ddp_dist_backend"] not in ("auto", "nccl") and not v["ddp"],
        "`{ddp_dist_backend}` requires ddp",
        "set `ddp: true`",
    ),
    Rule(
        "active_microbatches",
        lambda v, _: v["active_microbatches"] > v["microbatches"],
        "must be at most microbatches ({microbatches}), got {active_microbatches}",
        "leave it out: the default fits",
    ),
    Rule(
        "default_partition",
        lambda v, _: v["virtual_pipeline_degree"] == 1 and v["default_partition"] >= v["pipeline_parallel_degree"],
        "must be less than pipeline_parallel_degree ({pipeline_parallel_degree}), got {default_partition}",
        "partitions are counted from 0",
    ),
    Rule(
        "default_partition",
        lambda v, _: (
            v["virtual_pipeline_degree"] > 1
            and v["default_partition"] >= v["pipeline_parallel_degree"] * v["virtual_pipeline_degree"]
        ),
        "must be less than virtual_pipeline_degree × pipeline_parallel_degree "
        "({virtual_pipeline_degree} × {pipeline_parallel_degree}), got {default_partition}",
        "virtual stages are counted from 0",
    ),
    Rule(
        "auto_partition",
        lambda v, given: not v["auto_partition"] and "default_partition" not in given,
        "false requires default_partition, for the modules in no `smp.partition` context",
        "add `default_partition: 0`",
    ),
    Rule(
        "_shard_offloaded_activations",
        lambda v, _: not v["_shard_offloaded_activations"] and not v["offload_activations"],
        "false requires offload_activations",
        "set `offload_activations: true`, or remove this key",
    ),
    Rule(
        "bf16",
        lambda v, _: v["bf16"] and v["fp16"],
        "cannot be combined with fp16",
        "choose one of them",
    ),
    Rule(
        "_fp32_grad_accumulation",
        lambda v, _: v["_fp32_grad_accumulation"] and not (v["fp16_params"] or v["fp16"]),
        "requires fp16",
        "set `fp16: true` (or `fp16_params: true`, its older form)",
    ),
    Rule(
        "shard_optimizer_state",
        lambda v, _: v["shard_optimizer_state"] and v["sharded_data_parallel_degree"] > 1,
        "cannot be combined with sharded data parallelism, which shards the optimizer state itself",
        "remove it",
    ),
    Rule(
        "sharded_data_parallel_degree",
        lambda v, _: v["sharded_data_parallel_degree"] > 1 and not v["ddp"],
        "a degree of {sharded_data_parallel_degree} requires ddp",
        "set `ddp: true`",
    ),
    Rule(
        "sharded_data_parallel_degree",
        lambda v, _: v["sharded_data_parallel_degree"] > 1 and v["pipeline_parallel_degree"] > 1,
        "cannot be combined with a pipeline (pipeline_parallel_degree is {pipeline_parallel_degree})",
        "use sharded data parallelism or a pipeline, not both",
    ),
    Rule(
        "sharded_data_parallel_degree",
        lambda v, _: (
            v["sharded_data_parallel_degree"] > 1 and v["tensor_parallel_degree"] > 1 and not v["prescaled_batch"]
        ),
        "together with tensor parallelism requires prescaled_batch",
        "set `prescaled_batch: true`",
    ),
    Rule("herring", lambda v, _: v["herring"] and v["ddp"], "cannot be combined with ddp", "remove it"),
)


def _one_pipeline_rank(key: str) -> Rule:
    return Rule(
        key,
        lambda v, _: v["pipeline_parallel_degree"] == 1,
        "has no effect: pipeline_parallel_degree is 1",
        "set `pipeline_parallel_degree`, or remove this key",
    )


def _no_sharding(key: str) -> Rule:
    return Rule(
        key,
        lambda v, _: v["sharded_data_parallel_degree"] == 1,
        "has no effect without sharded data parallelism",
        "set `sharded_data_parallel_degree` above 1, or remove this key",
    )


def _gathers_blocks(key: str, default: object, reason: str) -> Rule:
    return Rule(
        key,
        lambda v, _: v["sharded_data_parallel_degree"] > 1 and v[key] != default,
        f"has no effect: {reason}",
        "remove it",
    )


def _no_tensor_parallelism(key: str, default: object) -> Rule:
    return Rule(
        key,
        lambda v, _: v["tensor_parallel_degree"] == 1 and v[key] != default,
        "has no effect: tensor_parallel_degree is 1",
        "set `tensor_parallel_degree`, or remove this key",
    )


def _internal(key: str, default: object) -> Rule:
    return Rule(
        key,
        lambda v, _: v[key] != default,
        "has no effect: it belongs to the inside of the old library",
        "remove it",
    )


_ONE_MICROBATCH = "with one microbatch the {pipeline_parallel_degree} pipeline ranks work one after the other"
_MORE_MICROBATCHES = "set `microbatches` to {pipeline_parallel_degree} or more"

_NOTICES = (
    Rule(
        "microbatches",
        lambda v, _: v["pipeline_parallel_degree"] > 1 and v["microbatches"] == 1,
        _ONE_MICROBATCH,
        _MORE_MICROBATCHES,
    ),
    Rule(
        "pipeline_parallel_degree",
        lambda v, given: v["pipeline_parallel_degree"] > 1 and v["microbatches"] == 1 and "microbatches" not in given,
        _ONE_MICROBATCH,
        _MORE_MICROBATCHES,
    ),
    Rule(
        "activation_loading_horizon",
        lambda v, _: not v["offload_activations"],
        "has no effect without offload_activations",
        "set `offload_activations: true`, or remove this key",
    ),
    Rule(
        "default_partition",
        lambda v, _: v["auto_partition"] and v["pipeline_parallel_degree"] > 1,
        "has no effect: auto_partition is on",
        "set `auto_partition: false`, or remove this key",
    ),
    Rule(
        "memory_weight",
        lambda v, _: not v["auto_partition"] and v["pipeline_parallel_degree"] > 1,
        "has no effect: auto_partition is off",
        "remove it",
    ),
    *map(
        _one_pipeline_rank,
        (
            "pipeline",
            "virtual_pipeline_degree",
            "active_microbatches",
            "auto_partition",
            "memory_weight",
            "default_partition",
        ),
    ),
    Rule(
        "active_microbatches",
        lambda v, _: (
            v["virtual_pipeline_degree"] > 1
            and v["pipeline_parallel_degree"] > 1
            and v["active_microbatches"] < min(v["microbatches"], 2 * v["pipeline_parallel_degree"])
        ),
        "{active_microbatches} in flight are too few for virtual stages to win much: two per pipeline rank are needed",
        "remove it, or set `virtual_pipeline_degree: 1`",
    ),
    Rule(
        "pipeline",
        lambda v, _: v["pipeline"] == "simple" and v["active_microbatches"] != v["microbatches"],
        "`simple` becomes `interleaved`, as active_microbatches ({active_microbatches}) differs from microbatches "
        "({microbatches})",
        "set `active_microbatches: {microbatches}` to keep `simple`",
    ),
    Rule(
        "checkpoint_attentions",
        lambda v, _: v["checkpoint_attentions"] and v["pipeline_parallel_degree"] > 1,
        "is switched off: pipeline_parallel_degree is {pipeline_parallel_degree}",
        "use `smp.set_activation_checkpointing` instead",
    ),
    Rule("ddp_dist_backend", lambda v, _: not v["ddp"], "has no effect without ddp", "set `ddp: true`"),
    Rule(
        "shard_optimizer_state",
        lambda v, _: v["shard_optimizer_state"] and not v["ddp"],
        "has no effect without ddp",
        "set `ddp: true`",
    ),
    *map(
        _no_sharding,
        (
            "sdp_reduce_bucket_size",
            "sdp_param_persistence_threshold",
            "sdp_max_live_parameters",
            "sdp_hierarchical_allgather",
            "sdp_gradient_clipping",
        ),
    ),
    _gathers_blocks("sdp_reduce_bucket_size", 500_000_000, "gradients are reduced block by block"),
    _gathers_blocks("sdp_hierarchical_allgather", True, "the communication library chooses how a block is gathered"),
    _no_tensor_parallelism("prescaled_batch", False),
    _no_tensor_parallelism("tensor_parallel_seed", 0),
    Rule("fp16_params", lambda v, _: v["fp16_params"], "was replaced by fp16 in release 1.10", "use `fp16: true`"),
    _internal("_fp32_grad_accumulation", False),
    _internal("load_partition", False),
    _internal("partition_file", None),
    _internal("static_mode", False),
    _internal("fast_mode", False),
    _internal("herring", False),
)


def microbatches_of_virtual_stages(degree: int, microbatches: int) -> int:
    """Return how many microbatches a rank holds in interleaved 1F1B: two groups, of `degree` microbatches or more."""
    return 2 * -(-microbatches // max(1, microbatches // degree))


def world_problems(values: Values, world_size: int) -> list[Problem]:
    """Say which degrees do not fit into `world_size` ranks."""
    pp, tp = values["pipeline_parallel_degree"], values["tensor_parallel_degree"]
    if world_size % (pp * tp):
        degrees = f"pipeline_parallel_degree × tensor_parallel_degree = {pp} × {tp} = {pp * tp}"
        key = "pipeline_parallel_degree" if pp > 1 else "tensor_parallel_degree"
        return [Problem((key,), f"{degrees} must divide the number of ranks ({world_size})", _ranks_hint(pp * tp))]
    sharding, replicas = values["sharded_data_parallel_degree"], world_size // (pp * tp)
    if replicas % sharding:
        size = "data-parallel size" if tp == 1 else f"number of replicas of {tp} tensor-parallel ranks"
        message = f"must divide the {size} ({replicas}), got {sharding}"
        return [Problem(("sharded_data_parallel_degree",), message, _ranks_hint(sharding * tp))]
    return []


def _ranks_hint(multiple: int) -> str:
    return f"start a multiple of {multiple} ranks, or lower the degree"
