"""Run a step once before training, on tensors without data, and without leaving a trace in the model.

Fake tensors have shapes and no memory, so the run needs neither a GPU nor time, and gives the same on every machine: on
a laptop, which has none, and in the job, whose step works on GPUs.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from smpkit.torch.core import devices
from smpkit.torch.core.runtime import state
from smpkit.torch.core.tensor_spec import map_tensors, tensors_in
from smpkit.torch.placement.delayed import is_delayed


@dataclass(frozen=True)
class TrialStep:
    """A step function and the arguments of one microbatch, to run once before training."""

    body: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __call__(self) -> Any:
        """Run forward only: `model.backward` does nothing meanwhile, and `smp.is_tracing()` is true.

        With gradients, also where the first step of a job is one without: training keeps activations.
        """
        state.tracing = True
        try:
            with torch.enable_grad():
                return self.body(*self.args, **self.kwargs)
        finally:
            state.tracing = False


def run_fake(root: nn.Module, step: TrialStep) -> None:
    """Run a step with fake arguments and a fake model, on the device of the arguments.

    The step will run there, though the weights may still be elsewhere: each rank moves its own once it knows them.
    """
    mode, arguments = FakeTensorMode(allow_non_fake_inputs=True), (step.args, step.kwargs)
    places = {tensor.device for tensor in tensors_in(arguments) if not isinstance(tensor, nn.Parameter)}
    device = min(places, key=lambda place: place.type == "cpu", default=devices.current_device())

    @functools.cache  # a tensor with several names gets one fake
    def fake_of_model(tensor: torch.Tensor) -> torch.Tensor:
        with mode, torch.no_grad():
            if is_delayed(tensor):  # one element, expanded: results would get its strides of 0
                value = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            else:
                value = mode.from_tensor(tensor).detach().to(device)
        if not isinstance(tensor, nn.Parameter):
            return value
        parameter = nn.Parameter(value, requires_grad=tensor.requires_grad)
        for name, attribute in vars(tensor).items():
            vars(parameter).setdefault(name, attribute)  # not those that a fake tensor has of its own
        return parameter

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return fake_of_model(tensor) if isinstance(tensor, nn.Parameter) else mode.from_tensor(tensor)

    args, kwargs = map_tensors(fake, arguments)
    try:
        with restoring_model(root, fake_of_model), mode:
            TrialStep(step.body, args, kwargs)()
    finally:
        _clear_caches_of_fakes()


def _clear_caches_of_fakes() -> None:
    """Clear the caches of functions that have kept a fake tensor: tables of positions, in models of transformers."""
    for each in gc.get_objects():
        if type(each) is functools._lru_cache_wrapper:
            kept = [value for value in gc.get_referents(each) if isinstance(value, _CACHED)]
            if any(isinstance(tensor, FakeTensor) for tensor in tensors_in(kept)):
                each.cache_clear()


_CACHED: Final = (torch.Tensor, tuple, list, dict)
_MUTABLE_CONTAINERS: Final = frozenset({list, deque, dict, OrderedDict, defaultdict, set})


@contextlib.contextmanager
def restoring_model(root: nn.Module, stand_in: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Restore the model and the random number generators after a trial of the step on this rank only.

    Forward may change buffers (running statistics), set attributes (a mask kept for the next call), append to lists
    and register hooks. If the generators were not restored, a step that draws random numbers would draw others here
    than on the ranks that ran no trial, and could take another path.

    Args:
        stand_in: returns what is in the place of a parameter or buffer meanwhile.
    """
    saved = [(module, dict(vars(module))) for module in root.modules()]
    # Among them those of the parameters and buffers.
    containers = [
        value for _, attributes in saved for value in attributes.values() if type(value) in _MUTABLE_CONTAINERS
    ]
    contents = [copy.copy(container) for container in containers]
    python, numpy = random.getstate(), np.random.get_state()
    try:
        for module, _ in saved:
            places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for place in places:
                place.update({name: None if tensor is None else stand_in(tensor) for name, tensor in place.items()})
        with devices.fork_rng(devices.current_device()):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for module, attributes in saved:
            vars(module).clear()
            vars(module).update(attributes)
        for container, content in zip(containers, contents, strict=True):
            container.clear()
            (container.extend if isinstance(container, list | deque) else container.update)(content)
