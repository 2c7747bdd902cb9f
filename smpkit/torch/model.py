"""`smp.DistributedModel`: the user's model, divided, placed and replicated, with a backward that knows of microbatches.

::

    DistributedModel(module)   distribute ──► cast ──► place ──► replicate     (over a pipeline at the first step)
    @smp.step                  step_inputs ──► prepare, once ──► participants, and within them the engine

The `engine` runs the microbatches of a step, over a pipeline or here; the `participants` begin the step before it, and
end it afterwards (core/step_participants.py). Iterators over what ranks hold, and state dicts: model_parts.py.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from smpkit.errors import UsageError
from smpkit.plan.mesh import CommGroup
from smpkit.torch.amp import refuse_torchs_scaler
from smpkit.torch.core.arguments import check_callable
from smpkit.torch.core.microbatches import MicrobatchCall, StepProgress
from smpkit.torch.core.module_call import expose_original_forwards
from smpkit.torch.core.runtime import ModuleManager, WrappedOptimizer, state
from smpkit.torch.core.step_participants import StepParticipant, StepParticipants
from smpkit.torch.data_parallel.data_parallel import DataParallel, ReductionOptions, replicate
from smpkit.torch.memory.automatic import AutomaticActivations
from smpkit.torch.model_checks import (
    check_arguments,
    check_trains,
    refuse_comm_hook,
    refuse_gradients_beyond_step,
    refuse_join,
    refuse_layers_dropped_by_rank,
    refuse_parameters_beyond_model,
    refuse_updates_in_half,
    refuse_what_one_rank_trains,
    watch_users_model,
)
from smpkit.torch.model_parts import ModelParts, alias_module
from smpkit.torch.offloading import Offloading, offloads
from smpkit.torch.optim.gradient_norm import clip_whole_models_with_torch, end_accumulation_before
from smpkit.torch.pipeline.one_stage import OneStage
from smpkit.torch.pipeline.pipeline import Pipeline
from smpkit.torch.placement.delayed import initialize, run_deferred_loads
from smpkit.torch.placement.placement import Placement
from smpkit.torch.precision.cast import cast_inputs, cast_model, cast_outputs, half_dtype
from smpkit.torch.recompute.api import check_checkpoint_ranks
from smpkit.torch.recompute.torch_checkpoint import patch_torch_checkpoint
from smpkit.torch.run_plan import begin_plan
from smpkit.torch.tensor_parallel.agreement import CallConsistencyCheck, common_seed
from smpkit.torch.tensor_parallel.dropout import random_number, seed_with_common_number
from smpkit.torch.tensor_parallel.replace import distribute, refuse_replaced_parameters
from smpkit.torch.tensor_parallel.state_dict import with_original_names

_log = logging.getLogger("smpkit")

ModelHook = Callable[["DistributedModel", WrappedOptimizer | None], object]
_Registry = OrderedDict[int, ModelHook]


class DistributedModel(ModelParts):
    """Wrap a model for training under an SMP v1 configuration (the class of the same name in SMP v1).

    The module is moved to this rank's device and made equal on all data-parallel ranks. Names in `state_dict()`,
    `named_parameters()` and their like are the user's own, without a prefix.

    Under tensor parallelism, modules that were marked (see `smp.tensor_parallelism`) are replaced in place at once:
    parameters are then pieces of what they were, so the optimizer is made afterwards.

    Args:
        module: the model; the same on every rank.
        trace_device: "gpu" or "cpu", where a tracing pass runs; nothing is traced at pipeline degree 1.
        trace_execution_times: partition by the time that each part's forward takes, instead of by its operations;
            needs `trace_device="gpu"`, and uses the CPU where there is no GPU. The first rank runs the whole model for
            one microbatch, a few times, when the first step begins, and decides for all ranks.
        overlapping_allreduce: with `ddp`, reduce gradients while backward runs; else when the step is over.
        backward_passes_per_step: with `ddp`, steps between reductions (gradient accumulation); an optimizer's step or
            clipping before then reduces, too. The loss is the user's to divide.
        average_grads_across_microbatches: False adds the gradients of microbatches instead (for summed losses).
        bucket_cap_mb: MiB of gradients that are reduced at once; None, torch's default, is 25.
        trace_memory_usage: accepted for compatibility; what each part keeps is computed from shapes.
        broadcast_buffers: with `ddp`, copy buffers from the first replica at the start of every training step.
        gradient_as_bucket_view: accepted for compatibility, without effect.
        find_unused_parameters: accepted for compatibility; unused parameters are always found, at no cost.
        replace_at_degree_1: whether modules that are marked for tensor parallelism are replaced at degree 1, too, so
            that the model has the modules and names of higher degrees (`transformer.seq_layers`). None: only in
            scripts that import `smdistributed`, as SMP v1 did.
        fresh_weights: whether replaced modules draw new weights, as their arguments say (`initializer_range`,
            `use_normal_initialization`), instead of keeping those of the modules that they replace. None: only in
            scripts that import `smdistributed`, as SMP v1 did, there only where no weights were loaded
            (`from_pretrained`, `load_state_dict`), and not with `_match_weights`.

    Raises:
        UsageError: before `smp.init()`, a second model, a wrapped model, or an argument out of its range.
    """

    def __init__(
        self,
        module: nn.Module,
        trace_device: str = "gpu",
        trace_execution_times: bool = False,
        overlapping_allreduce: bool = True,
        backward_passes_per_step: int = 1,
        average_grads_across_microbatches: bool = True,
        bucket_cap_mb: float | None = 25,
        trace_memory_usage: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = False,
        find_unused_parameters: bool = False,
        replace_at_degree_1: bool | None = None,
        fresh_weights: bool | None = None,
    ) -> None:
        super().__init__()
        check_arguments(
            module, trace_device, trace_execution_times, trace_memory_usage, backward_passes_per_step, bucket_cap_mb
        )
        self._degrees = f"pipeline {state.pp_size} × tensor {state.tp_size} × data {state.rdp_size}"
        self.find_unused_parameters = find_unused_parameters
        self.average_grads_across_microbatches = average_grads_across_microbatches
        self._saved_random: Mapping[str, int] = {}
        self._call_check = CallConsistencyCheck()
        self._reduction = ReductionOptions(
            overlapping=overlapping_allreduce,
            passes_per_reduction=backward_passes_per_step,
            bucket_cap_bytes=int((bucket_cap_mb or 25) * 1024 * 1024),
            broadcast_buffers=broadcast_buffers,
        )
        if gradient_as_bucket_view and state.rank == 0:
            _log.info("gradient_as_bucket_view has no effect: gradients do not lie in the reduction buffers")

        # The transforms, in an order that matters: each works on what the one before it has left.
        #
        # Tensor parallelism comes first, because it replaces modules and parameters: whatever keeps one of them must
        # keep the new one.
        replaces = state.is_v1_script if replace_at_degree_1 is None else replace_at_degree_1
        module = distribute(module, at_degree_1=replaces, fresh_weights=fresh_weights)
        if state.optimizer is not None:
            refuse_replaced_parameters(state.optimizer.optimizer)
        # On the classes of the modules that stay: SMP v1 scripts call `super()._orig_forward()`.
        expose_original_forwards(module)
        # Half precision comes before weights move: casting first moves half of the bytes, and masters, replicas and
        # shards are then made from the final dtypes.
        self._half_dtype, shards = half_dtype(state.cfg), state.cfg.sharded_data_parallel_degree > 1
        if self._half_dtype is not None:
            # Weights of sharded data parallelism stay float32, as their own masters; it casts a block as it is used.
            cast_model(module, self._half_dtype, weights=not shards)
        # Delayed weights get their memory, and all move to the device, when their dtypes are final. Over a pipeline
        # that is in the first step, when each rank knows its part; sharded data parallelism moves one block at a time,
        # so that the whole model never needs to fit the device.
        if state.pp_size == 1 and not shards:
            initialize(module, list(module.parameters()), state.device, common_seed())
            module = module.to(state.device)
        self.module = module
        self.participants = StepParticipants()
        self.pipeline: Pipeline | None = None
        if state.pp_size > 1:
            self.pipeline = Pipeline(module, self.participants, trace_execution_times, _prepare_checkpointing)
        self.partitioned = self.pipeline is None
        self.placement = Placement(self.module)
        # Parts begin each step in this order, and end it in reverse. Hooks come first, because they may load or change
        # weights that the others look at; and last at its end, when gradients are final.
        self._hooks = _Hooks(self)
        self.participants.add(self._hooks)
        self._counts = {"passes": 0, "backwards": 0}  # not attributes, which nn.Module sets slowly
        """Calls with gradients while training, in steps or outside, and backwards: `check_update` compares them."""
        self.offloading = Offloading(self.module) if offloads() else None
        if self.offloading is not None:
            self.participants.add(self.offloading)
        self.activations = AutomaticActivations(self, None if self.offloading is None else self.offloading.engine)
        self.participants.add(self.activations)
        # Replicas come last: they are compared and copied where the weights will stay. `prepare` does it for a
        # pipeline.
        self.data_parallel: DataParallel | None = None
        if self.pipeline is None:
            self._replicate()
        self.is_prepared = False
        """Whether the engine is ready, from the first step on."""

        alias_module(module)
        watch_users_model(module)
        self.engine: Pipeline | OneStage = self.pipeline or OneStage(self.module, self.participants)
        state.model = self
        _adapt_torch(module, accumulates=backward_passes_per_step > 1)
        if state.tp_size > 1 or replaces:
            to_original = functools.partial(with_original_names, module)
            state.module_manager = ModuleManager(((to_original, lambda values: values),))

    def __repr__(self) -> str:
        return f"DistributedModel({type(self.module).__name__}, {self._degrees})"  # its layers: `print(model.module)`

    # --- forward and backward ----------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the user's model; outside a step this works at pipeline degree 1 only.

        With `fp16` or `bf16` it gets arguments of floating point in that precision, and what it returns is float32.
        """
        if state.step is None:
            return self._forward_outside_step(args, kwargs)
        if self._half_dtype is None:  # the fast path: this runs for every microbatch, and `self.module` is slow
            return self._modules["module"](*args, **kwargs)  # type: ignore[misc]
        return self._run_module(args, kwargs)

    def _forward_outside_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.pipeline is not None:
            raise UsageError(
                "the model was called outside a step, but it lies on several pipeline ranks",
                hint="call it inside a function decorated with @smp.step",
            )
        self._count_pass()
        number = random_number() if state.tp_size > 1 and self.training else 0
        if number and self._counts["passes"] <= 1:
            refuse_layers_dropped_by_rank(self.module)
        number = self._call_check.check("the model", self._mode_text, (args, kwargs), number)
        for begin in self.participants.begin_outside_step:
            begin(self.training)
        try:
            with seed_with_common_number(number, state.device) if number else contextlib.nullcontext():
                return self._run_module(args, kwargs)
        except BaseException:
            for abandon in self.participants.abandon_forward_outside_step:
                abandon()
            raise

    def _run_module(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._half_dtype is None:
            return self.module(*args, **kwargs)
        args, kwargs = cast_inputs((args, kwargs), self._half_dtype)
        return cast_outputs(self.module(*args, **kwargs), self._half_dtype)

    def backward(
        self,
        tensors: torch.Tensor | Sequence[torch.Tensor],
        grad_tensors: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        """Run backward from `tensors`, as `torch.autograd.backward` does, for the current microbatch.

        Inside a step, gradients are scaled so that the step's result is the average over microbatches (or the sum, with
        `average_grads_across_microbatches=False`). With `fp16` they are multiplied with the optimizer's loss scale too,
        which its step takes out again.

        Raises:
            UsageError: outside a step, with a pipeline; for something else than tensors, or not a gradient for each.
        """
        if isinstance(tensors, torch.Tensor):
            roots: Sequence[torch.Tensor] = (tensors,)
        elif isinstance(tensors, Sequence):
            roots = tensors
        else:
            raise UsageError(f"model.backward takes a loss (a tensor) or a list of them, got {type(tensors).__name__}")
        grads: Sequence[torch.Tensor | None] = (None,) * len(roots)
        if grad_tensors is not None:
            grads = (grad_tensors,) if isinstance(grad_tensors, torch.Tensor) else grad_tensors
        if len(grads) != len(roots):
            raise UsageError(
                f"model.backward was given {len(roots)} tensors and {len(grads)} gradients",
                hint="give `grad_tensors` one for each tensor: None for a scalar, to start with 1",
            )
        run = state.step
        if state.tracing:  # a trial of the step on one rank, for its costs: forward is enough
            return
        self._counts["backwards"] += 1
        share = 1.0 / run.num_microbatches if run is not None and self.average_grads_across_microbatches else 1.0
        self.engine.backward(roots, grads, state.loss_scale * share)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the parameters' gradients; see `torch.nn.Module.zero_grad`."""
        state.refuse_inside_step("model.zero_grad")
        super().zero_grad(set_to_none)

    # --- the life of a step ------------------------------------------------------------------------------------

    def step_inputs(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a step as every rank of a pipeline must have them (called by `@smp.step`)."""
        self._count_pass()
        if self.pipeline is None and state.tp_size == 1:
            return args, kwargs  # no other rank takes part in this rank's step
        if self.pipeline is not None:
            if self.training and torch.is_grad_enabled():
                refuse_gradients_beyond_step(name, (args, kwargs))
            args, kwargs = self.pipeline.broadcast_inputs(f"the step `{name}` ({self._mode_text})", (args, kwargs))
        # After that, because only what the first ranks of pipelines pass counts: others may pass dummies.
        self._call_check.check(f"the step `{name}`", self._mode_text, (args, kwargs))
        return args, kwargs

    def _count_pass(self) -> None:
        if self.training and torch.is_grad_enabled():
            self._counts["passes"] += 1

    def check_update(self, parameters: Sequence[torch.Tensor]) -> None:
        """Raise UsageError if an update of `parameters` would not be training (called by the optimizer)."""
        if self._counts["passes"] and not self._counts["backwards"]:
            check_trains(self, parameters)
        batches = state.rdp_size if state.cfg.prescaled_batch else state.dp_size
        if self.pipeline is not None or batches > 1:
            refuse_parameters_beyond_model(self.placement, parameters)

    def prepare(self, function: Callable[..., Any], first: MicrobatchCall) -> None:
        """Prepare for the first step (called by `@smp.step`); over a pipeline, partition the model."""
        placement = self.engine.prepare(function, first)
        self.is_prepared = True
        self._restore_random()
        if placement is not None:
            # What the constructor does last without a pipeline, now that ranks know their parts. All of it is
            # collective, so every rank of the pipeline runs this in its first step.
            self.placement = placement
            self.partitioned = True
            self._replicate()
            if state.optimizer is not None:
                state.optimizer.drop_foreign_states()
            # Checkpoints that were loaded before the partition are read now, each rank its part. Masters follow the
            # weights, so they come last.
            run_deferred_loads()
            if state.optimizer is not None:
                state.optimizer.refresh_masters()
        begin_plan(self)

    def random_state(self) -> Mapping[str, int]:
        """Return seed and step of the random streams, for a checkpoint; the same on all ranks of a pipeline.

        It is the same on all replicas, too, unless the script has seeded them apart.
        """
        random = self.engine.random
        if random is None:  # the first step makes them
            return self._saved_random
        return {"seed": random.seed - state.rdp_rank, "step": random.step}

    def load_random_state(self, kept: Mapping[str, int]) -> None:
        """Continue the random streams of the job that saved these `random_state()`; an empty state changes nothing."""
        own = {"seed": kept.get(replica_seed(state.rdp_rank), kept["seed"]), "step": kept["step"]} if kept else {}
        self._saved_random = own
        self._restore_random()

    def _restore_random(self) -> None:
        random = self.engine.random
        if random is not None and self._saved_random:
            random.seed, random.step = self._saved_random["seed"] + state.rdp_rank, self._saved_random["step"]
            self._saved_random = {}

    def activation_choices(self) -> dict[str, str]:
        """Return what each layer of this rank does with its activations: `keep`, `offload` or `recompute`.

        Of layers with `strategy="auto"`, and with `offload_activations: auto` of all that are checkpointed; by their
        names in the model. Empty before the first step that trains.
        """
        return {name: str(choice) for name, choice in self.activations.choices.items()}

    @property
    def _mode_text(self) -> str:
        gradients = "with" if torch.is_grad_enabled() else "without"
        return f"{'training' if self.training else 'evaluation'}, {gradients} gradients"

    # --- hooks -------------------------------------------------------------------------------------------------

    def register_post_partition_hook(self, hook: ModelHook) -> RemovableHandle:
        """Call `hook(model, optimizer)` once, after partitioning and before the next forward.

        At once if the model is partitioned already and has an optimizer, as in SMP v1.
        """
        handle = _register(self._hooks.post_partition, hook)
        # A post-step hook may register one that loads the optimizer, for the update that follows the step.
        if self.partitioned and state.optimizer is not None:
            self._hooks.run(self._hooks.post_partition)
        return handle

    def register_post_step_hook(self, hook: ModelHook) -> RemovableHandle:
        """Call `hook(model, optimizer)` once, at the end of the next step, when gradients are final."""
        return _register(self._hooks.post_step, hook)

    def run_post_step_hooks(self) -> None:
        """Run the post-step hooks; without `@smp.step` the optimizer calls this before its step."""
        self._hooks.run(self._hooks.post_step)

    register_comm_hook = _register_comm_hook = refuse_comm_hook  # the second is its name in SMP v1.2
    join = refuse_join

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes, which `copy.deepcopy` and `torch.save` copy; on a single rank only.

        Raises:
            UsageError: the model has a pipeline or replicas.
        """
        if self.pipeline is not None or self.data_parallel is not None:
            raise UsageError(
                "a DistributedModel was copied or pickled, but it is one with the connections to other ranks",
                hint="save `model.state_dict()`; for an average of weights keep copies of `model.local_parameters()`",
            )
        return self.__dict__

    # --- inside ------------------------------------------------------------------------------------------------

    def _replicate(self) -> None:
        """Make this rank's part equal to its replicas', and set up what averages its gradients."""
        if state.cfg.sharded_data_parallel_degree > 1:
            from smpkit.torch.data_parallel.sharded import shard_model  # torch's fully_shard takes a second to load

            self.data_parallel = shard_model(self.module, self.placement, self._reduction)
            self.placement = Placement(self.module)  # of the parts, which have taken the parameters' places
            if state.optimizer is not None:
                self.data_parallel.replace_parameters_of(state.optimizer)
        else:
            self.data_parallel = replicate(self.module, self.placement, self._reduction)
        if self.data_parallel is not None:
            self.participants.add(self.data_parallel)


def replica_seed(rdp_rank: int) -> str:
    """Return under which name a checkpoint has the seed of a replica that the script has seeded apart."""
    return f"seed of replica {rdp_rank}"


class _Hooks(StepParticipant):
    """The hooks that scripts register: each is called once, with the model and its optimizer."""

    def __init__(self, model: DistributedModel) -> None:
        self._model = model
        self.post_partition: _Registry = OrderedDict()
        self.post_step: _Registry = OrderedDict()

    def run(self, registry: _Registry) -> None:
        """Call the hooks of one kind, and forget them; one may register another."""
        while registry:
            registry.popitem(last=False)[1](self._model, state.optimizer)

    def begin_step(self, step: StepProgress) -> None:
        self.run(self.post_partition)

    def begin_outside_step(self, training: bool) -> None:
        self.run(self.post_partition)

    def end_step(self, step: StepProgress) -> None:
        self.run(self.post_step)


def _register(registry: _Registry, hook: ModelHook) -> RemovableHandle:
    check_callable("a hook", hook)
    handle = RemovableHandle(registry)
    registry[handle.id] = hook
    return handle


def _adapt_torch(module: nn.Module, *, accumulates: bool) -> None:
    """Adapt or refuse what torch would compute from this rank's part alone, or wait for on ranks that never come."""
    clip_whole_models_with_torch(accumulates=accumulates)
    refuse_torchs_scaler()
    if accumulates:
        state.reset_hooks.append(register_optimizer_step_pre_hook(end_accumulation_before).remove)
    if half_dtype(state.cfg) is not None and state.cfg.sharded_data_parallel_degree == 1:
        state.reset_hooks.append(register_optimizer_step_pre_hook(refuse_updates_in_half).remove)
    if state.pp_size > 1:
        state.reset_hooks.append(register_optimizer_step_pre_hook(refuse_what_one_rank_trains).remove)
        for part in module.modules():
            # By default it waits for all ranks of the job, of which other stages run other layers.
            if isinstance(part, nn.SyncBatchNorm) and part.process_group is None:
                part.process_group = state.process_group(CommGroup.DP_GROUP)


def _prepare_checkpointing(root: nn.Module, placement: Mapping[str, int]) -> None:
    """Check and patch activation checkpointing once it is known which rank runs which module."""
    check_checkpoint_ranks(root, placement)
    patch_torch_checkpoint()
