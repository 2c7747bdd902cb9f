"""Random numbers that do not depend on where, when or how often a layer runs.

[Note: streams along the module tree] A call of a module draws from its caller's stream, like in plain PyTorch. When it
ends, that stream goes on from a number that follows from the one at its beginning and from the module's name, whatever
was drawn inside. A rank that skips the module goes on from there too: dropout is the same for every partition and
schedule, and what all ranks compute alike (LayerDrop's coin) comes out alike. Recomputation in backward repeats it
exactly, because checkpointing restores the caller's stream. `stream_seeds` says which number that is.

[Note: open and closed streams] Operations between units that draw (`F.dropout` in a module that lies on several ranks)
are calls too: a torch function mode makes each of them one. Such a caller's stream is *open*. Inside a unit the stream
is *closed*: operations draw from it at native speed. The lowest bit of a seed says that its stream is this rank's own
and closed: where a rank has its own samples, a unit begins with such a seed.

A recomputation in backward enters the mode again, so operations between units have the same streams then.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from smpkit.torch.core import devices
from smpkit.torch.core.status import begin_layer
from smpkit.torch.core.stream_seeds import Seeds, mix
from smpkit.torch.pipeline.parameters import refuse_as_data
from smpkit.torch.pipeline.stage_tensor import Current, StageTensor, microbatch_between_units

DRAWING: Final = frozenset(
    {
        *("dropout", "dropout1d", "dropout2d", "dropout3d", "dropout_"),
        *("alpha_dropout", "alpha_dropout_", "feature_alpha_dropout", "feature_dropout", "feature_dropout_"),
        *("rand_like", "randn_like", "randint_like", "bernoulli", "bernoulli_", "multinomial", "normal", "normal_"),
        *("uniform_", "random_", "exponential_", "cauchy_", "log_normal_", "geometric_", "poisson"),
        *("rrelu", "rrelu_", "gumbel_softmax", "scaled_dot_product_attention", "multi_head_attention_forward"),
    }
)
"""Operations on tensors that draw random numbers; those that make tensors (`rand`) run on every rank alike."""

_FACTORIES: Final = frozenset(
    {
        *("tensor", "zeros", "ones", "empty", "full", "zeros_like", "ones_like", "empty_like", "full_like"),
        *("new_zeros", "new_ones", "new_empty", "new_full"),
    }
)
_WATCHED: Final = DRAWING | _FACTORIES | frozenset({"__set__", "repeat"})
"""What the mode looks at. Torch shows the setter of `data` to modes only, not to `__torch_function__` of classes.

`repeat` makes queries for each sample of a weight (`queries.weight.unsqueeze(0).repeat(batch, 1, 1)` in DETRs).
"""
_STAGE_TENSORS: Final = (StageTensor,)
_T = TypeVar("_T")
_Generators = tuple[torch.Tensor, torch.Tensor | None]
_BENEATH: Final = object()
"""Stands for the mode where another one lies above it, so that it cannot be taken away."""

_NOTHING: Final = contextlib.nullcontext()
_CPU: Final = torch.default_generator

# The C functions behind torch.overrides, without its Python: every call of a layer uses them.
_depth_of_modes: Final[Callable[[], int]] = torch._C._len_torch_function_stack
_pop_mode: Final[Callable[[], Any]] = torch._C._pop_torch_function_stack
_push_mode: Final[Callable[[Any], None]] = torch._C._push_on_torch_function_stack


@functools.lru_cache(maxsize=1 << 16)
def _key_of(name: str) -> int:
    """Return the name of a call in 64 mixed bits."""
    return mix(0, zlib.crc32(name.encode()))


class RandomStreams:
    """The generators of this process during a step.

    Args:
        seed: common to the ranks of one model, tensor-parallel ones too, which `Seeds` tells apart where they have
            samples of their own; replicas differ, or they would drop the same activations.
        device: where layers run; its generator is seeded as well as the CPU's.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = seed
        self.step = 0
        self.active = False
        """Whether a training step runs; evaluation draws nothing, and outside a step the generators are the user's."""
        self.num_closed = 0
        """How many running calls have a closed stream although the mode still sees their operations."""
        self._step_seed = 0
        """What the seeds of the microbatches of the step that runs follow from."""
        self._device = devices.default_generator(device) if devices.is_asynchronous(device) else None
        """The generator itself: torch.cuda's functions for it take ten times as long, and each call needs it."""
        self._seeds = Seeds.for_this_rank()
        self._operation_streams = _OperationStreams(self)

    def state(self) -> _Generators:
        return _CPU.get_state(), None if self._device is None else self._device.get_state()

    def restore(self, state: _Generators) -> None:
        _CPU.set_state(state[0])
        if state[1] is not None and self._device is not None:
            self._device.set_state(state[1])

    @contextlib.contextmanager
    def training_step(self, *, training: bool) -> Iterator[None]:
        """Seed the generators while a training step runs, and restore their states afterwards."""
        if not training:
            yield
            return
        kept = self.state()
        self.step += 1
        self._step_seed = self._seeds.open(mix(mix(0, self.seed), self.step))
        self.active = True
        try:
            yield
        finally:
            self.active = False
            self.restore(kept)

    def call_between_units(self, function: Callable[..., _T], *args: Any) -> _T:
        """Call a function whose operations get streams, in this thread; see [Note: open and closed streams]."""
        _push_mode(self._operation_streams)
        try:
            return function(*args)
        finally:
            _pop_mode()

    def draws_by_calls(self) -> bool:
        """Return whether the stream is open: an operation that draws is then a call of its own."""
        return self.active and not self.num_closed and not _CPU.initial_seed() & 1

    def begin_microbatch(self, index: int) -> None:
        if self.active:
            self._seed_with(self._seeds.after(self._step_seed, index))

    def skip(self, name: str) -> None:
        """Move the stream past a call that another rank runs."""
        if self.active:
            self._seed_with(self._seeds.after(_CPU.initial_seed(), _key_of(name)))

    def _seed_with(self, seed: int) -> None:
        _CPU.manual_seed(seed)
        if self._device is not None:
            self._device.manual_seed(seed)

    def run(
        self, name: str, closed: bool, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Call a function; afterwards the caller's stream goes on from the number that follows from `name`.

        Args:
            closed: whether what happens inside draws from the stream as it is, as in a unit, and not by calls.
        """
        mode = later = None
        if closed:
            begin_layer(name)
            if _depth_of_modes():
                mode = _pop_mode()  # inside a unit, so that operations there run without Python
                if type(mode) is not _OperationStreams:  # `with torch.device(...)` lies above it
                    _push_mode(mode)
                    mode, self.num_closed = _BENEATH, self.num_closed + 1
        if self.active:
            seed = _CPU.initial_seed()
            later = self._seeds.after(seed, _key_of(name))
            # Whether to seed must follow from the generator alone, or a recomputation could decide otherwise.
            if closed and self._seeds.rank_salt and not seed & 1:
                self._seed_with(self._seeds.closed(seed))
        try:
            return function(*args, **kwargs)
        finally:
            if mode is _BENEATH:
                self.num_closed -= 1
            elif mode is not None:
                _push_mode(mode)
            if later is not None:
                self._seed_with(later)


class _OperationStreams(TorchFunctionMode):
    """Gives operations between units streams of their own, where they draw random numbers; notes fresh tensors."""

    def __init__(self, random: RandomStreams) -> None:
        super().__init__()
        self._random = random

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _WATCHED:
            if name == "__set__":
                refuse_as_data(func, args)
            elif name in _FACTORIES:
                fresh = func(*args, **(kwargs or {}))
                if Current.microbatch is not None:
                    Current.microbatch.note_fresh(fresh)
                return fresh
            elif name == "repeat":
                if (microbatch := microbatch_between_units()) and microbatch.stage.weight_of(args[0]) is not None:
                    return microbatch.run_operation(func, name, args, kwargs or {})
            elif self._random.draws_by_calls():
                return self._random.run(name, True, func, args, kwargs or {})
        if types == _STAGE_TENSORS:  # a shortcut: torch's dispatcher would call this next
            return StageTensor.__torch_function__(func, types, args, kwargs)
        return func(*args, **kwargs) if kwargs else func(*args)


def call_without_operation_streams(function: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
    """Call a function without the mode, so that operations run without Python."""
    mode = _pop_mode() if _depth_of_modes() else None
    if type(mode) is _OperationStreams:
        try:
            return function(*args, **kwargs)
        finally:
            _push_mode(mode)
    if mode is not None:
        _push_mode(mode)
    return function(*args, **kwargs)


def replayed_operation_streams() -> Callable[[], contextlib.AbstractContextManager[object]]:
    """Return a context manager for a forward and for its recomputation: operations have the same streams in both."""
    mode = _get_current_function_mode()  # type: ignore[no-untyped-call]
    return functools.partial(_with_mode, mode) if type(mode) is _OperationStreams else contextlib.nullcontext


def _with_mode(mode: _OperationStreams) -> contextlib.AbstractContextManager[object]:
    is_there = type(_get_current_function_mode()) is _OperationStreams  # type: ignore[no-untyped-call]
    return _NOTHING if is_there else mode
