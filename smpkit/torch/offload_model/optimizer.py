"""OffloadOptimizer: any of torch's optimizers on the CPU, slice by slice, while the device computes."""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from smpkit.errors import UnsupportedError, UsageError
from smpkit.torch.core.devices import make_current
from smpkit.torch.distributed.cores import own_cores
from smpkit.torch.distributed.host_memory import zeros
from smpkit.torch.offload.link import DONE, Event, Link
from smpkit.torch.offload_model.model import OffloadModel
from smpkit.torch.offload_model.slices import Slice
from smpkit.torch.optim.gradient_norm import hold_gradients


@dataclass
class _Part:
    """The optimizer of one slice."""

    piece: Slice
    optimizer: torch.optim.Optimizer
    aliases: dict[nn.Parameter, nn.Parameter]
    """Parameters of the slice, and what the optimizer has for them: the same memory, with gradients of their own. So
    the script may clear gradients, and forwards may run, while the thread updates."""
    groups: list[int]
    """The position of each of its groups among the user's groups."""
    is_first: bool = True
    """Whether the next update is the first with these states."""


class OffloadOptimizer(torch.optim.Optimizer):
    """Takes the place of a `torch.optim` optimizer for an `OffloadModel`, and does not let the device wait::

        optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=3e-4, weight_decay=0.1, max_grad_norm=1.0)
        for inputs, targets in batches:
            criterion(model(inputs), targets).backward()
            optimizer.step()

    It runs torch's own rule, fused where torch has that for the CPU. `step()` takes the gradients and returns at once:
    a thread updates each slice just before its next forward, so clipping is exact and the device still does not wait.
    With `overlap="backward"` slices are updated while the backward of earlier ones runs; gradients are gone then.

    Parameters read through the model are up to date; for those that you hold yourself, call `model.synchronize()`
    first.

    Args:
        model: whose parameters to update. Those in half precision would lose small steps: let parameters be float32,
            and give the model `dtype=torch.bfloat16`.
        rule: a class of optimizers, in which a parameter's update depends on nothing but its own gradient and state.
        groups: parameter groups, as torch's optimizers take them; all parameters if not given.
        max_grad_norm: clip the norm of all gradients, as `torch.nn.utils.clip_grad_norm_` does.
        overlap: "forward": update after `step()`, each slice before its next forward. "backward": update during the
            backward; then only one backward per `step()` is allowed, without clipping and loss scale.
        num_threads: for the update; by default all cores but two, at least one. Ranks of one host share its cores.
        options: of the rule: `lr`, `betas`, `weight_decay`, ...

    Raises:
        UsageError: clipping with overlap="backward", a parameter that is not the model's.
        UnsupportedError: a rule of torch for parameters in half precision, or one over all parameters together.
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
        _check(model, rule, max_grad_norm, overlap, num_threads)
        if "fused" in inspect.signature(rule).parameters and not options.get("foreach"):
            options = {"fused": True} | options
        # The rule's own class checks the options and fills in defaults.
        whole = rule(list(groups) if groups is not None else list(model.parameters()), **options)
        super().__init__(whole.param_groups, whole.defaults)
        self.state.update(whole.state)  # some rules make states at once, as Adagrad does in torch 2.11
        self.max_grad_norm = max_grad_norm
        self.grad_norm: float | None = None
        """Norm of the gradients in the last step, before clipping; None without clipping."""
        self._engine = engine = model._engine
        engine.synchronize()  # another optimizer may still update the weights
        self._parts = self._make_parts(rule, options)
        self._pool = ThreadPoolExecutor(
            1,
            thread_name_prefix="smpkit-update",
            initializer=_begin_thread,
            initargs=(engine.device, num_threads or max(1, own_cores() - 2)),
        )
        self._overlap = overlap
        self._updated: set[int] = set()
        """Slices that this backward has updated."""
        if overlap == "backward":
            engine.updater = weakref.ref(self)
            hold_gradients(self)

    def _make_parts(self, rule: Callable[..., torch.optim.Optimizer], options: Mapping[str, Any]) -> dict[int, _Part]:
        """Return an optimizer for each slice that has parameters of this one, by slice."""
        here = set(self._engine.parameters)
        strangers = [parameter for parameter in self._own() if parameter not in here]
        if strangers:
            raise UsageError(f"{len(strangers)} of the parameters are not the model's")
        if (
            rule in vars(torch.optim).values()
            and (half := next((param for param in self._own() if param.dtype in (torch.bfloat16, torch.float16)), None))
            is not None
        ):
            raise UnsupportedError(
                f"there are parameters of {half.dtype}, in which torch's {getattr(rule, '__name__', rule)} loses small"
                " steps",
                hint="wrap the model in float32, and give OffloadModel(..., dtype=torch.bfloat16) to compute in it",
            )
        parts = {}
        for piece in self._engine.slices:
            members = set(piece.parameters)
            aliases: dict[nn.Parameter, nn.Parameter] = {}
            groups = {}
            for number, group in enumerate(self.param_groups):
                mine = {
                    param: nn.Parameter(param.data, param.requires_grad)
                    for param in group["params"]
                    if param in members
                }
                aliases |= mine
                if mine:
                    groups[number] = _settings(group) | {"params": list(mine.values())}
            if groups:
                parts[piece.index] = _Part(piece, rule(list(groups.values()), **options), aliases, list(groups))
        self._link_states(parts.values())
        return parts

    def _own(self) -> Iterable[nn.Parameter]:
        return (parameter for group in self.param_groups for parameter in group["params"])

    def _link_states(self, parts: Iterable[_Part]) -> None:
        """Let the states of this optimizer be those of the slices' optimizers."""
        for part in parts:
            part.is_first = True
            for parameter, alias in part.aliases.items():
                part.optimizer.state[alias] = self.state[parameter]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise UnsupportedError: which slice has which parameters is decided when the optimizer is made."""
        if hasattr(self, "_parts"):
            raise UnsupportedError(
                "an OffloadOptimizer takes no further parameter groups", hint="give all of them when it is made"
            )
        super().add_param_group(param_group)

    def holds_gradients_of(self) -> Iterable[Tensor]:
        """Return the parameters whose gradients a backward uses up; see `optim.gradient_norm`."""
        return self._engine.parameters if self._engine.updater() is self else ()

    # --- what the user calls -----------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the gradients and begin to update the weights; returns before the update is complete.

        Args:
            closure: called first, with gradients enabled; its result is returned.

        Raises:
            UsageError: another optimizer with overlap="backward" has been made for the model since.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._overlap == "backward":
            if self._engine.updater() is not self:
                raise UsageError(
                    "another OffloadOptimizer has been made for this model since, and gets its gradients",
                    hint="make one, with a parameter group for each kind of parameter",
                )
            self._updated.clear()
            return loss
        factor = self._clip_factor()
        first_needed = sorted(self._parts, key=lambda index: index != len(self._engine.slices) - 1)
        for index in first_needed:  # the resident slice first, then in the order of the forward
            self._begin_update(self._parts[index], factor, DONE)
        return loss

    @torch.no_grad()
    def _clip_factor(self) -> Tensor | None:
        """Return by what gradients are to be multiplied; None: they stay as they are."""
        if self.max_grad_norm is None:
            return None
        # Not on the device as they leave it: GradScaler and `.grad.data.mul_(...)` change them, and no version tells.
        gradients = [parameter.grad for parameter in self._own() if parameter.grad is not None]
        norms = [
            torch.linalg.vector_norm(grad, dtype=torch.promote_types(grad.dtype, torch.float32)) for grad in gradients
        ]
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), device="cpu")
        self.grad_norm = float(norm)
        # As in torch's clipping, a norm that is NaN makes all weights NaN.
        factor = torch.clamp(self.max_grad_norm / (norm + 1e-6), max=1.0)
        return None if factor == 1 else factor

    def state_dict(self) -> dict[str, Any]:
        """Return state and groups, as the rule's own optimizer does."""
        self._engine.synchronize()
        packed = super().state_dict()
        packed["state"] = {number: state for number, state in packed["state"].items() if state}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` of this class or of the rule's own."""
        self._engine.synchronize()
        super().load_state_dict(state_dict)
        for group in self.param_groups:  # how it computes is this optimizer's own choice
            group |= {name: self.defaults[name] for name in ("fused", "foreach") if name in self.defaults}
        self._link_states(self._parts.values())

    # --- what the engine calls, with overlap="backward" ---------------------------------------------------------------

    def check(self, piece: Slice) -> None:
        """Raise UsageError if a slice has been updated since the last step."""
        if piece.index in self._updated:
            raise UsageError(
                "a second backward before step(), or one through layers that were called several times, but"
                ' overlap="backward" has already updated the weights',
                hint='use overlap="forward" to add up gradients',
            )

    def consume(self, piece: Slice, arrival: Event) -> None:
        """Update a slice whose gradients are on their way."""
        if (part := self._parts.get(piece.index)) is not None and self._begin_update(part, None, arrival):
            self._updated.add(piece.index)

    def forget(self) -> None:
        """Take note that a backward failed half way: the next one updates again."""
        self._updated.clear()

    # --- updates -----------------------------------------------------------------------------------------------------

    def _begin_update(self, part: _Part, factor: Tensor | None, arrival: Event) -> bool:
        """Take the gradients of a slice, and let the thread update its weights; return whether there are any."""
        piece = part.piece
        gradients = [(alias, parameter.grad) for parameter, alias in part.aliases.items() if parameter.grad is not None]
        if not gradients:
            return False
        piece.check_not_moved()
        for parameter in part.aliases:
            parameter.grad = None
        piece.wait_for_updates()  # of another optimizer, or of a step before without a forward in between
        for own, number in zip(part.optimizer.param_groups, part.groups, strict=True):
            own.update(_settings(self.param_groups[number]))
        piece.updates.append(self._pool.submit(_update, self._engine.link, part, gradients, factor, arrival))
        # Now, not in the thread: a backward through the old weights must fail from here on.
        torch.autograd.graph.increment_version(part.aliases)
        piece.note_published()
        return True


@torch.no_grad()
def _update(
    link: Link,
    part: _Part,
    gradients: list[tuple[nn.Parameter, Tensor]],
    factor: Tensor | None,
    arrival: Event,
) -> None:
    """Update the weights of a slice; runs in the thread."""
    link.synchronize(arrival, "the gradients of a slice")
    link.synchronize(part.piece.reading, "the weights of a slice")  # a forward without a backward may still read them
    if factor is not None:
        torch._foreach_mul_([gradient for _, gradient in gradients], factor)
    for alias, gradient in gradients:
        alias.grad = gradient
    is_first, part.is_first = part.is_first, False
    if is_first:
        _move_states(part.optimizer)  # those that were loaded belong to the script
    _complete_momentum(part.optimizer)
    before = [dict(group) for group in part.optimizer.param_groups] if is_first else []
    part.optimizer.step()
    if is_first:
        _check_groups(part.optimizer, before)
        _move_states(part.optimizer)
    for alias, _ in gradients:
        alias.grad = None
    gradients.clear()  # the thread keeps its arguments for a moment, and the next backward wants their memory
    part.piece.publish()


def _check_groups(optimizer: torch.optim.Optimizer, before: Sequence[Mapping[str, Any]]) -> None:
    """Raise UnsupportedError if a step has written to parameter groups, which are set anew for each update."""
    for group, earlier in zip(optimizer.param_groups, before, strict=True):
        if written := sorted(name for name, value in group.items() if value is not earlier.get(name, earlier)):
            raise UnsupportedError(
                f"{type(optimizer).__name__} keeps {', '.join(written)} for all parameters of a group, and an"
                " OffloadOptimizer updates slice by slice",
                hint="use it on model.parameters() directly",
            )


def _complete_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Let weights that are trained later begin beside others that have momentum, which torch's fused SGD refuses.

    Zeros are as none, but with dampening: then torch's other kernel computes.
    """
    for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else ():
        states = [
            (param, optimizer.state[param]) for param in group["params"] if group["momentum"] and param.grad is not None
        ]
        late = [(param, state) for param, state in states if state.get("momentum_buffer") is None]
        if 0 < len(late) < len(states):
            group["fused"] = group["fused"] and not group["dampening"]
            for param, state in late if group["fused"] else ():
                state["momentum_buffer"] = torch.zeros_like(param)


def _move_states(optimizer: torch.optim.Optimizer) -> None:
    """Copy states to large pages, one after the other."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if type(value) is Tensor and value.is_contiguous():  # no subclass, such as torchao's states of 8 bits
                state[name] = zeros(value.numel(), value.dtype).view(value.shape).copy_(value)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    # A scheduler writes into a learning rate that is a tensor, perhaps while the thread updates with it.
    settings = {name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items()}
    return {name: value for name, value in settings.items() if name not in ("params", "param_names")}


def _begin_thread(device: torch.device, num_threads: int) -> None:
    make_current(device)
    torch.set_num_threads(num_threads)


def _check(model: Any, rule: Any, max_grad_norm: float | None, overlap: str, num_threads: int | None) -> None:
    if not isinstance(model, OffloadModel):
        raise UsageError(f"an OffloadOptimizer needs an OffloadModel, not a {type(model).__name__}")
    if rule is torch.optim.LBFGS or getattr(rule, "looks_at_all_parameters", False):
        raise UnsupportedError(
            f"{rule.__name__} looks at all parameters together, and an OffloadOptimizer updates slice by slice",
            hint="use it on model.parameters() directly",
        )
    if overlap not in ("forward", "backward"):
        raise UsageError(f'overlap is {overlap!r}; it must be "forward" or "backward"')
    if overlap == "backward" and max_grad_norm is not None:
        raise UsageError(
            'max_grad_norm needs overlap="forward": the norm is known only after the backward',
            hint="updates then overlap with the next forward, and cost no time of the device either",
        )
    if max_grad_norm is not None and not (math.isfinite(max_grad_norm) and max_grad_norm > 0):
        raise UsageError(f"max_grad_norm is {max_grad_norm}; it must be more than 0")
    if num_threads is not None and num_threads < 1:
        raise UsageError(f"num_threads is {num_threads}; it must be at least 1")
