"""Weights in float32 behind a model in half precision, and the optimizer step that goes through them.

::

    model      weight (half) ◄──────────────── rounded ─────────────────┐
                  │ backward of loss × scale                            │
               gradient (half)                                          │
                  │ ÷ scale, in float32; all finite, on all ranks?      │
    optimizer  gradient of the master ──► clip ──► update ──► master weight (float32), moments

A step that moves a weight by less than half precision can tell would be lost in the weight itself; in the master it
adds up. If a gradient of any rank of the model is not finite, all its ranks skip the step, and the loss scale shrinks.
"""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from smpkit.errors import UsageError
from smpkit.torch.core.runtime import state
from smpkit.torch.core.warn import warn_user
from smpkit.torch.placement.dtensor import local_tensor_of
from smpkit.torch.precision.cast import MASTER_KEY, SCALER_KEY
from smpkit.torch.precision.loss_scale import LossScaler, all_reduce_found_inf

_log = logging.getLogger("smpkit")


class MasterWeights:
    """Stands between `optimizer` and a model whose weights are `dtype`.

    The optimizer's `param_groups` hold the masters from the moment that this rank knows its part of the model: that is
    after the first step of a pipeline, and at once without one. Parameters that are not in half precision stay what
    they are; their gradients are unscaled in place.

    Args:
        optimizer: the user's, whose `param_groups` and `state` get the masters in place of the model's parameters.
        dtype: of the model.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, dtype: torch.dtype, scaler: LossScaler) -> None:
        self.loss_scaler: Any = scaler
        """What chooses the loss scale; may be replaced by another one with the same members."""
        self.overflow = False
        """Whether a gradient of the latest step was not finite, so that nothing was updated."""
        self._optimizer = optimizer
        self._dtype = dtype
        self._weights: dict[torch.Tensor, nn.Parameter] = {}
        """The model's parameter by its master."""
        self._versions: dict[torch.Tensor, tuple[int, int]] = {}
        """How often a master and its weight had been changed in place when they last agreed, by the master."""
        self._with_data: set[int] = set()
        """The ids of those whose `.data` the script has had since: no version tells what it wrote there."""
        self._pending_state: Mapping[str, Any] | None = None
        self._unscaled = False
        self._warned = False

    # --- what is a master of what ----------------------------------------------------------------------------------

    def create_missing(self) -> bool:
        """Make the masters that are missing; return False as long as this rank does not know its part of the model.

        One that is frozen has a master if its state is loaded, which would be rounded to the weight's precision.
        """
        model = state.model
        if model is None or not model.partitioned:
            return False
        loaded, numbers = (self._pending_state or {}).get("state", {}), itertools.count()
        for group in self._optimizer.param_groups:
            for position, (parameter, number) in enumerate(zip(group["params"], numbers, strict=False)):
                trained = parameter.requires_grad or number in loaded
                if parameter.dtype == self._dtype and trained and model.owns(parameter):
                    if not self._weights:
                        self._watch_data()
                    group["params"][position] = self._make_master(parameter)
        if self._pending_state is not None:
            values, self._pending_state = self._pending_state, None
            self._load(values)
        return True

    def _make_master(self, parameter: nn.Parameter) -> nn.Parameter:
        master = nn.Parameter(parameter.detach().to(torch.float32, copy=True))
        # Marks of tensor parallelism, which norms and state dicts read, and whatever the user has written on it.
        master.__dict__.update(vars(parameter))
        self._weights[master] = parameter
        self._versions[master] = master._version, parameter._version
        states = self._optimizer.state
        if parameter in states:
            states[master] = {
                key: value.float() if isinstance(value, torch.Tensor) and value.dtype == self._dtype else value
                for key, value in states.pop(parameter).items()
            }
        return master

    def model_parameter_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the model's parameter behind a member of the optimizer's groups: itself where it has no master."""
        return self._weights.get(parameter, parameter)

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied with; 1 with `bf16`."""
        return float(self.loss_scaler.loss_scale)

    @property
    def fp32_from_fp16_groups(self) -> list[list[nn.Parameter]]:
        """The masters by parameter group; empty lists while this rank does not know its part of the model."""
        self.create_missing()
        return [
            [param for param in group["params"] if param in self._weights] for group in self._optimizer.param_groups
        ]

    @property
    def fp16_groups(self) -> list[list[nn.Parameter]]:
        """The model's parameters that have masters, by parameter group."""
        return [[self._weights[master] for master in group] for group in self.fp32_from_fp16_groups]

    def masters(self) -> dict[int, nn.Parameter]:
        """Return this rank's masters by the id of the model's parameter."""
        self._follow_model()
        return {id(weight): cast("nn.Parameter", master) for master, weight in self._weights.items()}

    def copy_to_model(self) -> None:
        """Round the masters into the model's weights."""
        with torch.no_grad():
            _copy(self._weights.values(), self._weights.keys())
        self._versions = {master: (master._version, weight._version) for master, weight in self._weights.items()}
        self._with_data.clear()

    def copy_from_model(self, masters: Iterable[torch.Tensor] | None = None) -> None:
        """Copy weights that something else than the optimizer has changed into their masters, by default into all.

        Masters that differ from their weight by its rounding only stay as they are.
        """
        self.create_missing()
        with torch.no_grad():
            for master in self._weights if masters is None else masters:
                weight = self._weights[master]
                master.copy_(torch.where(master.to(weight.dtype) == weight, master, weight.float()))
                self._versions[master] = master._version, weight._version

    def _follow_model(self) -> None:
        """Copy weights that the script may have changed since the last step (clamped, say) into their masters.

        An update would undo that: it starts from the masters. Where the script has had the master, that one counts.
        """

        def is_same(parameter: torch.Tensor, version: int) -> bool:
            return parameter._version == version and id(parameter) not in self._with_data

        changed = []
        for master, weight in self._weights.items():
            before, before_in_model = self._versions[master]
            if is_same(master, before) and not is_same(weight, before_in_model):
                changed.append(master)
        self.copy_from_model(changed)

    def _watch_data(self) -> None:
        """Note whose `.data` is had or assigned, until `smp.shutdown()`."""
        data: Any = nn.Parameter.data

        def get(parameter: nn.Parameter) -> torch.Tensor:
            self._with_data.add(id(parameter))
            value: torch.Tensor = data.__get__(parameter)
            return value

        def assign(parameter: nn.Parameter, value: torch.Tensor) -> None:
            self._with_data.add(id(parameter))
            data.__set__(parameter, value)

        nn.Parameter.data = property(get, assign)  # type: ignore[assignment]
        state.reset_hooks.append(lambda: setattr(nn.Parameter, "data", torch.Tensor.data))

    # --- a step ----------------------------------------------------------------------------------------------------

    def scale_for_backward(self) -> float:
        """Return what the loss of the backward that comes next is multiplied with."""
        if self._unscaled:
            raise UsageError(
                "model.backward was called after gradients were clipped and before optimizer.step(), which uses those"
                " that were clipped",
                hint="clip right before optimizer.step(); to leave out the step, call optimizer.zero_grad()",
            )
        return self.loss_scale

    def unscale_gradients(self) -> None:
        """Give the masters their unscaled gradients, and agree whether all are finite; does nothing the second time."""
        if self._unscaled:
            return
        if not self.create_missing():
            raise UsageError(
                "the optimizer was asked for a step before the model's first one", hint="call the step function first"
            )
        self._follow_model()
        with torch.no_grad():
            self._fill_gradients()
            if self._dtype is torch.float16:  # bfloat16 has the range of float32: no scale, nothing to agree on
                self.overflow = bool(all_reduce_found_inf(self._unscale()).item())
        self._unscaled = True

    def step(self, update: Callable[[], Any]) -> Any:
        """Call `update`, the optimizer's own step, and round its results into the model; neither after an overflow."""
        self.unscale_gradients()
        result = None if self.overflow else update()
        if not self.overflow:
            self.copy_to_model()
        self._update_scale()
        self.clear_gradients()
        return result

    def clear_gradients(self) -> None:
        """Free the masters' gradients; those of the model stay until the user clears them."""
        self._unscaled = False
        for master in self._weights:
            master.grad = None

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear the gradients of the model's parameters, which the optimizer's groups do not hold."""
        self.clear_gradients()
        for weight in self._weights.values():
            if set_to_none or weight.grad is None:
                weight.grad = None
            else:
                weight.grad.detach_().zero_()

    def gradients_of(self, parameters: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return those of the model's parameters that have a gradient, each with the one that the optimizer will use.

        Members of the optimizer's groups stand for their parameters; what is in no group has no part in the step.
        """
        self.unscale_gradients()
        wanted = {id(self.model_parameter_of(param)) for param in parameters}
        pairs = [(self.model_parameter_of(parameter), gradient) for parameter, gradient in self._gradients()]
        return [(weight, gradient) for weight, gradient in pairs if id(weight) in wanted]

    def _gradients(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the optimizer's parameters that have a gradient, each with the values of that (sparse ones too)."""
        model = state.model
        assert model is not None
        for parameter in self._members():
            if parameter.grad is not None and model.owns(self.model_parameter_of(parameter)):
                yield parameter, parameter.grad._values() if parameter.grad.is_sparse else parameter.grad

    def _members(self) -> Iterator[torch.Tensor]:
        """Yield the optimizer's parameters, masters among them, in the order of their numbers in state dicts."""
        return (param for group in self._optimizer.param_groups for param in group["params"])

    def _fill_gradients(self) -> None:
        filled = []
        for master, weight in self._weights.items():
            master.grad = None
            if weight.grad is None:
                continue
            if weight.grad.is_sparse:  # duplicates are summed in float32: half precision might overflow
                master.grad = weight.grad.to(torch.float32).coalesce()
            else:
                master.grad = torch.empty_like(master)
                filled.append(master)
        _copy([master.grad for master in filled], [self._weights[master].grad for master in filled])

    def _unscale(self) -> torch.Tensor:
        """Divide the gradients by the loss scale; return 1 if one of them is not finite, else 0."""
        # torch's kernel takes tensors of one device and one dtype.
        by_kind: defaultdict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        for _, gradient in self._gradients():
            by_kind[gradient.device, gradient.dtype].append(local_tensor_of(gradient))
        found_inf = torch.zeros((), device=state.device)
        for (device, _), gradients in by_kind.items():
            here = torch.zeros((), device=device)
            inverse = torch.full((), 1.0 / self.loss_scaler.loss_scale, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, here, inverse)
            found_inf = torch.maximum(found_inf, here.to(found_inf.device))
        return found_inf

    def _update_scale(self) -> None:
        """Update the loss scale, and log a step that was skipped."""
        if self._dtype is not torch.float16:
            return
        before, is_at_minimum = self.loss_scaler.loss_scale, self.overflow and self.loss_scaler.at_minimum
        self.loss_scaler.update_scale(self.overflow)
        if state.rank != 0 or not self.overflow:
            return
        _log.info("step skipped: a gradient is not finite; loss scale %g -> %g", before, self.loss_scaler.loss_scale)
        if is_at_minimum and not self._warned:
            self._warned = True
            warn_user(
                f"a gradient is not finite at the smallest loss scale ({before:g}), so the step was skipped: the model"
                " may have diverged",
            )

    # --- state -----------------------------------------------------------------------------------------------------

    def state_dict(self, plain: dict[str, Any]) -> dict[str, Any]:
        """Add masters and loss scale to the optimizer's own state dict."""
        if self._pending_state is not None:  # loaded before this rank knew its part: the optimizer has no states yet
            return {**self._pending_state, "param_groups": plain["param_groups"]}
        self._follow_model()
        states = dict(plain["state"])
        for number, parameter in enumerate(self._members()):
            if parameter in self._weights:
                states[number] = {**states.get(number, {}), MASTER_KEY: parameter.detach()}
        return {**plain, "state": states, SCALER_KEY: self.loss_scaler.state_dict()}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, or an optimizer's own; waits until this rank knows its part of the model.

        Settings such as the learning rate do not wait: scripts read them, and may change them until then.
        """
        self._optimizer.load_state_dict({"state": {}, "param_groups": values["param_groups"]})
        self._pending_state = values
        self.create_missing()

    def _load(self, values: Mapping[str, Any]) -> None:
        masters = {number: entry[MASTER_KEY] for number, entry in values["state"].items() if MASTER_KEY in entry}
        states = {
            number: {key: value for key, value in entry.items() if key != MASTER_KEY}
            for number, entry in values["state"].items()
        }
        # Drop entries that held a master only: some optimizers take an empty entry for a state that they have made.
        states = {number: entry for number, entry in states.items() if entry}
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": states, "param_groups": groups})
        if SCALER_KEY in values:
            self.loss_scaler.load_state_dict(values[SCALER_KEY])
        with torch.no_grad():
            for number, parameter in enumerate(self._members()):
                if parameter in self._weights and number in masters:
                    parameter.copy_(masters[number])
                    self._weights[parameter].copy_(parameter)


def _copy(targets: Iterable[Any], sources: Iterable[Any]) -> None:
    into, values = list(targets), list(sources)
    if into:
        torch._foreach_copy_(into, values)
