"""OffloadOptimizer: SGD, Adam and AdamW on the CPU, slice by slice, while the device computes."""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from threading import Thread
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from smpkit.errors import DeadlineError, UnsupportedError, UsageError
from smpkit.torch.core.clipping import hold_gradients
from smpkit.torch.offload_model.counted_link import DEADLINE_SECONDS
from smpkit.torch.offload_model.gradients import GradientAccumulator, GradientCopy
from smpkit.torch.offload_model.kernels import Adam, Rule, Sgd, Workers
from smpkit.torch.offload_model.model import OffloadModel
from smpkit.torch.offload_model.optimizer_state import ParameterState, SliceState

__all__ = ["OffloadOptimizer"]

_RULES: Final = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_UNKNOWN: Final = ("amsgrad", "capturable", "differentiable")


class OffloadOptimizer(torch.optim.Optimizer):
    """A fast optimizer for an `OffloadModel`; takes the place of a `torch.optim` one::

        optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=3e-4, weight_decay=0.1, max_grad_norm=1.0)
        for inputs, targets in batches:
            criterion(model(inputs), targets).backward()
            optimizer.step()

    Threads update weights in fp32 (moments, too), in one pass over memory per slice. `step()` returns at once: each
    slice is updated just before its next forward, so clipping is exact and the device still does not wait. With
    `overlap="backward"` slices are updated while the backward of earlier ones runs.

    As long as the optimizer exists, gradients go to it and not to `parameter.grad`; several backwards before a `step()`
    add up. A model has one such optimizer: the last that was made. Parameters read through the model are up to date;
    for those that you hold yourself, call `model.synchronize()` first.

    Args:
        model: whose parameters to update.
        rule: `torch.optim.SGD`, `Adam` or `AdamW`.
        groups: parameter groups, as torch's optimizers take them; all parameters if not given.
        max_grad_norm: clip the norm of all gradients, as `torch.nn.utils.clip_grad_norm_` does; that function itself
            would find none, and raises UsageError.
        overlap: "forward": update after `step()`, each slice before its next forward. "backward": update during the
            backward; then only one backward per `step()` is allowed, without clipping and loss scale.
        num_threads: for the update; by default all cores but two, at least one. Ranks of one host share its cores.
        options: of the rule: `lr`, `betas`, `weight_decay`, ...

    Raises:
        UsageError: another rule, clipping with overlap="backward", a parameter that is not the model's.
        UnsupportedError: amsgrad, capturable, differentiable.
    """

    def __init__(
        self,
        model: OffloadModel,
        rule: type[torch.optim.Optimizer] = torch.optim.AdamW,
        groups: Iterable[dict[str, Any]] | None = None,
        *,
        max_grad_norm: float | None = None,
        overlap: Literal["forward", "backward"] = "forward",
        num_threads: int | None = None,
        **options: Any,
    ) -> None:
        _check(model, rule, max_grad_norm, overlap, options)
        _import_torchs_compiler()
        chosen = list(groups) if groups is not None else list(model.parameters())
        # torch's own class checks the options and fills in defaults.
        plain = rule(chosen, **options)
        self._ready = False
        super().__init__(plain.param_groups, plain.defaults)
        self._ready = True
        self.max_grad_norm = max_grad_norm
        self.grad_norm: float | None = None
        """Norm of the gradients in the last step, before clipping; None unless clipping or a loss scale needs it."""
        self._rule = rule
        self._overlap = overlap
        self._engine = model._engine
        self._engine.synchronize()  # a previous optimizer may still update the weights, which masters are copied from
        self._states = self._make_states(model)
        self._workers = Workers(num_threads, self._engine.device)
        self._accumulators = [GradientAccumulator(state, self._engine.weight_link) for state in self._states]
        self._updates: list[list[Future[None]]] = [[] for _ in self._states]
        self._updated_in_backward: set[int] = set()
        self._engine.gradients.wants_norm = max_grad_norm is not None
        if overlap == "forward":  # all gradients are kept until `step`
            self._engine.gradients.reserve()
        self._engine.attach(self)
        hold_gradients(self)

    def __del__(self) -> None:
        """Wait for updates that run: the model and its next optimizer use the same weights."""
        if getattr(self, "_updates", None):
            with contextlib.suppress(Exception):  # at exit, the threads may be gone
                self.synchronize()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise UnsupportedError: the memory layout is decided when the optimizer is made."""
        if getattr(self, "_ready", False):
            raise UnsupportedError(
                "an OffloadOptimizer takes no further parameter groups", hint="give all of them when it is made"
            )
        super().add_param_group(param_group)

    def holds_gradients_of(self) -> Iterable[Tensor]:
        """Return the model's parameters, if gradients go to this optimizer; see `core.clipping`."""
        return self._engine.parameters if self._engine.consumer is self else ()

    # --- what the engine calls ---------------------------------------------------------------------------------------

    def consume(self, gradient_copy: GradientCopy) -> None:
        """Take the gradients of a slice, in backward."""
        index = gradient_copy.index
        self._states[index].check_not_frozen(gradient_copy)
        if self._overlap == "backward":
            if index == len(self._states) - 1 and 0 not in self._updated_in_backward:
                self._updated_in_backward.clear()  # the backward before this one failed half way
            if index in self._updated_in_backward:
                raise UsageError(
                    'a second backward before step(), but overlap="backward" has already updated the weights',
                    hint='use overlap="forward" to add up gradients',
                )
            self._updated_in_backward.add(index)
        self._accumulators[index].add(gradient_copy)
        for parameter, owner in self._states[index].tied:
            self._accumulators[owner].add_tied(gradient_copy, parameter)
        if self._overlap == "backward":
            self._update(index, 1.0)

    def wait_for_update(self, index: int) -> None:
        """Block until the weights of a slice are up to date."""
        for other in (index, *(owner for _, owner in self._states[index].tied)):
            for update in self._updates[other]:
                self._workers.wait(update, f"the update of slice {other}")

    def synchronize(self) -> None:
        """Block until all weights are up to date."""
        for index in range(len(self._states)):
            self.wait_for_update(index)
            self._updates[index].clear()

    def invalidate(self) -> None:
        """Compare masters with parameters before the next step, for parameters may have been written to."""
        for state in self._states:
            state.invalidate()

    # --- what the user calls -----------------------------------------------------------------------------------------

    takes_grad_scale: Final = True
    """For `smp.amp.GradScaler`: `step` unscales gradients, and `grad_norm` is finite if all of them were."""

    def step(self, closure: Callable[[], Any] | None = None, *, grad_scale: float | None = None) -> Any:
        """Update the weights from the gradients since the last step; returns before the update is complete.

        Args:
            closure: called first, with gradients enabled; its result is returned.
            grad_scale: the factor of the loss. If gradients are not finite, the step is skipped, as a gradient scaler
                does, and `grad_norm` is not finite.

        Raises:
            UsageError: a scale with overlap="backward", or another optimizer has been made for the model since.
        """
        if self._engine.consumer is not self:
            raise UsageError(
                "another OffloadOptimizer has been made for this model since, and gets its gradients",
                hint="make one, with a parameter group for each kind of parameter",
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._overlap == "backward":
            if grad_scale is not None:
                raise UsageError('a loss scale needs overlap="forward": weights are updated before all is finite')
            self._updated_in_backward.clear()
            return loss
        factor = self._factor(grad_scale)
        if factor is None:
            self.zero_grad()
            return loss
        for index in range(len(self._states)):
            self._update(index, factor)
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read first by `torch.amp.GradScaler.step`, which would look for gradients in `parameter.grad`."""
        raise UsageError(
            "torch.amp.GradScaler cannot unscale the gradients of an OffloadOptimizer",
            hint="use smp.amp.GradScaler, or step(grad_scale=...), which also skips a step that is not finite",
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that no step has used."""
        del set_to_none
        for accumulator in self._accumulators:
            accumulator.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return state and groups, in the form of the torch optimizer of the same rule."""
        self.synchronize()
        packed = super().state_dict()
        order = {id(parameter): number for number, parameter in enumerate(self._parameters())}
        packed["state"] = {}
        for state in self._states:
            for entry in state.entries:
                if entry.step:
                    packed["state"][order[id(entry.parameter)]] = entry.state_dict(self._names)
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load `state_dict`; one of the torch optimizer of the same rule can be loaded, too.

        Raises:
            ValueError: the groups differ.
            UsageError: the state is that of another rule.
        """
        self.synchronize()
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        saved: Mapping[int, Mapping[str, Any]] = state_dict["state"]
        entries = {id(entry.parameter): entry for state in self._states for entry in state.entries}
        numbers = (number for group in state_dict["param_groups"] for number in group["params"])
        for number, parameter in zip(numbers, self._parameters(), strict=True):
            entry = entries.get(id(parameter))
            if entry is not None:
                entry.load_state_dict(saved.get(number, {}), self._names)

    @property
    def _names(self) -> tuple[str, ...]:
        if self._rule is not torch.optim.SGD:
            return "exp_avg", "exp_avg_sq"
        return ("momentum_buffer",) if any(group["momentum"] for group in self.param_groups) else ()

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _make_states(self, model: OffloadModel) -> list[SliceState]:
        groups = dict[int, int]()
        for number, group in enumerate(self.param_groups):
            groups |= {id(parameter): number for parameter in group["params"]}
        known = {id(parameter) for parameter in model._engine.parameters}
        if groups.keys() - known:
            raise UsageError(f"{len(groups.keys() - known)} of the parameters are not the model's")
        owners: dict[int, int] = {}
        states = []
        for index, piece in enumerate(model._engine.slices):
            states.append(SliceState(index, piece.weights, groups, owners, len(self._names)))
        return states

    def _factor(self, grad_scale: float | None) -> float | None:
        """Return the factor for gradients; None to skip the step: they are scaled and not finite."""
        if self.max_grad_norm is None and grad_scale is None:
            self.grad_norm = None
            return 1.0
        scale = 1.0 if grad_scale is None else grad_scale
        norms = _on_host([accumulator.norm() for accumulator in self._accumulators])
        self.grad_norm = float(torch.stack(norms).double().norm()) / scale if norms else 0.0
        if grad_scale is not None and not math.isfinite(self.grad_norm):
            return None
        clip = 1.0 if self.max_grad_norm is None else self.max_grad_norm / (self.grad_norm + 1e-6)
        # Not `min`: like torch's clipping, a norm that is NaN must make all weights NaN.
        return (1.0 if clip > 1.0 else clip) / scale

    def _update(self, index: int, factor: float) -> None:
        """Start to update a slice, in threads, after its gradients have arrived.

        Its previous update has ended: these gradients come from a forward through the weights of that update, since a
        backward through older ones fails, and the forward has waited for them.
        """
        state, gradients = self._states[index], self._accumulators[index].take()
        if gradients is None:
            return
        state.note_changes()  # before the update reads masters
        flat_ranges = state.flat_ranges(gradients, lambda entry: self._rule_of(entry, factor))
        weights = self._engine.slices[index].weights

        def ready() -> None:
            gradients.wait()
            weights.synchronize()  # after a forward without a backward, a copy may still read the weights

        self._updates[index] = self._workers.run(flat_ranges, ready)
        # Now, not in the thread: a backward through the old weights must fail from here on.
        state.note_written()

    def _rule_of(self, entry: ParameterState, factor: float) -> Rule:
        group = self.param_groups[entry.group]
        factor = -factor if group["maximize"] else factor
        shared: dict[str, Any] = {"lr": float(group["lr"]), "weight_decay": group["weight_decay"]}
        if self._rule is torch.optim.SGD:
            more = {name: group[name] for name in ("momentum", "dampening", "nesterov")}
            return Sgd(**shared, **more, step=entry.step, factor=factor)
        beta1, beta2 = group["betas"]
        # In torch AdamW is Adam with this option, which groups saved by older versions do not have.
        decoupled = bool(group.get("decoupled_weight_decay", self._rule is torch.optim.AdamW))
        return Adam(
            **shared,
            beta1=float(beta1),
            beta2=float(beta2),
            eps=group["eps"],
            decoupled=decoupled,
            step=entry.step,
            factor=factor,
        )


def _on_host(values: Sequence[Tensor]) -> list[Tensor]:
    """Return scalars on the host, with one wait for the device instead of one for each."""
    there = [value for value in values if value.device.type != "cpu"]
    arrived = iter(torch.stack(there).cpu() if there else ())
    return [value if value.device.type == "cpu" else next(arrived) for value in values]


def _import_torchs_compiler() -> None:
    """Import torch._dynamo in another thread, as torch's first optimizer would in this one."""
    # torch catches an error in that import. Its traceback lives on in a cycle and holds all frames below the import: in
    # this thread, those of the user, with this optimizer's memory, until the garbage collector runs.
    if "torch._dynamo" not in sys.modules:
        thread = Thread(target=importlib.import_module, args=("torch._dynamo",), name="smpkit-import")
        thread.start()
        thread.join(DEADLINE_SECONDS)
        if thread.is_alive():
            raise DeadlineError(f"an OffloadOptimizer waited {DEADLINE_SECONDS:.0f} s for torch to import its compiler")


def _check(
    model: Any,
    rule: type[torch.optim.Optimizer],
    max_grad_norm: float | None,
    overlap: str,
    options: Mapping[str, Any],
) -> None:
    if not isinstance(model, OffloadModel):
        raise UsageError(f"an OffloadOptimizer needs an OffloadModel, not a {type(model).__name__}")
    if rule not in _RULES:
        raise UsageError(
            f"rule is {rule!r}; it must be torch.optim.SGD, Adam or AdamW",
            hint="any other torch optimizer works directly on model.parameters()",
        )
    if overlap not in ("forward", "backward"):
        raise UsageError(f'overlap is {overlap!r}; it must be "forward" or "backward"')
    if overlap == "backward" and max_grad_norm is not None:
        raise UsageError(
            'max_grad_norm needs overlap="forward": the norm is known only after the backward',
            hint="updates then overlap with the next forward, and cost no time of the device either",
        )
    asked = [name for name in _UNKNOWN if options.get(name)]
    if asked:
        raise UnsupportedError(f"an OffloadOptimizer does not do {', '.join(asked)}")
