"""`smp.DistributedOptimizer`: a real `torch.optim.Optimizer` around the user's."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from smpkit.errors import UnsupportedError, UsageError
from smpkit.torch.core.runtime import state
from smpkit.torch.data_parallel.sharded_parameters import flat_shards
from smpkit.torch.data_parallel.state_sharding import Zero1Partition
from smpkit.torch.optim.gradient_norm import clip_grad_norm_, end_accumulation
from smpkit.torch.optim.master_weights import MasterWeights
from smpkit.torch.placement.delayed import run_deferred_loads
from smpkit.torch.placement.shards import is_tp_shard, shard_of
from smpkit.torch.precision.cast import half_dtype
from smpkit.torch.precision.loss_scale import StaticLossScaler, loss_scaler_of
from smpkit.torch.recording.recorder import timed_optimizer
from smpkit.torch.state_dict import (
    PARTIAL_KEY,
    gather_all,
    gather_by_rdp_rank,
    gather_owned,
    marked,
    merge_on_all_ranks,
    merge_shards,
    refuse_missing_stages,
    stage_mark,
    to_local,
    to_parts,
    to_whole,
    unmarked,
)
from smpkit.torch.tensor_parallel.replace import refuse_replaced_parameters

_OF_ALL: Final = re.compile("LBFGS|Prodigy|DAdapt.*|.*SAM")
"""The names of rules that go by a norm or a sum over all parameters, which they add up themselves."""
_SWITCHES: Final = frozenset({"train", "eval"})
"""Methods by which optimizers without a schedule go to the weights that they train or evaluate, and back."""
_OF_MATRICES: Final = re.compile(
    ".*AGC|Adafactor(BigVision)?|AdamP|Kron|LARS|Lamb|Lars|MARS|Mars|Muon|(Nv)?NovoGrad|SGDP|SOAP|Shampoo"
)
"""Rules, of torch, timm and others, in which the update of an element depends on its row, column or whole matrix."""
_OF_MATRICES_IF_SET: Final = ("caution", "cautious", "clipping_threshold", "update_proj_gap")
"""Settings by which any rule does: it divides by the mean of a mask, or by an RMS (timm, pytorch_optimizer), or
projects matrices to a low rank (GaLore, APOLLO)."""
_IN_BACKWARD: Final = re.compile("(Ada)?Lomo|LayerWiseDummyOptimizer")
"""Rules that update each weight once backward has its gradient."""
_AROUND: Final = ("optimizer", "base_optimizer", "_base_optimizer")
"""Where a rule around another one (Lookahead) keeps that."""
_NAMES_OF_SET_TO_NONE: Final = ("set_grads_to_None", "set_grads_to_none")


class DistributedOptimizer(torch.optim.Optimizer):
    """Wrap an optimizer for training under an SMP v1 configuration (the class of the same name in SMP v1).

    It is the optimizer inside in every respect but those that it adds: both share `param_groups` and `state`, so
    learning-rate schedulers, gradient scalers and hooks may be given either; methods, arguments and attributes that are
    not its own are those of the optimizer inside, also when they are set. It may be made before or after the model is
    wrapped, and may wrap any object that has `param_groups`, `state`, `step` and `zero_grad`: a script's own optimizer
    for half precision keeps its master weights, its loss scale and its members of these names.

    With `fp16` or `bf16` the `param_groups` hold float32 master weights from the first step on (see
    `smpkit.torch.optim.master_weights`). With `fp16` the loss has a scale, and all ranks skip the `step` if a gradient
    is not finite: `overflow` is then true, and learning-rate schedulers are not to be stepped. `loss_scale`,
    `loss_scaler`, `fp16_groups` and `fp32_from_fp16_groups` are v1's names for what the master weights have.

    Args:
        optimizer: the optimizer to wrap.
        static_loss_scale: the loss scale, if it is not dynamic; None is 1. Acts with `fp16` only, like the others.
        dynamic_loss_scale: find the scale while training.
        dynamic_loss_args: those of `smpkit.torch.precision.loss_scale.DynamicLossScaler`, as one dict
            `dynamic_loss_args=` (as scripts for SMP v1 pass them) or each by its name.

    Raises:
        UsageError: before `smp.init()`, for something that is no optimizer, or an invalid loss scale.
        UnsupportedError: for one that needs all parameters, where a rank has some.
    """

    masters: MasterWeights | None = None
    """The float32 weights behind a model in half precision; None without `fp16` and `bf16`."""
    _norm: float | None = None
    _loaded_early = False
    """Whether states of some ranks were loaded before anyone knew the owners of parameters."""

    # False even if the optimizer inside has it: a GradScaler would write `grad_scale` on this object, unseen in there.
    _step_supports_amp_scaling = False

    def __init__(
        self,
        optimizer: Any,
        static_loss_scale: float | None = 1.0,
        dynamic_loss_scale: bool = False,
        **dynamic_loss_args: Any,
    ) -> None:
        # torch.optim.Optimizer.__init__ is left out: it would make param_groups and state of its own, and a scheduler
        # that holds this object would change the learning rate of a copy.
        _check(optimizer)
        scaler, half = loss_scaler_of(static_loss_scale, dynamic_loss_scale, dynamic_loss_args), half_dtype(state.cfg)
        if half is torch.bfloat16:
            scaler = StaticLossScaler()
        self.optimizer = optimizer
        _replace_parameters_of(optimizer)
        self.masters = None if half is None else MasterWeights(optimizer, half, scaler)
        state.optimizer = self

    _is_accelerate_prepared = True
    """Keeps accelerate from wrapping it once more, which would hide the methods that SMP v1 added."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was left out because gradients had overflowed (accelerate's name for it)."""
        return bool(getattr(self, "overflow", False))

    def __setattr__(self, name: str, value: Any) -> None:
        own = vars(self)
        is_own = "optimizer" not in own or name in own or hasattr(type(self), name)
        part = None if is_own else self._part_with(name)
        if part is None:
            object.__setattr__(self, name, value)
        else:
            setattr(part, name, value)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # copy and pickle look for methods before __init__ has run: an endless recursion
            raise AttributeError(name)
        if name == "fp16_groups" and state.cfg.sharded_data_parallel_degree > 1:
            # All of them, in any precision: a part in float32 is its own master weight.
            return [[self.model_parameter(param) for param in group["params"]] for group in self.param_groups]
        part = self._part_with(name)
        value = getattr(self.optimizer if part is None else part, name)
        return functools.partial(self._switch, value) if name in _SWITCHES and callable(value) else value

    def _switch(self, switch: Callable[[], Any]) -> Any:
        """Let an optimizer without a schedule change the weights, and bring them where an update brings them."""
        result = switch()
        if self.masters is not None:
            self.masters.copy_to_model()
        if (zero1 := _zero1_partition()) is not None:
            zero1.broadcast_updated()
        return result

    def _part_with(self, name: str) -> Any:
        """Return the master weights or the optimizer inside, whichever has a member of this name first; else None."""
        parts = (None if name.startswith("_") else self.masters, self.optimizer)
        return next((part for part in parts if part is not None and hasattr(part, name)), None)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "masters": self.masters}

    def __setstate__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)

    @timed_optimizer
    def step(self, closure: Callable[[], float] | None = None, **options: Any) -> Any:
        """Update this rank's parameters; with `fp16`, unless a gradient of any rank is not finite.

        All ranks call this. Sharded data parallelism clips their gradients to `sdp_gradient_clipping` first.

        Args:
            options: further arguments of the optimizer inside.

        Raises:
            UsageError: a closure with `fp16` or `bf16`, or no backward has run yet after passes for training.
        """
        state.refuse_inside_step("optimizer.step")
        _refuse_accumulating()
        if state.model is not None:
            state.model.check_update(self._model_parameters())
            end_accumulation()
            state.model.run_post_step_hooks()
        if state.optimizer is not self:
            state.has_several_optimizers = True
            if self.masters is not None:
                raise UsageError(
                    "this is not the optimizer that was wrapped last: with `fp16` and `bf16` the loss scale of that one"
                    " holds for all, and clipping and loaded weights reach no other",
                    hint="wrap one optimizer with a parameter group for each part; what has no gradient is not updated",
                )
        if self.masters is not None and closure is not None:
            raise UsageError(
                "optimizer.step was given a closure, which does not go with master weights",
                hint="run backward before it, and call it without arguments",
            )
        if state.cfg.sharded_data_parallel_degree > 1 and state.cfg.sdp_gradient_clipping > 0:
            if closure is None:
                self._clip(state.cfg.sdp_gradient_clipping)
            else:
                closure = self._clip_after(closure, state.cfg.sdp_gradient_clipping)
        self._refuse_pieces()
        zero1 = _zero1_partition()
        with (
            contextlib.nullcontext() if zero1 is None else zero1.hide_unowned_gradients(),
            self._holding_hooks() as hooks,
        ):
            if self.masters is not None:
                result = self.masters.step(functools.partial(self.optimizer.step, **options))
            else:
                arguments = () if closure is None else (closure,)
                result = self.optimizer.step(*arguments, **options)
        if self.masters is None or not self.masters.overflow:
            if zero1 is not None:
                zero1.broadcast_updated()
            for hook in hooks:
                hook(self.optimizer, (), options)
        return result

    def _refuse_pieces(self) -> None:
        """Refuse a rule that looks at whole matrices where this rank has pieces."""
        rules = _rules_of(self.optimizer)
        # Torch gathers the matrices of sharded data parallelism for Muon, and cannot do so for any Adafactor.
        divides = state.cfg.sharded_data_parallel_degree > 1 and "Adafactor" in rules
        sets = next((name for name in _OF_MATRICES_IF_SET for group in self.param_groups if group.get(name)), None)
        looks = sets is not None or any(map(_OF_MATRICES.fullmatch, rules))
        if looks and (divides or any(map(is_tp_shard, self._model_parameters()))):
            raise UnsupportedError(
                f"{type(self.optimizer).__name__}{f' with `{sets}`' if sets else ''} looks at whole matrices, of which"
                f" a rank of {'sharded data' if divides else 'tensor'} parallelism has pieces",
                hint="use another optimizer, or a degree of 1",
            )

    @contextlib.contextmanager
    def _holding_hooks(self) -> Iterator[list[Callable[..., Any]]]:
        """Keep post-hooks of the step until the model has the new weights, which they read or change; yield them."""
        hooks = getattr(self.optimizer, "_optimizer_step_post_hooks", {})
        held = dict(hooks) if self.masters is not None or _zero1_partition() is not None else {}
        for number in held:
            del hooks[number]
        try:
            yield list(held.values())
        finally:
            hooks.update(held)

    def zero_grad(self, set_to_none: bool = True, **options: Any) -> None:
        """Clear the gradients of this rank's parameters.

        Args:
            set_to_none: also by the names that optimizers for half precision give it, `set_grads_to_None` and
                `set_grads_to_none`.
            options: further arguments of the optimizer inside.
        """
        state.refuse_inside_step("optimizer.zero_grad")
        for name in _NAMES_OF_SET_TO_NONE:
            set_to_none = options.pop(name, set_to_none)
        method = self.optimizer.zero_grad
        own_name = _name_of_set_to_none(getattr(method, "__func__", method))
        method(**({} if own_name is None else {own_name: set_to_none}), **options)
        if self.masters is not None:
            self.masters.zero_grad(set_to_none)

    # --- half precision ----------------------------------------------------------------------------------------------

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Clip the norm of all gradients of the whole model, before `step`; all ranks call this.

        With `fp16` and `bf16` these are the unscaled float32 gradients of the master weights.

        Returns:
            The norm before clipping; -1 where a gradient is not finite (the step will be skipped).
        """
        if self.masters is None:
            inside = getattr(self.optimizer, "clip_master_grads", None)  # a script's own half-precision optimizer
            if inside is not None:
                return float(inside(max_norm, norm_type))
        return self._clip(max_norm, norm_type)

    def _clip_after(self, closure: Callable[[], float], max_norm: float) -> Callable[[], float]:
        def clipped() -> float:
            loss = closure()
            self._clip(max_norm)
            return loss

        return clipped

    def _clip(self, max_norm: float, norm_type: float = 2.0) -> float:
        norm = float(clip_grad_norm_(self._model_parameters(), max_norm, norm_type))
        self._norm = -1.0 if self.masters is not None and self.masters.overflow else norm
        return self._norm

    @property
    def _global_grad_norm(self) -> float | None:
        """The norm of the whole model's gradient before it was last clipped, under the name by which scripts log it."""
        return getattr(self.optimizer, "_global_grad_norm", None) if self._norm is None else self._norm

    def init_master_params(self, *args: Any, **kwargs: Any) -> Any:
        """Make the master weights now; without this call they are made when they are first needed."""
        if self.masters is not None:
            self.masters.create_missing()
            return None
        own = getattr(self.optimizer, "init_master_params", None)  # of a script's own optimizer for half precision
        return None if own is None else own(*args, **kwargs)

    def reload_model_params(self, *args: Any, **kwargs: Any) -> Any:
        """Copy the model's weights into the master weights, after the script has changed them itself.

        The next step does it, too, and so does `model.load_state_dict`.
        """
        if self.masters is not None:
            self.masters.copy_from_model()
            return None
        own = getattr(self.optimizer, "reload_model_params", None)
        return None if own is None else own(*args, **kwargs)

    def refresh_masters(self) -> None:
        """Copy weights that were loaded into the model into their masters (called by `model.load_state_dict`)."""
        if self.masters is not None:
            self.masters.copy_from_model()

    def scale_for_backward(self) -> float:
        """Return the loss scale of the coming backward (called by `model.backward`)."""
        return 1.0 if self.masters is None else self.masters.scale_for_backward()

    # --- state -------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)
        _replace_parameters_of(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole optimizer state, in torch's layout; all ranks that hold a model call this.

        With `shard_optimizer_state` or sharded data parallelism all data-parallel ranks call it as well. With `fp16` or
        `bf16` each entry of `["state"]` has the parameter's master weight too, as "master" (with sharded data
        parallelism the weight is its own), and `["loss_scaler"]` is the state of the loss scale.
        """
        result = self._own_state_dict()
        if _zero1_partition() is not None:
            result = {**result, "state": gather_all(result["state"], self._model_parameters())}
        if _divides_weights():
            result = {**result, "state": to_whole(result["state"], self._model_parameters())}
        if state.pp_size == 1:
            return result
        return {**result, "state": merge_on_all_ranks(result["state"])}

    def orig_state_dict(self) -> dict[str, Any]:
        """Return the optimizer state of this rank, in torch's layout."""
        run_deferred_loads()
        result: dict[str, Any] = self.optimizer.state_dict()
        return result

    def _own_state_dict(self) -> dict[str, Any]:
        result = self.orig_state_dict()
        return result if self.masters is None else self.masters.state_dict(result)

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """Return this rank's state, plus `_smp_is_partial` = True.

        Args:
            gather_if_shard: with `shard_optimizer_state`, collect the shards of the ranks of RDP_GROUP, all of which
                call this: on rdp_rank 0 `["state"]` is then a list by rdp_rank. Else it is this rank's own shard.
        """
        own = marked(self._own_state_dict()) | stage_mark()
        if gather_if_shard and _zero1_partition() is not None:
            own["state"] = gather_by_rdp_rank(own["state"])
        if state.cfg.sharded_data_parallel_degree > 1:
            own["state"] = to_local(own["state"])
        return own

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a full or partial state dict; for a partial one all ranks of a pipeline call this.

        With `shard_optimizer_state` all data-parallel ranks call it for a partial one; it may come from any number of
        them.

        With `fp16` or `bf16` the model's weights become the master weights' that are loaded. Before a pipeline's first
        step loading waits for it.

        Raises:
            UsageError: it has states of other shapes than weights that tensor parallelism has divided, or of the parts
                of weights that another rank of sharded data parallelism has, or not those of all stages that saved it.
        """
        run_deferred_loads()
        values = unmarked(state_dict)
        if "state" in values:
            values["state"] = merge_shards(values["state"])
        if state_dict.get(PARTIAL_KEY):
            refuse_missing_stages(state_dict)
        if state.pp_size > 1 and state_dict.get(PARTIAL_KEY):
            values["state"] = merge_on_all_ranks(values["state"])
        if state.model is not None and _zero1_partition() is not None:
            parameters, owns = self._model_parameters(), state.model.owns
            if state_dict.get(PARTIAL_KEY):
                values["state"] = gather_owned(values["state"], parameters, owns)
            values["state"] = {n: value for n, value in values["state"].items() if owns(parameters[n])}
        elif state_dict.get(PARTIAL_KEY):
            self._loaded_early = True
        if _divides_weights():
            values["state"] = to_parts(values["state"], self._model_parameters())
            _check_shapes(values["state"], self._model_parameters())
        self._load(values)
        self.drop_foreign_states()

    def _load(self, values: dict[str, Any]) -> None:
        inside: Any = self.optimizer if self.masters is None else self.masters
        inside.load_state_dict(values)

    def drop_foreign_states(self) -> None:
        """Drop states of parameters that other ranks hold or own, and move the others to their parameters' devices."""
        model = state.model
        if model is None or not model.partitioned or (model.pipeline is None and _zero1_partition() is None):
            return
        if self._loaded_early and _zero1_partition() is not None:
            # The owners may be others than when it was saved, if other parameters were frozen or on this rank.
            own = self.optimizer.state_dict()
            own = own if self.masters is None else self.masters.state_dict(own)
            self._load({**own, "state": gather_owned(own["state"], self._model_parameters(), model.owns)})
        self._loaded_early = False
        if self.masters is not None:
            self.masters.create_missing()
        for parameter, values in list(self.state.items()):
            if not model.owns(self.model_parameter(parameter)):
                del self.state[parameter]
                continue
            for key, value in values.items():
                # Step counts stay where the optimizer put them; moments lie beside their parameter.
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    values[key] = value.to(parameter.device)

    def _model_parameters(self) -> list[torch.Tensor]:
        """Return the model's parameters, in the order of the numbers that state dicts give them."""
        return [self.model_parameter(parameter) for group in self.param_groups for parameter in group["params"]]

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """A copy of this rank's parts of the parameters, float32 and flat, for each parameter group.

        For reading; with sharded data parallelism only, like `ds_param_shard_group`.
        """
        self.ds_param_shard_group  # noqa: B018 - which is there with sharded data parallelism only
        return flat_shards(group["params"] for group in self.param_groups)

    @property
    def ds_param_shard_group(self) -> Any:
        """The process group whose ranks together hold the model once."""
        model: Any = state.model
        return model.data_parallel.shard_group

    # --- members that public scripts reach into, and some of which they replace --------------------------------------

    def save_optimizer_backcompat(self, *, gather_if_shard: bool = True, **_: Any) -> dict[str, Any]:
        """Return `local_state_dict`, under a name of v1's last versions; their other arguments change nothing here."""
        return self.local_state_dict(gather_if_shard)

    def load_optimizer_backcompat(self, state_dict: Mapping[str, Any], **_: Any) -> None:
        """Load what `save_optimizer_backcompat` returned."""
        self.load_state_dict(state_dict)

    redefined_params = False
    """Whether the parameters of the groups are others than the model's: they never are, but for master weights."""

    def param_name_to_index(self) -> dict[str, int]:
        """Return the number of each parameter in state dicts, by its name in the model."""
        return state.param_name_to_index_tp_group[state.tp_rank]

    def _param_id_to_index(self) -> dict[int, int]:
        return {id(parameter): index for index, parameter in enumerate(self._model_parameters())}

    def _param_index_to_param_local(self) -> dict[int, torch.Tensor]:
        owned = set() if state.model is None else {id(param) for _, param in state.model.local_named_parameters()}
        return {index: param for index, param in enumerate(self._model_parameters()) if id(param) in owned}

    def model_parameter(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the model's parameter whose master weight a member of `param_groups` is: itself if it is none."""
        return parameter if self.masters is None else self.masters.model_parameter_of(parameter)


def _replace_parameters_of(optimizer: Any) -> None:
    """Give an optimizer the parameters that sharded data parallelism has put in the place of the script's.

    Where the optimizer is made before the model is wrapped, the model does this.
    """
    if state.model is not None:
        refuse_replaced_parameters(optimizer)
        if state.model.data_parallel is not None:
            state.model.data_parallel.replace_parameters_of(optimizer)


def _refuse_accumulating() -> None:
    """Refuse an update after a batch for which accelerate's `accumulate` has its own optimizers leave it out."""
    accelerate = sys.modules.get("accelerate.state")
    if accelerate is not None and not accelerate.GradientState().sync_gradients:
        raise UsageError(
            "optimizer.step was called after a batch that accelerate's `accumulate` only adds up",
            hint="call it `if accelerator.sync_gradients:`, or set `microbatches` and leave out `accumulate`",
        )


@functools.lru_cache(maxsize=8)  # to read a signature takes longer than to clear the gradients
def _name_of_set_to_none(zero_grad: Callable[..., Any]) -> str | None:
    """Return what an optimizer's `zero_grad` calls the argument that torch calls `set_to_none`; None if it has none."""
    parameters = inspect.signature(zero_grad).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    names = ("set_to_none", *_NAMES_OF_SET_TO_NONE)
    return next((name for name in names if name in parameters), "set_to_none" if takes_any else None)


def _zero1_partition() -> Zero1Partition | None:
    """Return the owners of parameters, if `shard_optimizer_state` is on and this rank knows its part of the model."""
    model = state.model
    return None if model is None or model.data_parallel is None else model.data_parallel.zero1


def _divides_weights() -> bool:
    """Tell whether ranks hold parts of one weight."""
    return state.tp_size > 1 or state.cfg.sharded_data_parallel_degree > 1


def _check_shapes(states: Mapping[int, Mapping[str, Any]], parameters: Sequence[torch.Tensor]) -> None:
    """Refuse states of another model's weights, as those that tensor parallelism has replaced may be."""
    for number, values in states.items():
        shard = shard_of(parameters[number])
        if shard is None or len(shard.shape) == 1:  # optimizers of 8 bits keep scales in vectors of their own
            continue
        for key, value in values.items():
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
            if len(shape) == len(shard.shape) and shape != shard.local_shape:
                raise UsageError(
                    f"`{key}` of parameter {number} in the optimizer state has the shape {list(shape)}, but the weight"
                    f" has {list(shard.shape)}, and this tensor-parallel rank's part {list(shard.local_shape)}",
                    hint="go on from a partial checkpoint of smp.save_checkpoint, which resumes at any degrees",
                )


def _check(optimizer: Any) -> None:
    if not state.initialized:
        raise UsageError("DistributedOptimizer was made before smp.init()", hint="call `smp.init()` first")
    if isinstance(optimizer, DistributedOptimizer):
        raise UsageError("this optimizer is a DistributedOptimizer already", hint="wrap an optimizer once")
    missing = [name for name in ("param_groups", "state", "step", "zero_grad") if not hasattr(optimizer, name)]
    if missing:
        raise UsageError(
            f"{type(optimizer).__name__} is no optimizer: it has no {', '.join(f'`{n}`' for n in missing)}",
            hint="pass an optimizer of torch: `torch.optim.AdamW(model.parameters())`",
        )
    rules, cfg = _rules_of(optimizer), state.cfg
    if any(map(_IN_BACKWARD.fullmatch, rules)):
        raise UnsupportedError(
            f"{type(optimizer).__name__} updates weights in backward, but a step runs backward for each microbatch, and"
            " averages the gradients of replicas after it",
            hint='use one that updates in `step`: `optim="galore_adamw"`, say, not `"galore_adamw_layerwise"`',
        )
    clips = getattr(optimizer, "defaults", {}).get("max_grad_norm")  # by a norm that it adds up, unless it is ours
    is_of_all = any(map(_OF_ALL.fullmatch, rules)) or (clips and not hasattr(optimizer, "looks_at_all_parameters"))
    has_some = state.pp_size * state.tp_size > 1 or (cfg.shard_optimizer_state and cfg.ddp and state.dp_size > 1)
    # The norms and sums of DTensors are those of the whole.
    if is_of_all and (has_some or (cfg.sharded_data_parallel_degree > 1 and "LBFGS" in rules)):
        raise UnsupportedError(
            f"{type(optimizer).__name__} looks at all parameters at once, but a rank of a pipeline, of tensor"
            " parallelism, of sharded data parallelism or with shard_optimizer_state has some of them",
            hint="use another optimizer (one that clips by itself: with max_grad_norm=0, and smp.clip_grad_norm_), or"
            " degrees of 1 without shard_optimizer_state",
        )


def _rules_of(optimizer: Any) -> set[str]:
    around = [getattr(optimizer, name, None) for name in _AROUND]
    inside = (_rules_of(wrapped) for wrapped in around if hasattr(wrapped, "param_groups"))
    return {base.__name__ for base in type(optimizer).__mro__}.union(*inside)
