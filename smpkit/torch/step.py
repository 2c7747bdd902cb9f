"""`@smp.step`: run a function once per microbatch, and collect its outputs over all microbatches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, ParamSpec, Protocol, TypeAlias, TypeVar, overload

import torch

from smpkit.errors import UsageError
from smpkit.observe.values import LOSS
from smpkit.torch.core.microbatches import MicrobatchCall, Splitter, StepProgress
from smpkit.torch.core.runtime import state
from smpkit.torch.core.step_participants import StepParticipants
from smpkit.torch.core.tensor_spec import tensors_in
from smpkit.torch.core.tree import children, rebuild
from smpkit.torch.pipeline.one_stage import OneStage
from smpkit.torch.recording.recorder import latest_recorder, note_training
from smpkit.torch.recording.step_values import Label, current_values

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Tensors: TypeAlias = tuple[torch.Tensor, ...]
_NOBODY: Final = StepParticipants()
_WITHOUT_MODEL: Final = OneStage(None, _NOBODY), _NOBODY


class StepFunction(Generic[_P, _R]):
    """A step function: called with a batch, it runs its body once per microbatch.

    Not a descriptor: looked up on an object it does not bind `self`. SMP v1 behaved so, and public scripts decorate a
    method without `self` and call it through `self.train_step(model, ...)`.
    """

    def __init__(
        self,
        function: Callable[_P, Any],
        non_split_inputs: Sequence[str] | None = None,
        input_split_axes: Mapping[str, int] | None = None,
        detach_outputs: bool = True,
    ) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._name: str = getattr(function, "__name__", "step")  # a functools.partial has none
        self._splitter = Splitter(function, tuple(non_split_inputs or ()), dict(input_split_axes or {}))
        self._detach_outputs = detach_outputs
        self._backwards_per_microbatch: int | None = None

    def __repr__(self) -> str:
        return f"<smp.step {self._function.__qualname__}>"

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Run the body once per microbatch; gradients are final when this returns.

        Returns:
            What the body returned, in the same containers: each tensor as a StepOutput, anything else as a list over
            microbatches.

        Raises:
            UsageError: inside another step, or with a batch that `microbatches` does not divide.
        """
        recorder = latest_recorder()
        if recorder is None:
            return self._call(args, kwargs)
        recorder.begin_step(self._name)
        try:
            outputs = self._call(args, kwargs)
        except BaseException as error:
            recorder.abandon_step(error)
            raise
        recorder.end_step()
        return outputs

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _R:
        count = state.cfg.microbatches
        model = state.model
        if state.step is not None:
            raise UsageError(
                f"`{self._name}` was called inside another step",
                hint="a step function calls plain functions",
            )
        engine, participants = _WITHOUT_MODEL if model is None else (model.engine, model.participants)
        if model is not None:
            args, kwargs = model.step_inputs(self._name, args, kwargs)
        calls = self._splitter.split(args, kwargs, count, state.device)
        state.step = run = StepProgress(
            count,
            expected_backwards=self._backwards_per_microbatch,
            training=model is not None and model.training,
            detach_outputs=self._detach_outputs,
        )
        try:
            if model is not None and not model.is_prepared:
                model.prepare(self._function, calls[0])
            for begin in participants.begin_step:
                begin(run)
            outputs = engine.run(self, self._body, calls, run)
        except BaseException as error:
            engine.abandon(error)
            for abandon in participants.abandon_step:
                abandon(error)
            raise
        finally:
            state.step = None
        self._backwards_per_microbatch = run.expected_backwards
        for end in participants.end_step:
            end(run)
        if run.total_backwards:
            note_training(self._splitter.size_of, args, kwargs)
        collated: _R = collate(outputs)
        if state.rank == 0:
            self._label(collated, trained=bool(run.total_backwards))
        return collated

    def _label(self, collated: Any, *, trained: bool) -> None:
        """Name the scalars that the step has returned, for the record of their means when the script reduces them.

        What the first training step returns alone is the loss; names from other steps begin with the step's own.
        """
        recorder = latest_recorder()
        if recorder is None:
            return
        trains = trained and current_values().is_main(self._name)
        parts = {0: collated} if isinstance(collated, StepOutput) else children(collated) or {}
        for key, part in parts.items():
            if isinstance(part, StepOutput) and part.is_scalar:
                if isinstance(key, str):
                    name = key if trains else f"{self._name}/{key}"
                else:
                    name = f"{self._name}[{key}]" if key else LOSS if trains else self._name
                part.label = Label(name, recorder.meter.num_steps)

    def _body(self, call: MicrobatchCall) -> Any:
        """Run the function for one microbatch."""
        output = self._function(*call.args, **call.kwargs)
        if not isinstance(output, torch.Tensor):
            tensors_in(output)  # reads lazy logits, so that their collective runs within this microbatch
        return output


class _Decorator(Protocol):
    """Makes a function a step; its return type tells what the step returns."""

    @overload
    def __call__(self, function: Callable[_P, torch.Tensor], /) -> StepFunction[_P, StepOutput]: ...
    @overload
    def __call__(self, function: Callable[_P, _Tensors], /) -> StepFunction[_P, tuple[StepOutput, ...]]: ...
    @overload
    def __call__(self, function: Callable[_P, Any], /) -> StepFunction[_P, Any]: ...


@overload
def step(function: Callable[_P, torch.Tensor], /) -> StepFunction[_P, StepOutput]: ...
@overload
def step(function: Callable[_P, _Tensors], /) -> StepFunction[_P, tuple[StepOutput, ...]]: ...
@overload
def step(function: Callable[_P, Any], /) -> StepFunction[_P, Any]: ...
@overload
def step(
    *,
    non_split_inputs: Sequence[str] | None = None,
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> _Decorator: ...
def step(
    function: Callable[..., Any] | None = None,
    /,
    *,
    non_split_inputs: Sequence[str] | None = None,
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> Any:
    """Make a function a training or evaluation step (the decorator of the same name in SMP v1).

    ::

        @smp.step
        def train_step(model, tokens, targets):
            loss = F.cross_entropy(model(tokens), targets)
            model.backward(loss)
            return loss

        loss = train_step(model, tokens, targets).reduce_mean()

    Each microbatch has its own lists and dicts: what the function writes into one, its caller does not see. In them
    each tensor is cut, so a list of samples (a detector's pictures and targets, say) cuts itself::

        class Samples(list):
            def smp_slice(self, num_mb, mb, axis):
                size = len(self) // num_mb
                return list(self[mb * size : (mb + 1) * size])

    Args:
        non_split_inputs: names of arguments that each microbatch gets whole.
        input_split_axes: batch axis by argument name; 0 where not named.
        detach_outputs: cut returned tensors off their graph; over a pipeline they always are.
    """

    def decorate(body: Callable[..., Any]) -> Any:
        return StepFunction(body, non_split_inputs, input_split_axes, detach_outputs)

    return decorate if function is None else decorate(function)


class StepOutputError(UsageError, AttributeError, TypeError):
    """A StepOutput was used like one tensor, but it holds one for each microbatch."""


class StepOutput:
    """One returned tensor over all microbatches (the class of the same name in SMP v1).

    `outputs` is the list of tensors in microbatch order. It is no tensor: the methods of one, such as `.item()`, and
    `==` raise an error that says how to get one; operators and torch's functions raise Python's own TypeError.
    """

    label: Label | None = None
    """The name under which the mean of a scalar is recorded."""

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        self.outputs = list(outputs)

    @property
    def is_scalar(self) -> bool:
        """Whether each microbatch has one number."""
        return self.outputs[0].dim() == 0 and not self.outputs[0].is_complex()

    def __repr__(self) -> str:
        shapes = {tuple(output.shape) for output in self.outputs}
        return f"StepOutput({len(self.outputs)} microbatches, shape {' or '.join(map(str, sorted(shapes)))})"

    def _refused(self, what: str) -> StepOutputError:
        hint = "`.reduce_mean()` gives their mean"
        if not self.is_scalar:
            hint = f"`.concat()` gives those of the whole batch, {hint}"
        return StepOutputError(f"{what} is not for a StepOutput, which holds a tensor for each microbatch", hint=hint)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"'StepOutput' object has no attribute '{name}'")
        raise self._refused(f"`.{name}`")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (int, float, torch.Tensor)):
            raise self._refused("`==`")  # Python would say that they differ
        return self is other

    __hash__ = object.__hash__

    def detach(self) -> StepOutput:
        """Return the same values cut off their graph, as `torch.Tensor.detach` does."""
        return StepOutput([output.detach() for output in self.outputs])

    def reduce_mean(self) -> torch.Tensor:
        """Average over microbatches; all outputs must have one shape, which is also the result's."""
        if len(self.outputs) == 1 and self.outputs[0].is_floating_point():
            mean = self.outputs[0].clone()
        else:
            stacked = torch.stack(self.outputs)
            if not (stacked.is_floating_point() or stacked.is_complex()):
                stacked = stacked.to(torch.get_default_dtype())  # counts of correct answers are averaged too
            mean = stacked.mean(0)
        if self.label is not None:
            current_values().note(self.label, mean)
        return mean

    def reduce_sum(self) -> torch.Tensor:
        """Add over microbatches; all outputs must have one shape, which is also the result's."""
        return torch.stack(self.outputs).sum(0)

    def concat(self) -> torch.Tensor:
        """Join along axis 0, as the whole batch would have given it; scalars become a vector over microbatches."""
        if self.outputs[0].dim() == 0:
            return self.stack()
        return torch.cat(self.outputs)

    def stack(self) -> torch.Tensor:
        """Put the microbatches on a new axis 0: `[microbatches, ...]`."""
        return torch.stack(self.outputs)


class NoTensors(list[Any]):
    """What a function that returns nothing, or a number, has returned, as in SMP v1: a list over microbatches."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(StepOutput, name):
            raise AttributeError(f"'list' object has no attribute '{name}'")
        returned = "None" if self[0] is None else f"numbers ({type(self[0]).__name__})"
        message = f"there is nothing for `.{name}` here: the function of the step returned {returned}"
        raise StepOutputError(message, hint="end it with `return loss`, the tensor")


def collate(values: Sequence[Any]) -> Any:
    """Turn what the microbatches returned into one value of the same structure.

    A tensor becomes a StepOutput and containers keep their type; anything else, `None` included, becomes a plain list
    over microbatches, and so does a container whose keys or length differ from one microbatch to the next.
    """
    first = values[0]
    if all(value is None for value in values) or all(isinstance(value, int | float) for value in values):
        return NoTensors(values)
    if all(isinstance(value, torch.Tensor) for value in values):
        return StepOutput(values)
    # Sets have no order: the third member in one microbatch does not belong to the third one in another.
    if isinstance(first, set | frozenset) or any(type(value) is not type(first) for value in values):
        return list(values)
    parts = [children(value) for value in values]
    keys = None if parts[0] is None else list(parts[0])
    if keys is None or any(part is None or list(part) != keys for part in parts):
        return list(values)
    return rebuild(first, {key: collate([part[key] for part in parts if part is not None]) for key in keys})
