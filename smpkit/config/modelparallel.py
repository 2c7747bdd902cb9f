"""SMP v1's configuration: every parameter of the PyTorch library, with its own name, default, bounds and rules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator
from pydantic_core.core_schema import ValidationInfo

from smpkit.config import rules
from smpkit.config.documents import strict_json
from smpkit.config.section import RIGHT_FIELDS, Section, instead, validated
from smpkit.config.words import quoted, suggestion, typed
from smpkit.errors import ConfigError, Problem

Pipeline = Literal["simple", "interleaved", "zero_bubble", "_only_forward"]
"""The schedules; `smpkit.plan.decide.Policy.schedule` makes each."""

ENVIRONMENT_VARIABLE = "SM_HP_MP_PARAMETERS"
"""Where SageMaker's containers hand the parameters to the script, as JSON."""

_DEGREE = "pipeline_parallel_degree"
_ALIAS = "partitions"

HISTORIC: Mapping[str, str] = {
    "deterministic_server": "smpkit has no server",
    "overlapping_allreduce": "it is an argument of `smp.DistributedModel` now",
    "trace_device": "it is an argument of `smp.DistributedModel` now",
    "use_times": "partitions are decided by estimated costs",
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


def _active_microbatches(data: Mapping[str, Any]) -> int:
    """Two more than the pipeline is deep, or what virtual stages need, clamped. A wrong value is missing here."""
    degree: int = data.get(_DEGREE, 1)
    microbatches: int = data.get("microbatches", 1)
    needed = (
        rules.microbatches_of_virtual_stages(degree, microbatches) if data.get("virtual_pipeline_degree", 1) > 1 else 0
    )
    return max(1, min(max(degree + 2, needed), microbatches))


class ModelParallelConfig(Section):
    """The parameters of SMP v1 for PyTorch, as in `smp.init(config)`.

    Types are strict, as in v1: `true` and `"4"` are no integers. Keys that v1 lacks are marked *smpkit's own*;
    `sdp_` stands for sharded data parallelism.
    """

    pipeline_parallel_degree: int = Field(default=1, ge=1, le=1024)
    """How many pipeline ranks the model is cut over."""

    microbatches: int = Field(default=1, ge=1, le=4096)
    """How many microbatches a batch is split into; must divide the batch size. 1: no pipelining."""

    virtual_pipeline_degree: int = Field(default=1, ge=1, le=1024)
    """How many chunks of the model each pipeline rank holds (virtual stages). *smpkit's own.*

    The pipeline fills that much faster, and sends that many more messages.
    """

    active_microbatches: int = Field(default_factory=_active_microbatches, ge=1)
    """Most microbatches in flight. Default: `pipeline_parallel_degree + 2`, at most `microbatches`.

    With virtual stages: `2 × pipeline_parallel_degree`, more where that does not divide `microbatches`.
    """

    pipeline: Pipeline = "interleaved"
    """Schedule. `simple`: all forwards, then all backwards; `interleaved`: each backward as soon as possible.

    `zero_bubble` (*smpkit's own*): `interleaved`, with gradients of weights later than those of inputs where that is
    faster. `_only_forward`: for evaluation; `model.backward` is an error. As in v1, `simple`
    becomes `interleaved` where `active_microbatches` differs from `microbatches`.
    """

    ddp: bool = False
    """Data parallelism. Tensor parallelism, sharded data parallelism and process groups need it."""

    ddp_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the rendezvous. Default: `MASTER_PORT`. Requires `ddp`."""

    ddp_dist_backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Backend of torch.distributed: `auto` takes nccl with GPUs, gloo without.

    `gloo` is *smpkit's own*.
    """

    tensor_parallel_degree: int = Field(default=1, ge=1, le=1024)
    """How many ranks divided modules are split over. Above 1 requires `ddp`."""

    prescaled_batch: bool = False
    """The ranks of a tensor-parallel group get one common batch."""

    # v1's documentation says `memory`, its schema `speed`, on which published prescaled configurations rely.
    optimize: Literal["speed", "memory"] = Field(
        default_factory=lambda data: "speed" if data.get("prescaled_batch") else "memory"
    )
    """What tensor-parallel ranks hold between transformer layers.

    `speed`: the same values, with fewer messages; `memory`: no two ranks the same values. v1 refused `memory` with
    `prescaled_batch`; here it divides sequences. Default: `memory`, but `speed` with `prescaled_batch`.
    """

    # As v1's documentation says; its schema had 0.8 always.
    memory_weight: float = Field(
        default_factory=lambda data: 0.2 if data.get("optimize") == "speed" else 0.8, ge=0.0, le=1.0
    )
    """What automatic partitioning balances: 0: compute only, 1: memory only.

    Default: 0.2 with `optimize: speed`, else 0.8.
    """

    auto_partition: bool = True
    """Cut the model automatically and ignore `smp.partition`. False requires `default_partition`."""

    default_partition: int = Field(default=0, ge=0)
    """Partition of modules outside of `smp.partition`, if `auto_partition` is false."""

    placement_strategy: Literal["cluster", "spread", "DPT", "DTP", "PDT", "PTD", "TDP", "TPD"] = "cluster"
    """Which ranks are neighbours: the right-most letter varies fastest over the global ranks.

    D: reduced data parallel, P: pipeline, T: tensor; `cluster`: `DPT`, `spread`: `TPD`. SageMaker's SDK refuses the
    letters; v1 did not.
    """

    offload_activations: Annotated[bool | Literal["auto"], instead("must be `true`, `false` or `auto`")] = False
    """Move what checkpointed layers keep to host memory until backward needs it.

    `auto` (*smpkit's own*): only of the layers for which that is the fastest way to fit, as the first steps measure; on
    a CPU, of none.
    """

    memory_budget_gib: float | None = Field(default=None, gt=0)
    """Memory that a rank may take on its device, in GiB. *smpkit's own.*

    Read with `offload_activations: auto` and `strategy="auto"` of `smp.set_activation_checkpointing`. Default: 95 % of
    the device; ranks on CPUs share their host's memory.
    """

    activation_loading_horizon: Annotated[
        Annotated[int, Field(ge=1)] | Literal["auto"], instead("must be an integer of at least 1, or `auto`")
    ] = 4
    """At most how many pipeline tasks before its backward an offloaded activation is loaded.

    `auto` (*smpkit's own*): as early as measured speeds require.
    """

    shard_offloaded_activations: bool = Field(default=True, alias="_shard_offloaded_activations")
    """Internal to v1. No effect."""

    fp16: bool = False
    """Train in float16 with float32 master weights and a loss scale. Not with `bf16`."""

    fp16_params: bool = False
    """No effect: `fp16` replaced it in release 1.10."""

    bf16: bool = False
    """Train in bfloat16 with float32 master weights; in v1 only with sharded data parallelism. Not with `fp16`."""

    fp32_grad_accumulation: bool = Field(default=False, alias="_fp32_grad_accumulation")
    """Internal to v1. No effect. Requires `fp16` or `fp16_params`."""

    shard_optimizer_state: bool = False
    """Each data-parallel rank keeps and updates a share of the optimizer state. No effect without `ddp`."""

    skip_tracing: bool = False
    """Partition by sizes of parameters, without tracing a step."""

    tensor_parallel_seed: int = Field(default=0, ge=0)
    """Seed for initialisation and dropout of divided modules."""

    delayed_parameter_initialization: bool = False
    """Create parameters in `smp.model_creation()` without memory, and fill each on its rank."""

    sharded_data_parallel_degree: int = Field(default=1, ge=1)
    """How many ranks parameters, gradients and optimizer state are sharded over. Above 1 requires `ddp`.

    Must divide the data-parallel size; excludes pipelines and `shard_optimizer_state`; with tensor parallelism,
    requires `prescaled_batch`.
    """

    sdp_reduce_bucket_size: int = Field(default=500_000_000, ge=1)
    """Elements of a reduce bucket. No effect: a block is reduced at once."""

    sdp_param_persistence_threshold: int = Field(default=1_000_000, ge=0)
    """Blocks of fewer elements stay gathered from forward to backward."""

    sdp_max_live_parameters: int = Field(default=1_000_000_000, ge=1)
    """Warn if more elements are gathered at a time."""

    sdp_hierarchical_allgather: bool = True
    """Gather within a host first. No effect: NCCL chooses."""

    sdp_gradient_clipping: float = Field(default=1.0, ge=0.0)
    """L2 norm that `optimizer.step()` clips to; 0 does not clip."""

    load_partition: bool = False
    """Internal to v1. No effect."""

    partition_file: str | None = None
    """Internal to v1. No effect."""

    checkpoint_attentions: bool = False
    """Internal to v1. No effect: use `smp.set_activation_checkpointing`."""

    match_weights: bool = Field(default=False, alias="_match_weights")
    """In v1's scripts: divided modules keep the original weights instead of drawing new ones."""

    static_mode: bool = False
    """Internal to v1. No effect."""

    fast_mode: bool = False
    """Internal to v1. No effect."""

    herring: bool = False
    """Internal to v1. No effect. Not with `ddp`."""

    timeout_seconds: int = Field(default=600, ge=1)
    """Deadline of every wait between ranks, in seconds. *smpkit's own.*"""

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
        """Report a problem of the degree as one of `partitions`, where that is what the user wrote."""
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
        wrong = {str(problem.path[0]) for problem in problems}
        for problem in cls.model_validate(data, context=RIGHT_FIELDS).broken_rules():
            if not wrong & {*re.findall(r"\w+", f"{problem.message} {problem.hint}")}:
                yield problem

    def broken_rules(self) -> Iterable[Problem]:
        """Apply v1's rules between parameters."""
        return rules.broken_rules(self)

    def effective(self) -> dict[str, object]:
        """The v1 keys and values to log as `Configuration parameters:`: like v1, without internal keys."""
        internal = {"_match_weights", "checkpoint_attentions", *rules.INTERNAL}
        return {key: value for key, value in self.model_dump().items() if key not in internal}

    def given(self) -> dict[str, Any]:
        """The v1 keys that were set explicitly, with their effective values."""
        return self.model_dump(exclude_unset=True)

    def world_problems(self, world_size: int) -> list[Problem]:
        """Say which degrees do not fit into `world_size` ranks; the paths start at the parameters."""
        pipeline, tensor = self.pipeline_parallel_degree, self.tensor_parallel_degree
        start = "`smpkit run --ranks {0}`, `torchrun --nproc-per-node {0}`"
        hint = f"start a multiple of {{0}} ranks ({start}), or lower the degree"
        if world_size % (pipeline * tensor):
            key, degree = (_DEGREE, pipeline) if pipeline > 1 else ("tensor_parallel_degree", tensor)
            message = f"must divide the number of ranks ({world_size}), got {degree}"
            if pipeline > 1 and tensor > 1:
                message = f"times tensor_parallel_degree {message} × {tensor} = {pipeline * tensor}"
            return [Problem((key,), message, hint.format(pipeline * tensor))]
        sharding, replicas = self.sharded_data_parallel_degree, world_size // (pipeline * tensor)
        if replicas % sharding:
            size = "data-parallel size" if tensor == 1 else f"number of replicas of {tensor} tensor-parallel ranks"
            message = f"must divide the {size} ({replicas}), got {sharding}"
            return [Problem(("sharded_data_parallel_degree",), message, hint.format(sharding * tensor))]
        return []

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
        subject = "modelparallel parameters"
        parameters = config.given() if isinstance(config, ModelParallelConfig) else {} if config is None else config
        raw = _mapping(parameters, "a mapping", subject)
        if environment_json is not None:
            raw |= _mapping(strict_json(environment_json, ENVIRONMENT_VARIABLE), "a JSON object", ENVIRONMENT_VARIABLE)
        combined = validated(cls, raw, subject=subject)
        return combined, combined.notices(raw)


def _same(one: object, other: object) -> bool:
    # Types too, since `True == 1`; and only integers, since `==` of anything else may do anything.
    return type(one) is type(other) is int and one == other


def _is_tensorflow(key: object, value: object) -> bool:
    return isinstance(key, str) and key in TENSORFLOW_DEFAULTS and value is TENSORFLOW_DEFAULTS[key]


def _mapping(value: object, kind: str, subject: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError([Problem((), f"must be {kind} of parameters, got {typed(value)}")], subject=subject)
    return dict(value)
