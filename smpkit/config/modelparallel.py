"""SMP v1's configuration: every parameter of the PyTorch library, with its own name, default, bounds and rules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self, TypedDict

from pydantic import Field, ValidationError, field_validator
from pydantic_core.core_schema import ValidationInfo

from smpkit.config import rules
from smpkit.config.documents import strict_json
from smpkit.config.section import Section, explain, instead, validated
from smpkit.config.words import quoted, suggestion, typed
from smpkit.errors import ConfigError, Problem

__all__ = [
    "ENVIRONMENT_VARIABLE",
    "HISTORIC",
    "TENSORFLOW_DEFAULTS",
    "V2_KEYS",
    "ModelParallelConfig",
    "ModelParallelParameters",
]

ENVIRONMENT_VARIABLE = "SM_HP_MP_PARAMETERS"
"""Where SageMaker's containers hand the parameters to the script, as JSON."""

_DEGREE = "pipeline_parallel_degree"
_ALIAS = "partitions"
_VIRTUAL = "virtual_pipeline_degree"

HISTORIC: Mapping[str, str] = {
    "deterministic_server": "smpkit has no server: every rank follows the same static schedule",
    "overlapping_allreduce": "it is an argument of `smp.DistributedModel` now",
    "trace_device": "it is an argument of `smp.DistributedModel` now",
    "use_times": "partitions are decided by estimated costs, which do not change between runs",
}
"""Keys of early releases that mean nothing as parameters any more: key -> where the meaning went."""


V2_KEYS: Mapping[str, str] = {
    "hybrid_shard_degree": "use `sharded_data_parallel_degree`, where 1 means no sharding",
    "sm_activation_offloading": "use `offload_activations`, which is off by default",
    "fsdp_cache_flush_warnings": "there is no FSDP allocator to warn about; remove it",
    "allow_empty_shards": "empty shards are always allowed; remove it",
    "context_parallel_degree": "v1 has no context parallelism; remove it",
    "expert_parallel_degree": "v1 has no expert parallelism; remove it",
    "random_seed": "use `tensor_parallel_seed`",
}
"""Keys that only SMP v2 has, and what to do; `tensor_parallel_degree` and `activation_loading_horizon` are in both."""

TENSORFLOW_DEFAULTS: Mapping[str, bool] = {"horovod": False, "contiguous": True}
"""Keys of the TensorFlow library; a spelled-out default of theirs changes nothing and is let pass."""

# Keys that name how the library works inside; v1 left them out of the list it logged.
_INTERNAL = frozenset(
    {"load_partition", "partition_file", "checkpoint_attentions", "static_mode", "fast_mode", "herring"}
)


def _active_microbatches(data: Mapping[str, Any]) -> int:
    """Two more than the pipeline is deep, or what virtual stages need, clamped. A wrong value is missing here."""
    degree: int = data.get(_DEGREE, 1)
    microbatches: int = data.get("microbatches", 1)
    needed = rules.microbatches_of_virtual_stages(degree, microbatches) if data.get(_VIRTUAL, 1) > 1 else 0
    return max(1, min(max(degree + 2, needed), microbatches))


class ModelParallelConfig(Section):
    """The parameters of SageMaker's model-parallel library v1 for PyTorch, as in `smp.init(config)`.

    Types are strict, as in v1: `true` is not an integer, `"4"` neither, but an integer is fine where a number is asked.
    """

    pipeline_parallel_degree: int = Field(default=1, ge=1)
    """Number of pipeline partitions: how many ranks a model is cut over. `partitions` is its older name."""

    microbatches: int = Field(default=1, ge=1)
    """Number of microbatches that a batch is split into; the batch size must be divisible by it. 1 = no pipelining."""

    virtual_pipeline_degree: int = Field(default=1, ge=1)
    """Number of chunks of the model that each pipeline rank holds (virtual stages). An extension of smpkit.

    The model is cut into `virtual_pipeline_degree × pipeline_parallel_degree` parts, and part k is on pipeline rank
    k mod `pipeline_parallel_degree`: filling the pipeline takes that much less time, and more messages are sent.
    """

    active_microbatches: int = Field(default_factory=_active_microbatches, ge=1)
    """Most microbatches in flight. Default: `pipeline_parallel_degree + 2`, at most `microbatches`.

    With virtual stages it is `2 × pipeline_parallel_degree` (more where that does not divide `microbatches`), which
    their order needs.
    """

    pipeline: Literal["simple", "interleaved", "zero_bubble", "_only_forward"] = "interleaved"
    """Schedule: `simple` = all forwards, then all backwards; `interleaved` = a backward as soon as one is possible.

    `zero_bubble`, an extension of smpkit, is `interleaved` with the backward split in two where that is faster: the
    gradients of inputs, for which other ranks wait, first, and those of weights later, where the rank would be idle.
    `_only_forward`, v1's undocumented third value, is for evaluation: `model.backward` is an error. `simple` becomes
    `interleaved` where `active_microbatches` differs from `microbatches`, as in v1.
    """

    ddp: bool = False
    """Data parallelism, process groups, tensor parallelism and sharded data parallelism; off: none of them."""

    ddp_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the rendezvous. Default: `MASTER_PORT`. Requires `ddp`."""

    ddp_dist_backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Backend of torch.distributed: `auto` takes nccl with GPUs and gloo without.

    v1 had `nccl` as the default before release 1.13 and documented `auto` since. `gloo` is an extension of smpkit.
    """

    tensor_parallel_degree: int = Field(default=1, ge=1)
    """Number of ranks that distributed modules are split over. Above 1 requires `ddp`."""

    prescaled_batch: bool = False
    """The ranks of a tensor-parallel group get the same batch, already enlarged."""

    optimize: Literal["speed", "memory"] = Field(
        default_factory=lambda data: "speed" if data.get("prescaled_batch") else "memory"
    )
    """How transformer layers are distributed by tensor parallelism.

    With `speed` the ranks of a tensor-parallel group hold the same values between layers, so there are fewer messages;
    with `memory` no rank holds what another does. v1 refused `memory` with `prescaled_batch`;
    here it divides sequences.

    Sources disagree on the default: v1's schema said `speed`, its documentation `memory`, which is taken here, except
    that `prescaled_batch` without `optimize` means `speed`: published configurations rely on it.
    """

    memory_weight: float = Field(
        default_factory=lambda data: 0.2 if data.get("optimize") == "speed" else 0.8, ge=0.0, le=1.0
    )
    """Weight of memory balance against compute balance in automatic partitioning: 0 = only compute, 1 = only memory.

    Default: 0.2 if `optimize` is `speed`, else 0.8, as documented (v1's schema said 0.8 always).
    """

    auto_partition: bool = True
    """Cut the model automatically, ignoring `smp.partition` contexts. False requires `default_partition`."""

    default_partition: int = Field(default=0, ge=0)
    """Partition of modules in no `smp.partition` context, if `auto_partition` is false.

    Default 0, as documented (v1's schema had none).
    """

    placement_strategy: Literal["cluster", "spread", "DPT", "DTP", "PDT", "PTD", "TDP", "TPD"] = "cluster"
    """Which ranks are neighbours: the right-most letter varies fastest over the global ranks.

    D = reduced data parallel, P = pipeline, T = tensor; `cluster` = `DPT`, `spread` = `TPD`. (The SageMaker SDK refuses
    the letters, the library never did.)
    """

    offload_activations: Annotated[bool | Literal["auto"], instead("must be `true`, `false` or `auto`")] = False
    """Move the activations of checkpointed layers to host memory until backward needs them.

    `auto` is an extension of smpkit: only of those layers where that is faster than what else fits, by times and bytes
    that the first steps measure. On a CPU it offloads nothing.
    """

    memory_budget_gib: float | None = Field(default=None, gt=0)
    """What everything on a rank's device may take where layers are chosen for, in GiB. An extension of smpkit.

    Read with `strategy="auto"` of `smp.set_activation_checkpointing` and with `offload_activations: auto`. None: 95 %
    of the device; ranks on CPUs share the memory of their host.
    """

    activation_loading_horizon: Annotated[
        Annotated[int, Field(ge=1)] | Literal["auto"], instead("must be an integer of at least 1, or `auto`")
    ] = 4
    """How many pipeline tasks ahead of its backward an offloaded activation is brought back; at least 1.

    `auto` is an extension of smpkit: as far ahead as the measured speeds ask for.
    """

    shard_offloaded_activations: bool = Field(default=True, alias="_shard_offloaded_activations")
    """Internal to v1: shard offloaded activations over the tensor-parallel ranks."""

    fp16: bool = False
    """Train in float16 with float32 master weights and a loss scale. Not with `bf16`."""

    fp16_params: bool = False
    """Create the parameters of distributed modules in float16; replaced by `fp16` in release 1.10."""

    bf16: bool = False
    """Train in bfloat16 with float32 master weights; v1 has it with sharded data parallelism only. Not with `fp16`."""

    fp32_grad_accumulation: bool = Field(default=False, alias="_fp32_grad_accumulation")
    """Internal to v1: accumulate gradients of float16 parameters in float32. Requires `fp16` or `fp16_params`."""

    shard_optimizer_state: bool = False
    """Every data-parallel rank keeps and updates its share of the optimizer state. Requires `ddp` to have an effect."""

    skip_tracing: bool = False
    """Partition without a tracing pass."""

    tensor_parallel_seed: int = Field(default=0, ge=0)
    """Seed of the random numbers of tensor parallelism: initialisation and dropout of distributed modules."""

    delayed_parameter_initialization: bool = False
    """Create parameters without memory and fill them where they belong, after partitioning."""

    sharded_data_parallel_degree: int = Field(default=1, ge=1)
    """Number of ranks that parameters, gradients and optimizer state are sharded over. Above 1 requires `ddp`.

    It must divide the data-parallel size, excludes a pipeline and `shard_optimizer_state`, and with tensor parallelism
    requires `prescaled_batch`.
    """

    sdp_reduce_bucket_size: int = Field(default=500_000_000, ge=1)
    """Sharded data parallelism: size of the reduce buckets, in elements. No effect: a block is reduced at once."""

    sdp_param_persistence_threshold: int = Field(default=1_000_000, ge=0)
    """Sharded data parallelism: blocks with fewer elements stay gathered from forward to backward."""

    sdp_max_live_parameters: int = Field(default=1_000_000_000, ge=1)
    """Sharded data parallelism: warn where more gathered elements than this are alive at a time."""

    sdp_hierarchical_allgather: bool = True
    """Sharded data parallelism: gather within a host first. No effect: the communication library chooses."""

    sdp_gradient_clipping: float = Field(default=1.0, ge=0.0)
    """Sharded data parallelism: global L2 norm that `optimizer.step()` clips gradients to; 0 does not clip."""

    load_partition: bool = False
    """Internal to v1: reuse a saved partition decision."""

    partition_file: str | None = None
    """Internal to v1: the file of the saved partition decision."""

    checkpoint_attentions: bool = False
    """Internal to v1: checkpoint only the attention blocks of distributed transformers. Off with a pipeline."""

    match_weights: bool = Field(default=False, alias="_match_weights")
    """In scripts of v1: distributed modules keep the weights of the originals instead of drawing fresh ones."""

    static_mode: bool = False
    """Internal to v1, and without effect here: schedules are always static."""

    fast_mode: bool = False
    """Internal to v1, and without effect here: values always go straight to the rank that needs them."""

    herring: bool = False
    """Internal to v1, and without effect here: another data-parallel back end. Not with `ddp`."""

    timeout_seconds: int = Field(default=600, ge=1)
    """Deadline of every collective and every wait between ranks, in seconds. An extension of smpkit."""

    refused: ClassVar[Mapping[str, tuple[str, str]]] = {
        key: ("is unknown to v1", f"a key of SMP v2: {what_to_do}") for key, what_to_do in V2_KEYS.items()
    }

    @field_validator("pipeline", mode="after")
    @classmethod
    def _interleave_if_not_all_are_active(cls, value: str, info: ValidationInfo) -> str:
        differ = info.data.get("active_microbatches") != info.data.get("microbatches")
        return "interleaved" if value == "simple" and differ else value

    @field_validator("checkpoint_attentions", mode="after")
    @classmethod
    def _not_in_a_pipeline(cls, value: bool, info: ValidationInfo) -> bool:
        return value and info.data.get(_DEGREE) == 1

    @classmethod
    def spelled_out(cls, data: Any) -> Any:
        """Fold the alias `partitions` into `pipeline_parallel_degree`, and leave out what v1 had dropped."""
        if not isinstance(data, Mapping):
            return data
        folded = {key: value for key, value in data.items() if key not in HISTORIC and not _is_tensorflow(key, value)}
        if _ALIAS in folded and (_DEGREE not in folded or _same(folded[_DEGREE], folded[_ALIAS])):
            folded[_DEGREE] = folded.pop(_ALIAS)
        return folded

    @classmethod
    def as_written(cls, problem: Problem, data: Any) -> Problem:
        """Tell a problem of the degree as one of `partitions` to who wrote that."""
        if problem.path[:1] == (_DEGREE,) and _DEGREE not in data and _ALIAS in data:
            return replace(problem, path=(_ALIAS, *problem.path[1:]))
        return problem

    @classmethod
    def unknown(cls, name: str, data: Mapping[Any, Any]) -> Problem:
        """Refuse TensorFlow's parameters by name, and an alias that contradicts."""
        if name == _ALIAS:
            degree = quoted(data[_DEGREE])
            message = f"is {quoted(data[_ALIAS])}, but {_DEGREE}, which it is the older name of, is {degree}"
            return Problem((name,), message, "remove one of them")
        if name in TENSORFLOW_DEFAULTS:
            return Problem((name,), "belongs to the TensorFlow library; smpkit is for PyTorch", "remove it")
        if name in cls.refused:
            return super().unknown(name, data)
        return Problem((name,), "unknown field", suggestion(name, [*cls.keys(), _ALIAS]))

    @classmethod
    def further_problems(cls, data: Mapping[str, Any], problems: Sequence[Problem]) -> Iterable[Problem]:
        """Judge the rules between the other parameters, so that a user sees all problems at once."""
        wrong = {str(problem.path[0]) for problem in problems if problem.path}
        if not wrong & data.keys():
            return
        try:
            cls.model_validate({key: value for key, value in data.items() if key not in wrong})
        except ValidationError as error:
            for problem in explain(error):
                names = set(re.findall(r"\w+", f"{problem.message} {problem.hint}"))
                if problem not in problems and not wrong & names:
                    yield problem

    def broken_rules(self) -> Iterable[Problem]:
        """Apply v1's rules between parameters."""
        return rules.broken_rules(self)

    def values(self) -> dict[str, Any]:
        """Every v1 key with its effective value, internal keys included."""
        return self.model_dump()

    def effective(self) -> dict[str, object]:
        """The v1 keys and values to log as `Configuration parameters:`, that is without internal keys."""
        return {key: value for key, value in self.values().items() if not key.startswith("_") and key not in _INTERNAL}

    def given(self) -> dict[str, Any]:
        """The v1 keys that were set explicitly, with their effective values."""
        return self.model_dump(exclude_unset=True)

    def world_problems(self, world_size: int) -> list[Problem]:
        """Say which degrees do not fit into `world_size` ranks; the paths start at the parameters."""
        return rules.world_problems(self, world_size)

    def notices(self, raw: Mapping[str, Any]) -> list[Problem]:
        """Say which settings in `raw`, what the user wrote, have no effect or another one than they say."""
        notices = [self.as_written(problem, raw) for problem in rules.unused_settings(self, self.spelled_out(raw))]
        notices += [Problem((key,), f"means nothing: {HISTORIC[key]}", "remove it") for key in raw if key in HISTORIC]
        message = "means nothing to PyTorch: it belongs to the TensorFlow library"
        return notices + [Problem((key,), message, "remove it") for key in raw if key in TENSORFLOW_DEFAULTS]

    @classmethod
    def from_sources(
        cls, config: Mapping[str, Any] | ModelParallelConfig | None, environment_json: str | None
    ) -> tuple[Self, list[Problem]]:
        """Combine what a script says with what the job says, and return the configuration and its notices.

        Args:
            config: the argument of `smp.init`, a mapping or a configuration.
            environment_json: the content of SM_HP_MP_PARAMETERS; its keys overwrite those of `config` one by one.

        Raises:
            ConfigError: with all problems, each named by its key.
        """
        raw = _from_script(config) | _from_environment(environment_json)
        made = validated(cls, raw, subject="modelparallel parameters")
        return made, made.notices(raw)


class ModelParallelParameters(TypedDict, total=False):
    """The same parameters as keys of a dict, for editors and type checkers; `ModelParallelConfig` explains them."""

    partitions: int
    pipeline_parallel_degree: int
    microbatches: int
    virtual_pipeline_degree: int
    active_microbatches: int
    pipeline: Literal["simple", "interleaved", "zero_bubble", "_only_forward"]
    ddp: bool
    ddp_port: int | None
    ddp_dist_backend: Literal["auto", "nccl", "gloo"]
    tensor_parallel_degree: int
    prescaled_batch: bool
    optimize: Literal["speed", "memory"]
    memory_weight: float
    auto_partition: bool
    default_partition: int
    placement_strategy: Literal["cluster", "spread", "DPT", "DTP", "PDT", "PTD", "TDP", "TPD"]
    offload_activations: bool | Literal["auto"]
    memory_budget_gib: float | None
    activation_loading_horizon: int | Literal["auto"]
    _shard_offloaded_activations: bool
    fp16: bool
    fp16_params: bool
    bf16: bool
    _fp32_grad_accumulation: bool
    shard_optimizer_state: bool
    skip_tracing: bool
    tensor_parallel_seed: int
    delayed_parameter_initialization: bool
    sharded_data_parallel_degree: int
    sdp_reduce_bucket_size: int
    sdp_param_persistence_threshold: int
    sdp_max_live_parameters: int
    sdp_hierarchical_allgather: bool
    sdp_gradient_clipping: float
    load_partition: bool
    partition_file: str | None
    checkpoint_attentions: bool
    _match_weights: bool
    static_mode: bool
    fast_mode: bool
    herring: bool
    timeout_seconds: int


def _same(one: object, other: object) -> bool:
    # Types too, since `True == 1`; and only integers, since `==` of anything else may do anything.
    return type(one) is type(other) is int and one == other


def _is_tensorflow(key: object, value: object) -> bool:
    return isinstance(key, str) and key in TENSORFLOW_DEFAULTS and value is TENSORFLOW_DEFAULTS[key]


def _from_script(config: object) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, ModelParallelConfig):
        return config.given()
    if isinstance(config, Mapping):
        return dict(config)
    problem = Problem((), f"must be a mapping of parameters, got {typed(config)}")
    raise ConfigError([problem], subject="modelparallel parameters")


def _from_environment(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    value = strict_json(text, ENVIRONMENT_VARIABLE)
    if not isinstance(value, dict):
        problem = Problem((), f"must be a JSON object, got {quoted(value)}")
        raise ConfigError([problem], subject=ENVIRONMENT_VARIABLE)
    return value
