"""`smp.DistributedModel`: the user's model, divided, placed and replicated, with a backward that knows of microbatches.

::

    DistributedModel(module)   distribute ──► cast ──► place ──► replicate     (over a pipeline at the first step)
    @smp.step                  step_inputs ──► prepare, once ──► participants, and within them the engine

The `engine` runs the microbatches of a step, over a pipeline or here; the `participants` begin the step before it, and
end it afterwards (core/step_participants.py). State dicts are those of the user's module; state_dict.py puts them
together over ranks.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from smpkit.errors import UnsupportedError, UsageError
from smpkit.torch.core.model_hooks import ModelHooks
from smpkit.torch.core.module_call import expose_original_forwards
from smpkit.torch.core.runtime import ModuleManager, state
from smpkit.torch.core.step_participants import StepEngine, StepParticipants
from smpkit.torch.data_parallel.data_parallel import DataParallel, ReductionOptions, replicate
from smpkit.torch.memory.automatic import AutomaticActivations
from smpkit.torch.offload_model.model import OffloadModel
from smpkit.torch.offloading import Offloading, offloads
from smpkit.torch.optim.gradient_norm import clip_whole_models_with_torch
from smpkit.torch.pipeline.one_stage import OneStage
from smpkit.torch.pipeline.pipeline import Pipeline
from smpkit.torch.placement.delayed import initialize, run_deferred_loads
from smpkit.torch.placement.dtensor import local_tensor_of
from smpkit.torch.placement.measure import MeasureOptions
from smpkit.torch.placement.placement import Placement
from smpkit.torch.placement.shards import assignment_refusal, is_tp_shard, refuse_assignment, sees_scaled_batch
from smpkit.torch.placement.unwritten import UnwrittenCheck, has_remembered_weights
from smpkit.torch.precision.cast import cast_inputs, cast_model, cast_outputs, half_dtype
from smpkit.torch.recompute.api import check_checkpoint_ranks
from smpkit.torch.recompute.torch_checkpoint import patch_torch_checkpoint
from smpkit.torch.run_plan import begin_plan
from smpkit.torch.state_dict import (
    PARTIAL_KEY,
    full_model_state,
    load_model_state,
    local_state_names,
    runs_here,
)
from smpkit.torch.tensor_parallel.agreement import CallConsistencyCheck
from smpkit.torch.tensor_parallel.layers.dropout import random_number, seed_with_common_number
from smpkit.torch.tensor_parallel.module import DistributedModule
from smpkit.torch.tensor_parallel.replace import distribute
from smpkit.torch.tensor_parallel.replaced import replace_optimizer_parameters
from smpkit.torch.tensor_parallel.state_dict import with_original_names

if TYPE_CHECKING:
    from smpkit.torch.core.microbatches import MicrobatchCall, StepProgress
    from smpkit.torch.optimizer import DistributedOptimizer

__all__ = ["DistributedModel", "ModelHook"]

_log = logging.getLogger("smpkit")

ModelHook = Callable[["DistributedModel", "DistributedOptimizer | None"], object]


class DistributedModel(nn.Module):
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
        backward_passes_per_step: with `ddp`, steps between reductions (gradient accumulation). The loss is the user's
            to divide.
        average_grads_across_microbatches: False adds the gradients of microbatches instead (for summed losses).
        bucket_cap_mb: MiB of gradients that are reduced at once.
        trace_memory_usage: partition by the memory that each part leaves allocated in such a run, instead of by the
            sizes of what autograd keeps.
        broadcast_buffers: with `ddp`, copy buffers from the first replica at the start of every training step.
        gradient_as_bucket_view: accepted for compatibility, without effect.
        find_unused_parameters: accepted for compatibility; unused parameters are always found, at no cost.
        replace_at_degree_1: whether modules that are marked for tensor parallelism are replaced at degree 1, too, so
            that the model has the modules and names of higher degrees (`transformer.seq_layers`). None: only in
            scripts that import `smdistributed`, as SMP v1 did.
        fresh_weights: whether replaced modules draw new weights, as their arguments say (`initializer_range`,
            `use_normal_initialization`), instead of keeping those of the modules that they replace. None: only in
            scripts that import `smdistributed`, as SMP v1 did, there only where nothing has written the weights since
            the constructor of the replaced module, and not with `_match_weights`.

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
        bucket_cap_mb: float = 25,
        trace_memory_usage: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = False,
        find_unused_parameters: bool = False,
        replace_at_degree_1: bool | None = None,
        fresh_weights: bool | None = None,
    ) -> None:
        super().__init__()
        _check_arguments(module, trace_device, trace_execution_times, backward_passes_per_step, bucket_cap_mb)
        self.find_unused_parameters = find_unused_parameters
        self.average_grads_across_microbatches = average_grads_across_microbatches
        self._saved_random: Mapping[str, int] = {}
        self._call_check = CallConsistencyCheck()
        self._reduction = ReductionOptions(
            overlapping=overlapping_allreduce,
            passes_per_reduction=backward_passes_per_step,
            bucket_cap_bytes=int(bucket_cap_mb * 1024 * 1024),
            broadcast_buffers=broadcast_buffers,
        )
        if gradient_as_bucket_view and state.rank == 0:
            _log.info("gradient_as_bucket_view has no effect: gradients do not lie in the reduction buffers")

        # The transforms, in an order that matters: each works on what the one before it has left.
        #
        # Tensor parallelism comes first, because it replaces modules and parameters: whatever keeps one of them, such
        # as an optimizer that the script made before its model, must keep the new one.
        replaces = state.is_v1_script if replace_at_degree_1 is None else replace_at_degree_1
        module = distribute(module, at_degree_1=replaces, fresh=_has_fresh_weights(fresh_weights))
        _renew_optimizer_parameters()
        # On the classes of the modules that stay: SMP v1 scripts call `super()._orig_forward()`.
        expose_original_forwards(module)
        # Half precision comes before weights move: casting first moves half of the bytes, and masters, replicas and
        # shards are then made from the final dtypes.
        self._half_dtype = half_dtype(state.cfg)
        _cast_to_half(module)
        # Weights move when their dtypes are final. Over a pipeline they stay where they are until the first step, which
        # partitions the model.
        self.module = _place_weights(module)
        self.participants = StepParticipants()
        self.pipeline = _make_pipeline(
            module, self.participants, MeasureOptions(trace_execution_times, trace_memory_usage)
        )
        self.partitioned = self.pipeline is None
        """Whether this rank has its part: at once without a pipeline, else from the first step on."""
        self.placement = Placement(self.module)
        """Which ranks hold each parameter and what they do with it; all of a pipeline hold all until the first step."""
        # Parts begin each step in this order, and end it in reverse. Hooks come first, because they may load or change
        # weights that the others look at; and last at its end, when gradients are final.
        self._hooks = ModelHooks(self)
        self.participants.add(self._hooks)
        if state.is_v1_script:
            self.participants.add(UnwrittenCheck(module, self.holds))
        self.num_passes = self.num_backwards = 0
        """Calls with gradients while training, in steps or outside, and backwards: `check_backward` compares them."""
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

        _alias_module(module)
        refuse_assignment(module)
        self.engine: StepEngine = self.pipeline or OneStage(self.module, self.participants)
        state.model = self
        clip_whole_models_with_torch()
        if state.tp_size > 1 or replaces:
            to_original = functools.partial(with_original_names, module)
            state.module_manager = ModuleManager(((to_original, lambda values: values),))

    # --- forward and backward ----------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the user's model; outside a step this works at pipeline degree 1 only.

        With `fp16` or `bf16` it gets arguments of floating point in that precision, and what it returns is float32.
        """
        if state.step is not None:
            if self._half_dtype is None:  # the fast path: this runs for every microbatch, and `self.module` is slow
                return self._modules["module"](*args, **kwargs)  # type: ignore[misc]
        else:
            if self.pipeline is not None:
                raise UsageError(
                    "the model was called outside a step, but it lies on several pipeline ranks",
                    hint="call it inside a function decorated with @smp.step",
                )
            self._count_pass()
            number = random_number() if state.tp_size > 1 and self.training else 0
            number = self._call_check.check("the model", self._mode_text, (args, kwargs), number)
            for begin in self.participants.begin_outside_step:
                begin(self.training)
            if number:
                with seed_with_common_number(number, state.device):
                    return self._run_module(args, kwargs)
        return self._run_module(args, kwargs)

    def _run_module(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            if self._half_dtype is None:
                return self.module(*args, **kwargs)
            args, kwargs = cast_inputs((args, kwargs), self._half_dtype)
            return cast_outputs(self.module(*args, **kwargs), self._half_dtype)
        except BaseException:
            if state.step is None:
                for abandon in self.participants.abandon_forward_outside_step:
                    abandon()
            raise

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
            UsageError: outside a step, with a pipeline; or for something else than tensors.
        """
        if isinstance(tensors, torch.Tensor):
            roots: Sequence[torch.Tensor] = (tensors,)
        elif isinstance(tensors, Sequence):
            roots = tensors
        else:
            raise UsageError(f"model.backward takes a loss (a tensor) or a list of them, got {type(tensors).__name__}")
        grads = [grad_tensors] if isinstance(grad_tensors, torch.Tensor) else grad_tensors
        run = state.step
        if state.tracing:  # a trial of the step on one rank, for its costs: forward is enough
            return
        self.num_backwards += 1
        self.engine.backward(roots, grads, state.loss_scale * (1.0 if run is None else self._microbatch_scale(run)))

    # --- the life of a step ------------------------------------------------------------------------------------

    def step_inputs(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a step as every rank of a pipeline must have them (called by `@smp.step`)."""
        self._count_pass()
        if self.pipeline is None and state.tp_size == 1:
            return args, kwargs  # no other rank takes part in this rank's step
        args, kwargs = self.engine.broadcast_inputs(f"the step `{name}` ({self._mode_text})", (args, kwargs))
        # After that, because only what the first ranks of pipelines pass counts: others may pass dummies.
        self._call_check.check(f"the step `{name}`", self._mode_text, (args, kwargs))
        return args, kwargs

    def _count_pass(self) -> None:
        if self.training and torch.is_grad_enabled():
            self.num_passes += 1

    def check_backward(self, parameters: Iterable[torch.Tensor]) -> None:
        """Find scripts that do not train: an update of `parameters` after passes, without a backward or a gradient.

        A forgotten `model.backward(loss)` costs nothing but the training: losses are printed, checkpoints saved, and
        torch's optimizers skip parameters without a gradient and say nothing. Called by `DistributedOptimizer.step`.

        Raises:
            UsageError: there were passes for training, and the job's first backward is still to come.
        """
        if self.num_passes == 0 or self.num_backwards:
            return
        if any(isinstance(module, OffloadModel) for module in self.modules()):
            return  # its optimizer may have used gradients up in the backward
        own = {id(each): each for each in self.parameters()}
        known = list(parameters)
        trains = any(each.requires_grad for each in own.values()) and any(id(each) in own for each in known)
        if trains and all(each.grad is None for each in (*known, *own.values())):
            raise UsageError(
                "optimizer.step() was called after training passes, but no backward has run: no weight would change",
                hint="call `model.backward(loss)` in the function decorated with @smp.step; passes that are not for"
                " training run under `torch.no_grad()` or `model.eval()`",
            )

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
        """Return seed and step of the random streams, for a checkpoint; the same on all ranks."""
        random = self.engine.random
        if random is None:  # not made before the first step
            return self._saved_random
        return {"seed": random.seed - state.rdp_rank, "step": random.step}

    def load_random_state(self, kept: Mapping[str, int]) -> None:
        """Continue the random streams of the job that saved `random_state()`; an empty state changes nothing."""
        self._saved_random = dict(kept)
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

    def run_post_step_hooks(self) -> None:
        """Run the post-step hooks; without `@smp.step` the optimizer calls this before its step."""
        self._hooks.run(self._hooks.post_step)

    def register_post_partition_hook(self, hook: ModelHook) -> RemovableHandle:
        """Call `hook(model, optimizer)` once, after partitioning and before the next forward.

        At once if the model is partitioned already and has an optimizer, as in SMP v1.
        """
        handle = self._hooks.register(self._hooks.post_partition, hook)
        # A post-step hook may register one that loads the optimizer, for the update that follows the step.
        if self.partitioned and state.optimizer is not None:
            self._hooks.run(self._hooks.post_partition)
        return handle

    def register_post_step_hook(self, hook: ModelHook) -> RemovableHandle:
        """Call `hook(model, optimizer)` once, at the end of the next step, when gradients are final."""
        return self._hooks.register(self._hooks.post_step, hook)

    def register_comm_hook(self, state: object, callable: Callable[..., object]) -> NoReturn:  # noqa: A002 - v1's name
        """Refuse to replace the all-reduce of gradients.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "model.register_comm_hook would replace the all-reduce of gradients, which smpkit does itself",
            hint="remove it; with `fp16` or `bf16` gradients travel in half precision",
        )

    _register_comm_hook = register_comm_hook
    """Its name in SMP v1.2."""

    def join(self) -> NoReturn:
        """Refuse to go on with replicas that have run out of inputs.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "model.join() lets replicas take different numbers of steps, which smpkit does not do",
            hint="give every rank as many batches: DistributedSampler(..., drop_last=True) and"
            " DataLoader(..., drop_last=True)",
        )

    # --- names: what the model has, and what of it this rank holds -----------------------------------------------

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over all parameters under the names of the wrapped module, those of other ranks included."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over all buffers under the names of the wrapped module, those of other ranks included."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the parameters that this rank holds."""
        return (parameter for _, parameter in self.local_named_parameters())

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters that this rank holds, with their names."""
        return (pair for pair in self.module.named_parameters() if self.holds(pair[1]))

    def local_buffers(self) -> Iterator[torch.Tensor]:
        """Iterate over the buffers of the modules that this rank runs."""
        return (buffer for _, buffer in self.local_named_buffers())

    def local_named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over the buffers of the modules that this rank runs, with their names."""
        return (pair for pair in self.module.named_buffers() if runs_here(*pair, self.placement))

    def local_modules(self) -> Iterator[nn.Module]:
        """Iterate over the modules that this rank holds, and those above them."""
        return (module for _, module in self.local_named_modules())

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Iterate over the modules that this rank holds, and those above them, with their names."""
        return (
            (name, module)
            for name, module in self.module.named_modules()
            if self.placement.pp_rank_of(name) in (None, state.pp_rank)
        )

    def holds(self, parameter: torch.Tensor) -> bool:
        """Tell whether this rank holds the data of a parameter."""
        return self.placement.of(parameter).is_here

    def owns(self, parameter: torch.Tensor) -> bool:
        """Tell whether this rank keeps the optimizer's state of a parameter, or would."""
        return self.placement.of(parameter).is_owned_here

    def virtual_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters whose optimizer state this rank keeps.

        With `shard_optimizer_state` these are the parameters that this rank owns, whole; else all that it holds.
        """
        return (pair for pair in self.local_named_parameters() if self.owns(pair[1]))

    # --- names under tensor parallelism --------------------------------------------------------------------------

    def distributed_modules(self) -> Iterator[nn.Module]:
        """Iterate over the tensor-parallel modules."""
        return (module for module in self.module.modules() if isinstance(module, DistributedModule))

    def is_distributed_parameter(self, parameter: nn.Parameter) -> bool:
        """Tell whether a parameter is this rank's piece of a larger one."""
        return is_tp_shard(parameter)

    def is_distributed_buffer(self, buffer: torch.Tensor) -> bool:
        """Tell whether a buffer is this rank's piece of a larger one."""
        return is_tp_shard(buffer)

    def is_scaled_batch_parameter(self, parameter: nn.Parameter) -> bool:
        """Tell whether one backward gives a parameter the samples of all tensor-parallel ranks."""
        return sees_scaled_batch(parameter)

    def is_scaled_batch_buffer(self, buffer: torch.Tensor) -> bool:
        """Tell whether a buffer sees the samples of all tensor-parallel ranks."""
        return sees_scaled_batch(buffer)

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters whose gradients are reduced over DP_GROUP."""
        return (pair for pair in self.module.named_parameters() if not sees_scaled_batch(pair[1]))

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters whose gradients are reduced over RDP_GROUP."""
        return (pair for pair in self.module.named_parameters() if sees_scaled_batch(pair[1]))

    # --- state dicts ---------------------------------------------------------------------------------------------

    def state_dict(  # type: ignore[override]
        self, *args: Any, gather_to_rank0: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """Return the whole model's state under the names of its modules; all ranks that hold a model call this.

        Modules that tensor parallelism has replaced have names of their own: `original_state_dict` gives the user's.

        Args:
            gather_to_rank0: give every rank of the model but the first an empty dict, to save memory.
        """
        run_deferred_loads()
        local: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        prefix: str = kwargs.get("prefix", "")
        return full_model_state(
            self.module, local, self._partitioned_names(), prefix=prefix, gather_to_rank0=gather_to_rank0
        )

    def original_state_dict(self, *, gather_to_rank0: bool = False) -> dict[str, Any]:
        """Return the whole model's state under the names it had before tensor parallelism replaced modules.

        Parts whose translation is not known keep the names of `state_dict()`. All ranks that hold a model call this.

        Args:
            gather_to_rank0: as for `state_dict`.
        """
        return with_original_names(self.module, self.state_dict(gather_to_rank0=gather_to_rank0))

    def local_state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state, plus `_smp_is_partial` = True."""
        run_deferred_loads()
        held = local_state_names(self.module, self.placement)
        own = {name: local_tensor_of(value) for name, value in self.module.state_dict().items() if name in held}
        return {**own, PARTIAL_KEY: True}

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], strict: bool = True, same_partition_load: bool = False, **kwargs: Any
    ) -> Any:
        """Load a full or partial state dict; for a partial one all ranks of a pipeline call this.

        Of whole tensors each rank takes its piece. A full dict under the names that modules had before tensor
        parallelism replaced them is translated, unless it has the key `_smp_is_partial`. The optimizer's master
        weights follow.

        Args:
            strict: raise if names do not match, as `nn.Module.load_state_dict` does.
            same_partition_load: promise that a partial dict comes from this very partition, so it needs no merging.

        Raises:
            UnsupportedError: with `assign=True`, which would put tensors in the place of parameters that the optimizer
                and data parallelism know.
        """
        if kwargs.get("assign"):
            raise assignment_refusal()
        run_deferred_loads()
        result = load_model_state(
            self.module,
            state_dict,
            self._partitioned_names(),
            strict=strict,
            same_partition_load=same_partition_load,
            has_pipeline=self.pipeline is not None,
            **kwargs,
        )
        # Else the optimizer's next step would overwrite what was loaded, from masters of the old weights.
        if state.optimizer is not None:
            state.optimizer.refresh_masters()
        return result

    def _partitioned_names(self) -> set[str] | None:
        """Return the names of the entries of `state_dict()` that this rank holds; None if those are all."""
        if self.pipeline is None or not self.partitioned:
            return None
        return local_state_names(self.module, self.placement)

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

    def get_module(self) -> nn.Module:
        """Return the user's model, under all wrappers."""
        return self.module

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

    def _microbatch_scale(self, run: StepProgress) -> float:
        return 1.0 / run.num_microbatches if self.average_grads_across_microbatches else 1.0


# --- the transforms of `DistributedModel.__init__` --------------------------------------------------------------------


def _has_fresh_weights(asked: bool | None) -> Callable[[nn.Module], bool]:
    """Return what tells whether a module that is replaced is to draw new weights."""
    if asked is None and state.is_v1_script and not state.cfg.match_weights:
        return has_remembered_weights
    return lambda _: bool(asked)


def _renew_optimizer_parameters() -> None:
    """Give an optimizer that was made before the model the parameters that tensor parallelism has made."""
    if state.optimizer is not None:
        replace_optimizer_parameters(state.optimizer.optimizer)


def _cast_to_half(module: nn.Module) -> None:
    dtype = half_dtype(state.cfg)
    if dtype is not None:
        # Sharded data parallelism keeps its weights in float32 as their own masters, and casts a block as it is used.
        cast_model(module, dtype, weights=not _shards_data())


def _place_weights(module: nn.Module) -> nn.Module:
    """Give delayed parameters their memory and move the module to this rank's device, unless another part does so.

    Over a pipeline that is the first step, when each rank knows its part; and sharded data parallelism moves one block
    at a time, so that the whole model never needs to fit the device.
    """
    if state.pp_size > 1 or _shards_data():
        return module
    initialize(module, list(module.parameters()), state.device, torch.initial_seed())
    return module.to(state.device)


def _make_pipeline(module: nn.Module, participants: StepParticipants, measured: MeasureOptions) -> Pipeline | None:
    if state.pp_size == 1:
        return None
    return Pipeline(module, participants, measured, _prepare_checkpointing)


def _shards_data() -> bool:
    return state.cfg.sharded_data_parallel_degree > 1


def _prepare_checkpointing(root: nn.Module, placement: Mapping[str, int]) -> None:
    """Check and patch activation checkpointing once it is known which rank runs which module."""
    check_checkpoint_ranks(root, placement)
    patch_torch_checkpoint()


def _alias_module(module: nn.Module) -> None:
    """Let `model.module.module` reach the user's model, also under a wrapper of the user's own.

    SMP v1 had a wrapper more or less from version to version, with `ddp` and with `fp16`, and public scripts count the
    hops of theirs. Wrappers keep their place in the chain, and its end has one hop more::

        model ─► FP16Module ─► GPT2 ─► the same GPT2        `.module` at each arrow

    A plain attribute, past nn.Module's registration, keeps that hop out of the module tree and `state_dict()`.
    """
    while isinstance(inner := module._modules.get("module"), nn.Module):
        module = inner
    if not hasattr(module, "module"):
        object.__setattr__(module, "module", _LastHop(module))


class _LastHop:
    """Stands for a module in everything but that it has no `.module`: functions that unwrap a model end there."""

    def __init__(self, module: nn.Module) -> None:
        object.__setattr__(self, "_same", module)

    @property  # type: ignore[misc]  # which `isinstance` reads
    def __class__(self) -> Any:
        return type(self._same)

    def __getattr__(self, name: str) -> Any:
        if name in ("module", "_same"):
            raise AttributeError(name)
        return getattr(self._same, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._same, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._same(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _LastHop, (self._same,)


# --- what the constructor refuses -------------------------------------------------------------------------------------


def _check_arguments(
    module: nn.Module, trace_device: str, trace_execution_times: bool, backward_passes: int, bucket_cap_mb: float
) -> None:
    """Refuse a model or an option of `smp.DistributedModel` that cannot work.

    Raises:
        UsageError: it is no module, wrapped already, a lazy one without shapes, or an option is out of its range.
        UnsupportedError: an OffloadModel in it does not go with the configuration.
    """
    if not isinstance(module, nn.Module):
        raise UsageError(f"DistributedModel wraps a torch.nn.Module, got {type(module).__name__}")
    if isinstance(module, DistributedModel):
        raise UsageError("this model is a DistributedModel already", hint="wrap a model once")
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise UsageError(
            "this model is wrapped in DistributedDataParallel", hint="pass the plain model and set `ddp: True`"
        )
    if state.model is not None:
        raise UsageError(
            "there is a DistributedModel already, and a script has one",
            hint="put all models that are trained together into one torch.nn.Module",
        )
    for name, each in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(each):
            raise UsageError(
                f"`{name}` has no shape yet: its module is a lazy one",
                hint="call the model once with a batch, on all ranks with the same seed, before it is wrapped",
            )
    for part in module.modules():
        if isinstance(part, OffloadModel):
            _check_offload_model()
    if trace_device not in ("gpu", "cpu"):
        raise UsageError(f"trace_device must be one of `gpu`, `cpu`, got `{trace_device}`")
    if trace_device == "cpu" and trace_execution_times:
        raise UsageError(
            "trace_execution_times measures on the GPU, but trace_device is `cpu`",
            hint="pass trace_device='gpu' or trace_execution_times=False",
        )
    if backward_passes < 1:
        raise UsageError(f"backward_passes_per_step must be at least 1, got {backward_passes}")
    if bucket_cap_mb <= 0:
        raise UsageError(f"bucket_cap_mb must be more than 0, got {bucket_cap_mb}")


def _check_offload_model() -> None:
    cfg = state.cfg
    if state.dp_size > 1:
        raise UnsupportedError(
            "there is an OffloadModel in this model, whose gradients a DistributedModel cannot average",
            hint="give OffloadModel(..., process_group=smp.get_dp_process_group()), and do not wrap it",
        )
    if state.pp_size > 1 or state.tp_size > 1 or cfg.sharded_data_parallel_degree > 1 or half_dtype(cfg) is not None:
        raise UnsupportedError(
            "there is an OffloadModel in this model, which moves its own weights: in a DistributedModel it works on one"
            " rank only",
            hint="remove pipeline, tensor and sharded data parallelism, fp16 and bf16, or use the plain model",
        )
