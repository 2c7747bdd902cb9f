"""What must hold between SMP v1's parameters, and which settings have no effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from smpkit.errors import Problem

if TYPE_CHECKING:
    from smpkit.config.modelparallel import ModelParallelConfig


def broken_rules(config: ModelParallelConfig) -> Iterator[Problem]:
    """Yield every rule between parameters that does not hold.

    "Requires" and "conflicts" speak only of values that differ from the default, so spelling out a default is always
    legal. A problem names each parameter without which it would not be one: if such a parameter is wrong by itself, the
    problem is left out.
    """
    yield from _needs_ddp(config)
    yield from _of_the_pipeline(config)
    yield from _of_sharding(config)
    if not config.shard_offloaded_activations and not config.offload_activations:
        message, hint = "false requires offload_activations", "set `offload_activations: true`, or remove this key"
        yield Problem(("_shard_offloaded_activations",), message, hint)
    if config.bf16 and config.fp16:
        yield Problem(("bf16",), "cannot be combined with fp16", "choose one of them")
    if config.fp32_grad_accumulation and not (config.fp16_params or config.fp16):
        hint = "set `fp16: true` (or `fp16_params: true`, its older form)"
        yield Problem(("_fp32_grad_accumulation",), "requires fp16", hint)


def _needs_ddp(config: ModelParallelConfig) -> Iterator[Problem]:
    if config.ddp:
        if config.herring:
            yield Problem(("herring",), "cannot be combined with ddp", "remove it")
        return
    hint = "set `ddp: true`"
    for key in ("tensor_parallel_degree", "sharded_data_parallel_degree"):
        if getattr(config, key) > 1:
            yield Problem((key,), f"a degree of {getattr(config, key)} requires ddp", hint)
    if config.ddp_port is not None:
        yield Problem(("ddp_port",), "requires ddp", hint)
    # `nccl` and `auto` were both the default, each in its time.
    if config.ddp_dist_backend not in ("auto", "nccl"):
        yield Problem(("ddp_dist_backend",), f"`{config.ddp_dist_backend}` requires ddp", hint)


def _of_the_pipeline(config: ModelParallelConfig) -> Iterator[Problem]:
    pipeline, virtual = config.pipeline_parallel_degree, config.virtual_pipeline_degree
    if config.active_microbatches > config.microbatches:
        message = f"must be at most microbatches ({config.microbatches}), got {config.active_microbatches}"
        yield Problem(("active_microbatches",), message, "leave it out: the default fits")
    if config.default_partition >= pipeline * virtual:
        limit = f"pipeline_parallel_degree ({pipeline})"
        hint = "partitions are counted from 0; `virtual_pipeline_degree` makes more of them"
        if virtual > 1:
            limit = f"virtual_pipeline_degree × pipeline_parallel_degree ({virtual} × {pipeline})"
            hint = "virtual stages are counted from 0"
        message = f"must be less than {limit}, got {config.default_partition}"
        yield Problem(("default_partition",), message, hint)
    if not config.auto_partition and "default_partition" not in config.model_fields_set:
        message = "false requires default_partition, for the modules in no `smp.partition` context"
        yield Problem(("auto_partition",), message, "add `default_partition: 0`")


def _of_sharding(config: ModelParallelConfig) -> Iterator[Problem]:
    if config.sharded_data_parallel_degree == 1:
        return
    key = "sharded_data_parallel_degree"
    if config.shard_optimizer_state:
        message = "cannot be combined with sharded data parallelism, which shards the optimizer state itself"
        yield Problem(("shard_optimizer_state",), message, "remove it")
    if config.pipeline_parallel_degree > 1:
        degree = f"pipeline_parallel_degree is {config.pipeline_parallel_degree}"
        hint = "use sharded data parallelism or a pipeline, not both"
        yield Problem((key,), f"cannot be combined with a pipeline ({degree})", hint)
    if config.tensor_parallel_degree > 1 and not config.prescaled_batch:
        message = "together with tensor parallelism requires prescaled_batch"
        yield Problem((key,), message, "set `prescaled_batch: true`")


_PIPELINE = (
    *("pipeline", "virtual_pipeline_degree", "active_microbatches"),
    *("auto_partition", "memory_weight", "default_partition"),
)
_SHARDING = (
    *("sdp_reduce_bucket_size", "sdp_param_persistence_threshold", "sdp_max_live_parameters"),
    *("sdp_hierarchical_allgather", "sdp_gradient_clipping"),
)
INTERNAL = (
    *("_fp32_grad_accumulation", "_shard_offloaded_activations", "load_partition", "partition_file"),
    *("static_mode", "fast_mode", "herring"),
)
"""Keys that name how v1 worked inside, and do nothing here."""
_Notice = tuple[str, str, str]
"""A key, what is said of it, and the hint."""


def unused_settings(config: ModelParallelConfig, written: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a notice for every setting the user wrote, by today's names, that does nothing, or not what it says."""
    defaults = type(config)().model_dump()
    changed = frozenset(key for key, value in written.items() if key in defaults and value != defaults[key])
    notices = [*_pipeline_notices(config, written), *_other_notices(config, changed)]
    for key, message, hint in notices:
        if key in written:
            yield Problem((key,), message, hint)


def _pipeline_notices(config: ModelParallelConfig, written: Mapping[str, Any]) -> Iterator[_Notice]:
    pipeline, active, microbatches = config.pipeline_parallel_degree, config.active_microbatches, config.microbatches
    if written.get("pipeline") == "simple" and active != microbatches:
        message = f"`simple` becomes `interleaved`, as active_microbatches ({active}) differs from microbatches "
        yield "pipeline", f"{message}({microbatches})", f"set `active_microbatches: {microbatches}` to keep `simple`"
    if pipeline == 1:
        hint = "set `pipeline_parallel_degree`, or remove this key"
        yield from ((key, "has no effect: pipeline_parallel_degree is 1", hint) for key in _PIPELINE)
        return
    if microbatches == 1:
        key = "microbatches" if "microbatches" in written else "pipeline_parallel_degree"
        message = f"with one microbatch the {pipeline} pipeline ranks work one after the other"
        yield key, message, f"set `microbatches` to {pipeline} or more"
    if config.auto_partition:
        hint = "set `auto_partition: false`, or remove this key"
        yield "default_partition", "has no effect: auto_partition is on", hint
    else:
        yield "memory_weight", "has no effect: auto_partition is off", "remove it"
    if config.virtual_pipeline_degree > 1 and active < min(microbatches, 2 * pipeline):
        message = f"{active} in flight are too few for virtual stages to win much: two per pipeline rank are needed"
        yield "active_microbatches", message, "remove it, or set `virtual_pipeline_degree: 1`"
    if written.get("checkpoint_attentions"):
        message = f"is switched off: pipeline_parallel_degree is {pipeline}"
        yield "checkpoint_attentions", message, "use `smp.set_activation_checkpointing` instead"


def _other_notices(config: ModelParallelConfig, changed: frozenset[str]) -> Iterator[_Notice]:
    if not config.offload_activations:
        hint = "set `offload_activations: true`, or remove this key"
        yield "activation_loading_horizon", "has no effect without offload_activations", hint
    if not config.ddp:
        keys = ("ddp_dist_backend", *(changed & {"shard_optimizer_state"}))
        yield from ((key, "has no effect without ddp", "set `ddp: true`") for key in keys)
    if config.sharded_data_parallel_degree == 1:
        hint = "set `sharded_data_parallel_degree` above 1, or remove this key"
        yield from ((key, "has no effect without sharded data parallelism", hint) for key in _SHARDING)
    else:
        gathered = "the communication library chooses how a block is gathered"
        for key in changed & {"sdp_reduce_bucket_size"}:
            yield key, "has no effect: gradients are reduced block by block", "remove it"
        for key in changed & {"sdp_hierarchical_allgather"}:
            yield key, f"has no effect: {gathered}", "remove it"
    if config.tensor_parallel_degree == 1:
        hint = "set `tensor_parallel_degree`, or remove this key"
        for key in changed & {"prescaled_batch", "tensor_parallel_seed"}:
            yield key, "has no effect: tensor_parallel_degree is 1", hint
    for key in changed & {"fp16_params"}:
        yield key, "has no effect: fp16 replaced it in release 1.10", "use `fp16: true`"
    if config.checkpoint_attentions:  # not on a pipeline, where `_pipeline_notices` says so
        message, hint = "has no effect: whole layers are checkpointed", "use `smp.set_activation_checkpointing` instead"
        yield "checkpoint_attentions", message, hint
    for key in changed & {*INTERNAL}:
        yield key, "has no effect: it belongs to the inside of the old library", "remove it"


def microbatches_of_virtual_stages(degree: int, microbatches: int) -> int:
    """Return how many microbatches a rank holds in interleaved 1F1B: two groups, of `degree` microbatches or more."""
    return 2 * -(-microbatches // max(1, microbatches // degree))
