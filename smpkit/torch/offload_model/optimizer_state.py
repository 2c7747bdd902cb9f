"""An optimizer's master weights and state for one slice, laid out like its gradients.

A parameter in fp32 that is computed in fp32 is its own master. If the computation is in a narrower dtype, the parameter
becomes a view of its master, and the slice's buffer has the working copy (`weight`). A parameter that is itself narrow
stays the working copy, and has a master that nobody else knows (`has_own_master`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from smpkit.errors import UnsupportedError, UsageError
from smpkit.torch.distributed.host_memory import zeros
from smpkit.torch.offload_model.gradients import AccumulatedGradients, GradientCopy
from smpkit.torch.offload_model.kernels import FlatRange, Rule
from smpkit.torch.offload_model.weights import BufferSlot, Layout, SliceWeights, with_own_storage

__all__ = ["ParameterState", "SliceState"]


@dataclass
class ParameterState:
    """The optimizer's state of one parameter; flat tensors, padded like the gradients."""

    parameter: nn.Parameter
    group: int
    num_elements: int
    master: Tensor
    state: tuple[Tensor, ...]
    weight: Tensor | None
    """The working copy, unless it is the master itself."""
    has_own_master: bool
    """Whether the parameter itself is the working copy, so that nothing outside refers to the master."""
    step: int = 0
    synced_version: int = -1
    """Version of the parameter when the master was last equal to it, up to rounding."""

    def shaped(self, flat: Tensor) -> Tensor:
        """Return the parameter's part of a flat tensor, in its shape."""
        return flat[: self.parameter.numel()].view(self.parameter.shape)

    def flat_range(self, gradient: Tensor) -> FlatRange:
        """Return the memory that a step updates."""
        # A gradient without padding (`InPlaceGradients`) covers only the parameter's own elements.
        whole = FlatRange(gradient, self.master, self.state, self.weight)
        assert gradient.numel() in (self.num_elements, self.parameter.numel()), "a gradient of another layout"
        return whole if gradient.numel() == self.num_elements else whole.part(0, gradient.numel())

    def state_dict(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the state as torch's optimizers name it."""
        named = {name: self.shaped(flat) for name, flat in zip(names, self.state, strict=True)}
        master = {"master": self.shaped(self.master)} if self.has_own_master else {}
        return {"step": torch.tensor(float(self.step), device="cpu"), **named, **master}

    @torch.no_grad()
    def merge_parameter(self) -> None:
        """Copy to the master what has been written to the parameter, where it is not just the rounded master."""
        master = self.shaped(self.master)
        same = master.to(self.parameter.dtype) == self.parameter
        master.copy_(torch.where(same, master, self.parameter.detach().to(master.dtype)))

    @torch.no_grad()
    def load_state_dict(self, saved: Mapping[str, Any], names: Sequence[str]) -> None:
        """Load a parameter's state; an empty one means that there was no step yet.

        Raises:
            UsageError: the state is that of another rule.
        """
        self.step = 0
        for flat in self.state:
            flat.zero_()
        if not saved:
            return
        missing = [name for name in names if saved.get(name) is None]
        if missing:
            raise UsageError(
                f"the optimizer's state has no {missing[0]}, only {', '.join(saved)}",
                hint="was it saved by an optimizer with another rule?",
            )
        self.step = int(saved.get("step", 1))  # torch's SGD does not count steps
        for name, flat in zip(names, self.state, strict=True):
            self.shaped(flat).copy_(saved[name])
        if self.has_own_master and "master" in saved:
            self.shaped(self.master).copy_(saved["master"])
            self.synced_version = self.parameter._version


class SliceState:
    """The state of all parameters of a slice.

    Args:
        index: of the slice.
        weights: its parameters.
        groups: parameter group by id of parameter; others are not updated.
        owners: slice by id of parameter, for those of earlier slices; this slice's are added.
        num_state: flat tensors of state per parameter: two for Adam.
    """

    def __init__(
        self, index: int, weights: SliceWeights, groups: Mapping[int, int], owners: dict[int, int], num_state: int
    ) -> None:
        trained = [
            parameter for parameter in weights.layout.parameters if parameter.requires_grad and id(parameter) in groups
        ]
        self._frozen = {id(p) for p in weights.layout.parameters if not p.requires_grad and id(p) in groups}
        self.tied = [(parameter, owners[id(parameter)]) for parameter in trained if id(parameter) in owners]
        owned = [parameter for parameter in trained if id(parameter) not in owners]
        owners.update(dict.fromkeys(map(id, owned), index))
        self._weights = weights
        made = _allocate(weights, Layout(owned, weights.dtype), num_state)
        self.entries = [ParameterState(p, groups[id(p)], *each) for p, each in zip(owned, made, strict=True)]
        self._by_id = {id(entry.parameter): entry for entry in self.entries}
        for entry in self.entries:
            _init_master(entry)
        self.note_written()

    def owns(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter is updated with this slice."""
        return id(parameter) in self._by_id

    def note_changes(self) -> None:
        """Update masters from parameters that others have written to, such as a loaded checkpoint."""
        self._weights.reattach()
        for entry in self.entries:
            if entry.has_own_master:
                # The version tells of writes to the parameter, except for `parameter.data = ...`, which moves it.
                if entry.synced_version != entry.parameter._version or id(entry.parameter) in self._weights.moved:
                    entry.merge_parameter()
            elif entry.weight is not None and entry.parameter.data_ptr() != entry.master.data_ptr():
                _init_master(entry)  # `parameter.data = ...`: the parameter is no view of its master any more
        self._weights.moved.clear()

    def invalidate(self) -> None:
        """Compare all masters with their parameters before the next step."""
        for entry in self.entries:
            entry.synced_version = -1

    def check_not_frozen(self, gradient_copy: GradientCopy) -> None:
        """Raise UsageError if a parameter is trained that was frozen, and got no state, when the optimizer was made."""
        late = [parameter for parameter in gradient_copy.flat if id(parameter) in self._frozen]
        if late:
            raise UsageError(
                f"{len(late)} parameters were frozen when the OffloadOptimizer was made and are trained now, the first"
                f" of shape {tuple(late[0].shape)}",
                hint="make another OffloadOptimizer, and let it load the state_dict() of this one",
            )

    def note_written(self) -> None:
        """Increment the parameters' versions, as in-place updates do, so that a backward through old values fails."""
        parameters = [entry.parameter for entry in self.entries]
        increment_version(parameters)
        for entry in self.entries:
            entry.synced_version = entry.parameter._version
        self._weights.note_written([entry.parameter for entry in self.entries if entry.weight is not None])

    def flat_ranges(
        self, gradients: AccumulatedGradients, rule_of: Callable[[ParameterState], Rule]
    ) -> list[tuple[Rule, FlatRange]]:
        """Count a step of each parameter with a gradient; return rules and memory, adjacent ranges joined."""
        found: list[tuple[Rule, FlatRange]] = []
        for parameter, gradient in gradients.flat.items():
            entry = self._by_id.get(id(parameter))
            if entry is None:
                continue
            entry.step += 1
            flat_range = entry.flat_range(gradient)
            rule = rule_of(entry)
            joined = _merged(found[-1], rule, flat_range) if found else None
            if joined is None:
                found.append((rule, flat_range))
            else:
                found[-1] = (rule, joined)
        return found


def _merged(last: tuple[Rule, FlatRange], rule: Rule, flat_range: FlatRange) -> FlatRange | None:
    """Return one range for two, if the second follows the first directly in every array and has the same rule."""
    if last[0] != rule:
        return None
    pairs = list(zip(_arrays(last[1]), _arrays(flat_range), strict=False))
    if len(list(_arrays(last[1]))) != len(list(_arrays(flat_range))) or not all(_follows(*pair) for pair in pairs):
        return None
    wider = [one.as_strided((one.numel() + other.numel(),), (1,)) for one, other in pairs]
    state = tuple(wider[2 : 2 + len(flat_range.state)])
    return replace(
        last[1],
        gradient=wider[0],
        master=wider[1],
        state=state,
        weight=None if flat_range.weight is None else wider[-1],
    )


def _arrays(flat_range: FlatRange) -> Iterator[Tensor]:
    yield from (flat_range.gradient, flat_range.master, *flat_range.state)
    if flat_range.weight is not None:
        yield flat_range.weight


def _follows(one: Tensor, other: Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and other.storage_offset() == one.storage_offset() + one.numel()
    )


_Flats = tuple[int, Tensor, tuple[Tensor, ...], Tensor | None, bool]


def _allocate(weights: SliceWeights, layout: Layout, num_state: int) -> Iterator[_Flats]:
    """Yield per parameter: padded length, master, state, working copy, whether the master is separate.

    Masters and each state of a slice are one allocation, so that adjacent gradients have adjacent state.
    """
    working = dict(zip(weights.layout.parameters, weights.layout.slots, strict=True))
    total = sum(slot.num_elements for slot in layout.slots)
    # In fp32, and in large pages: a step goes through all of it, bound by memory bandwidth.
    states = [zeros(total) for _ in range(num_state)]
    needs_master = any(not _is_wide(p, working[p]) for p in layout.parameters)
    masters = zeros(total) if needs_master else zeros(0)
    start = 0
    for parameter, slot in zip(layout.parameters, layout.slots, strict=True):
        end = start + slot.num_elements
        weight = working[parameter].padded(weights.buffer)
        state = tuple(each[start:end] for each in states)
        start = end
        if parameter.dtype == weight.dtype and _is_wide(parameter, slot):
            state = tuple(each.to(weight.dtype) for each in state)
            yield slot.num_elements, weight, state, None, False
        else:
            master = masters[end - slot.num_elements : end]
            yield slot.num_elements, master, state, weight, parameter.dtype == weight.dtype


def _is_wide(parameter: Tensor, slot: BufferSlot) -> bool:
    """Return whether the parameter, computed in its own dtype, is its own master."""
    return slot.dtype == parameter.dtype and parameter.dtype in (torch.float32, torch.float64)


@torch.no_grad()
def _init_master(entry: ParameterState) -> None:
    """Initialize the master, and make a parameter that is wider than the working copy a view of it."""
    if entry.weight is None:
        return
    if not entry.has_own_master and entry.parameter.dtype != entry.master.dtype:
        raise UnsupportedError(
            f"an OffloadOptimizer does not train weights of {entry.parameter.dtype} that are computed in"
            f" {entry.weight.dtype}",
            hint="convert the model to torch.float32 before it is wrapped",
        )
    entry.shaped(entry.master).copy_(entry.parameter)
    if not entry.has_own_master:
        entry.parameter.data = with_own_storage(entry.shaped(entry.master))
