"""Find scripts that do not train: `optimizer.step()` after forward passes, without any backward and any gradient.

A forgotten `model.backward(loss)` costs nothing but the training: losses are printed, checkpoints saved, and no weight
has changed. torch's optimizers skip parameters without a gradient and say nothing.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from smpkit.errors import UsageError
from smpkit.torch.core.microbatches import StepProgress
from smpkit.torch.core.runtime import state
from smpkit.torch.core.step_participants import StepParticipant
from smpkit.torch.core.warn import warn_user

__all__ = ["UpdateCheck"]


class UpdateCheck(StepParticipant):
    """Counts a model's training passes, and checks that updates of its parameters follow a backward.

    Every optimizer that has a parameter of the model is checked, wrapped or not, until `smp.shutdown()`.

    Args:
        module: the user's model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._forwards = self.num_backwards = 0
        # Every pipeline rank calls `model.backward`, also one whose parameters get no gradient.
        self._at_last_update: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._has_warned = False
        # A weak reference: torch's hooks outlive the model.
        reference = weakref.ref(self)
        handle = register_optimizer_step_pre_hook(lambda optimizer, *_: _check(reference, optimizer))
        state.reset_hooks.append(handle.remove)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy as a new check: that of a copied model knows no optimizer yet."""
        return UpdateCheck, (self._module,)

    def begin_outside_step(self, training: bool) -> None:  # noqa: ARG002 - that of all parts
        self.begin_step()

    def begin_step(self, step: StepProgress | None = None) -> None:  # noqa: ARG002 - that of all parts
        """Count a step, or a forward outside one, unless it cannot be meant for training."""
        if torch.is_grad_enabled() and self._module.training:
            self._forwards += 1

    def check(self, optimizer: Any) -> None:
        """Check an update that begins.

        Raises:
            UsageError: there were training passes, and the job's first backward is still to come.
        """
        inside = getattr(optimizer, "optimizer", optimizer)  # one count for a wrapper and what it wraps
        forwards, backwards = self._at_last_update.get(inside, (0, 0))
        self._at_last_update[inside] = self._forwards, self.num_backwards
        # Without a forward there was nothing to train on: loops that bring a scheduler to a later epoch do that.
        if self._forwards == forwards or self.num_backwards > backwards or not self._lacks_gradients(optimizer):
            return
        if self.num_backwards == 0:
            raise UsageError(
                "optimizer.step() was called after training passes, but no backward has run: no weight would change",
                hint="call `model.backward(loss)` in the function decorated with @smp.step; passes that are not for"
                " training run under `torch.no_grad()` or `model.eval()`",
            )
        if not self._has_warned:  # a script may leave out the backward of a batch on purpose
            self._has_warned = True
            warn_user("optimizer.step() changes no weight: no backward has run since the step before it")

    def _lacks_gradients(self, optimizer: Any) -> bool:
        """Tell whether an optimizer of this model would update nothing on this rank."""
        given = [each for group in optimizer.param_groups for each in group["params"]]
        own = list(self._module.parameters())
        ids = set(map(id, own))
        if not any(each.requires_grad for each in own) or not any(
            id(each) in ids or id(_weight_of(each)) in ids for each in given
        ):
            return False
        return all(each.grad is None for each in (*given, *own))


def _weight_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the model's weight behind a master weight; else the parameter itself."""
    masters = None if state.optimizer is None else state.optimizer.masters
    return parameter if masters is None else masters.model_parameter_of(parameter)


def _check(reference: weakref.ref[UpdateCheck], optimizer: torch.optim.Optimizer) -> None:
    found = reference()
    if found is not None:
        found.check(optimizer)
