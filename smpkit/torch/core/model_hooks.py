"""The hooks that scripts register on their model: each is called once, with the model and its optimizer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.utils.hooks import RemovableHandle

from smpkit.torch.core.arguments import check_callable
from smpkit.torch.core.runtime import state
from smpkit.torch.core.step_participants import StepParticipant

if TYPE_CHECKING:
    from smpkit.torch.core.microbatches import StepProgress

__all__ = ["ModelHooks"]

_Registry = OrderedDict[int, Callable[..., object]]


class ModelHooks(StepParticipant):
    """Hooks for the time after partitioning and for the end of a step."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.post_partition: _Registry = OrderedDict()
        self.post_step: _Registry = OrderedDict()

    def register(self, registry: _Registry, hook: Callable[..., object]) -> RemovableHandle:
        """Add a hook to one of the two."""
        check_callable("a hook", hook)
        handle = RemovableHandle(registry)
        registry[handle.id] = hook
        return handle

    def run(self, registry: _Registry) -> None:
        """Call the hooks of one of the two, and forget them."""
        while registry:
            registry.pop(next(iter(registry)))(self._model, state.optimizer)

    def begin_step(self, step: StepProgress) -> None:  # noqa: ARG002 - that of all parts
        if self.post_partition:
            self.run(self.post_partition)

    def begin_outside_step(self, training: bool) -> None:  # noqa: ARG002 - that of all parts
        self.run(self.post_partition)

    def end_step(self, step: StepProgress) -> None:  # noqa: ARG002 - that of all parts
        if self.post_step:
            self.run(self.post_step)
