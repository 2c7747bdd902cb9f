"""An optimizer's master weights and state for one slice, laid out like its gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from smpkit.errors import UnsupportedError, UsageError
from smpkit.torch.offload.pages import zeros
from smpkit.torch.offload_model.gradients import Landing
from smpkit.torch.offload_model.kernels import Rule, Span
from smpkit.torch.offload_model.layout import Layout, Place, apart
from smpkit.torch.offload_model.pending import Arrived
from smpkit.torch.offload_model.weights import SliceWeights

__all__ = ["Entry", "SliceState"]


@dataclass
class Entry:
    """What the optimizer keeps of one parameter; flat tensors, padded like the gradients."""

    parameter: nn.Parameter
    group: int
    num_elements: int
    master: Tensor
    state: tuple[Tensor, ...]
    weight: Tensor | None
    """The working copy, where it is not the master itself."""
    separate: bool
    """Whether the parameter itself is the working copy, so that the master is known to nobody else."""
    step: int = 0
    seen: int = -1
    """Version of the parameter when the master was last equal to it, up to rounding."""

    def shaped(self, flat: Tensor) -> Tensor:
        """Return the parameter's part of a flat tensor, in its shape."""
        return flat[: self.parameter.numel()].view(self.parameter.shape)

    def span(self, gradient: Tensor) -> Span:
        """Return the work of a step; a gradient without padding leaves that of the others alone."""
        whole = Span(gradient, self.master, self.state, self.weight)
        assert gradient.numel() in (self.num_elements, self.parameter.numel()), "a gradient of another layout"
        return whole if gradient.numel() == self.num_elements else whole.part(0, gradient.numel())

    def state_dict(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the state as torch's optimizers name it."""
        named = {name: self.shaped(flat) for name, flat in zip(names, self.state, strict=True)}
        master = {"master": self.shaped(self.master)} if self.separate else {}
        return {"step": torch.tensor(float(self.step), device="cpu"), **named, **master}

    @torch.no_grad()
    def merge(self) -> None:
        """Take over what has been written into the parameter; where that rounds the master, the master stays."""
        master = self.shaped(self.master)
        same = master.to(self.parameter.dtype) == self.parameter
        master.copy_(torch.where(same, master, self.parameter.detach().to(master.dtype)))

    @torch.no_grad()
    def load_state_dict(self, saved: Mapping[str, Any], names: Sequence[str]) -> None:
        """Take the state over; no state means none yet.

        Raises:
            UsageError: state of another rule.
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
        self.step = int(saved.get("step", 1))  # torch's SGD does not count
        for name, flat in zip(names, self.state, strict=True):
            self.shaped(flat).copy_(saved[name])
        if self.separate and "master" in saved:
            self.shaped(self.master).copy_(saved["master"])
            self.seen = self.parameter._version


class SliceState:
    """All entries of a slice.

    Args:
        index: of the slice.
        weights: its parameters.
        groups: parameter group by id of parameter; others are not updated.
        owners: slice by id of parameter, for those of earlier slices; added to.
        num_state: flat tensors of state per parameter: two for Adam.
    """

    def __init__(
        self, index: int, weights: SliceWeights, groups: Mapping[int, int], owners: dict[int, int], num_state: int
    ) -> None:
        trained = [
            parameter for parameter in weights.layout.parameters if parameter.requires_grad and id(parameter) in groups
        ]
        self._late = {id(p) for p in weights.layout.parameters if not p.requires_grad and id(p) in groups}
        self.borrowed = [(parameter, owners[id(parameter)]) for parameter in trained if id(parameter) in owners]
        owned = [parameter for parameter in trained if id(parameter) not in owners]
        owners.update(dict.fromkeys(map(id, owned), index))
        self._weights = weights
        made = _flats(weights, Layout(owned, weights.dtype), num_state)
        self.entries = [Entry(p, groups[id(p)], *each) for p, each in zip(owned, made, strict=True)]
        self._by_id = {id(entry.parameter): entry for entry in self.entries}
        for entry in self.entries:
            _adopt(entry)
        self.written()

    def owns(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter is updated with this slice."""
        return id(parameter) in self._by_id

    def owns_all(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Return whether all these parameters are updated with this slice."""
        return all(map(self.owns, parameters))

    def note_changes(self) -> None:
        """Take over what somebody else has written into parameters, such as a checkpoint."""
        self._weights.gather()
        for entry in self.entries:
            if entry.separate:
                if entry.seen != entry.parameter._version or id(entry.parameter) in self._weights.moved:
                    entry.merge()
            elif entry.weight is not None and entry.parameter.data_ptr() != entry.master.data_ptr():
                _adopt(entry)
        self._weights.moved.clear()

    def distrust(self) -> None:
        """Compare all masters with their parameters before the next step."""
        for entry in self.entries:
            entry.seen = -1

    def expect(self, landing: Landing) -> None:
        """Raise UsageError if a parameter that was frozen when state was reserved is trained now."""
        late = [parameter for parameter in landing.flat if id(parameter) in self._late]
        if late:
            raise UsageError(
                f"{len(late)} parameters were frozen when the OffloadOptimizer was made and are trained now, the first"
                f" of shape {tuple(late[0].shape)}",
                hint="make another OffloadOptimizer, and let it load the state_dict() of this one",
            )

    def written(self) -> None:
        """Count a version of all parameters, as torch's optimizers do: a backward through older ones is an error."""
        parameters = [entry.parameter for entry in self.entries]
        increment_version(parameters)
        for entry in self.entries:
            entry.seen = entry.parameter._version
        self._weights.written([entry.parameter for entry in self.entries if entry.weight is not None])

    def spans(self, gradients: Arrived, rule_of: Callable[[Entry], Rule]) -> list[tuple[Rule, Span]]:
        """Count a step of every parameter that has a gradient; return its work, neighbours with one rule together."""
        found: list[tuple[Rule, Span]] = []
        for parameter, gradient in gradients.flat.items():
            entry = self._by_id.get(id(parameter))
            if entry is None:
                continue
            entry.step += 1
            span = entry.span(gradient)
            rule = rule_of(entry)
            joined = _joined(found[-1], rule, span) if found else None
            if joined is None:
                found.append((rule, span))
            else:
                found[-1] = (rule, joined)
        return found


def _joined(last: tuple[Rule, Span], rule: Rule, span: Span) -> Span | None:
    """Return one span for two, if the second lies right behind the first in every array and has the same rule."""
    if last[0] != rule:
        return None
    pairs = list(zip(_arrays(last[1]), _arrays(span), strict=False))
    if len(list(_arrays(last[1]))) != len(list(_arrays(span))) or not all(_follows(*pair) for pair in pairs):
        return None
    wider = [one.as_strided((one.numel() + other.numel(),), (1,)) for one, other in pairs]
    state = tuple(wider[2 : 2 + len(span.state)])
    return replace(
        last[1], gradient=wider[0], master=wider[1], state=state, weight=None if span.weight is None else wider[-1]
    )


def _arrays(span: Span) -> Iterator[Tensor]:
    yield from (span.gradient, span.master, *span.state)
    if span.weight is not None:
        yield span.weight


def _follows(one: Tensor, other: Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and other.storage_offset() == one.storage_offset() + one.numel()
    )


_Flats = tuple[int, Tensor, tuple[Tensor, ...], Tensor | None, bool]


def _flats(weights: SliceWeights, layout: Layout, num_state: int) -> Iterator[_Flats]:
    """Yield per parameter: padded length, master, state, working copy, whether the master is separate.

    One allocation each for masters and states of a slice, so that neighbours in the gradients are neighbours here.
    """
    working = dict(zip(weights.layout.parameters, weights.layout.places, strict=True))
    total = sum(place.num_elements for place in layout.places)
    states = [zeros(total) for _ in range(num_state)]
    needs_master = any(not _is_wide(p, working[p]) for p in layout.parameters)
    masters = zeros(total) if needs_master else zeros(0)
    start = 0
    for parameter, place in zip(layout.parameters, layout.places, strict=True):
        end = start + place.num_elements
        weight = working[parameter].padded(weights.buffer)
        state = tuple(each[start:end] for each in states)
        start = end
        if parameter.dtype == weight.dtype and _is_wide(parameter, place):
            state = tuple(each.to(weight.dtype) for each in state)
            yield place.num_elements, weight, state, None, False
        else:
            yield (
                place.num_elements,
                masters[end - place.num_elements : end],
                state,
                weight,
                parameter.dtype == weight.dtype,
            )


def _is_wide(parameter: Tensor, place: Place) -> bool:
    """Return whether the parameter, computed in its own dtype, is its own master."""
    return place.dtype == parameter.dtype and parameter.dtype in (torch.float32, torch.float64)


@torch.no_grad()
def _adopt(entry: Entry) -> None:
    """Give the master its value, and let a parameter that is wider than the working copy be a view of its master."""
    if entry.weight is None:
        return
    if not entry.separate and entry.parameter.dtype != entry.master.dtype:
        raise UnsupportedError(
            f"an OffloadOptimizer does not train weights of {entry.parameter.dtype} that are computed in"
            f" {entry.weight.dtype}",
            hint="convert the model to torch.float32 before it is wrapped",
        )
    entry.shaped(entry.master).copy_(entry.parameter)
    if not entry.separate:
        entry.parameter.data = apart(entry.shaped(entry.master))
