"""`strategy="auto"` and `offload_activations: auto`: what each layer of a DistributedModel does, chosen for all ranks.

A step is one of `@smp.step`. Each pipeline stage chooses for itself: after the first steps its ranks tell each other
what they have measured in one all-reduce, so that all of them choose from the same numbers, in the same step. What may
be chosen follows from the configuration::

    offload_activations   layers of strategy "each"      layers of strategy "auto"
    false                 recompute                      keep, recompute
    true                  offload                        keep, offload
    auto                  recompute, offload             keep, recompute, offload

On a CPU `auto` offloads nothing: activations are in the memory of the host already.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from smpkit.plan.mesh import CommGroup
from smpkit.plan.tune.chain import Choice
from smpkit.torch.core.announce import announce
from smpkit.torch.core.microbatches import StepProgress
from smpkit.torch.core.module_call import ModuleCall
from smpkit.torch.core.runtime import WrappedModel, state
from smpkit.torch.core.step_participants import StepParticipant
from smpkit.torch.core.warn import warn_user
from smpkit.torch.memory.chooser import Chooser, count_choices, largest_of
from smpkit.torch.memory.measure import device_limit
from smpkit.torch.offload.engine import ActivationEngine
from smpkit.torch.offload.link import link_for
from smpkit.torch.recompute.layer import ChosenCheckpoint, ModuleCheckpoint
from smpkit.units import amount


class AutomaticActivations(StepParticipant):
    """Chooses for the layers of `model`, where it has layers to choose for; without an engine nothing offloads."""

    def __init__(self, model: WrappedModel, engine: ActivationEngine | None) -> None:
        self._model, self._engine = model, engine
        self._chooser: Chooser | None = None
        self._trains = False
        self._saved: Mapping[str, str] = {}
        self._names: tuple[str, ...] = ()
        """The paths of the layers of all ranks."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy as one that has yet to choose: the layers of a copied model are plain modules again."""
        return AutomaticActivations, (self._model, None)

    @property
    def choices(self) -> dict[str, Choice]:
        """What each layer of this rank does; empty before the first step that trains, or without such layers."""
        return {} if self._chooser is None else self._chooser.choices

    def saved(self) -> dict[str, str]:
        """Return the choices of this rank for a checkpoint; empty until they have been made."""
        if self._chooser is None or not self._chooser.is_done:
            return dict(self._saved)
        return {name: str(choice) for name, choice in self._chooser.choices.items()}

    def load(self, saved: Mapping[str, str]) -> None:
        """Take the choices of the job that saved them: at once, or when the first step shows the layers."""
        self._saved = dict(saved)
        if self._chooser is not None:
            self._take_saved(self._chooser)

    # --- the life of a step ------------------------------------------------------------------------------------------

    def begin_step(self, step: StepProgress) -> None:
        """Begin a step; every rank of the job is in the same one."""
        self._trains = step.training and torch.is_grad_enabled()
        if not self._trains:
            return
        chooser = self._chooser = self._chooser or self._new_chooser()
        if chooser is not None:
            chooser.begin_step()
            if chooser.facts is not None and state.dp_rank == 0:
                announce([_line(chooser)])
        if chooser is None or chooser.is_done:
            self._model.participants.remove(self)  # later steps cost nothing

    def end_step(self, step: StepProgress) -> None:
        """Note whether the step had a backward."""
        if self._trains and self._chooser is not None:
            self._chooser.end_step(had_backward=step.total_backwards > 0)

    def abandon_step(self, error: BaseException) -> None:  # noqa: ARG002 - that of all parts
        """Measure the next step in place of one that an exception ended."""
        if self._trains and self._chooser is not None:
            self._chooser.end_step(had_backward=False)

    # --- which layers ------------------------------------------------------------------------------------------------

    def _new_chooser(self) -> Chooser | None:
        """Find the layers, now that it is known which rank runs which module; None: this rank has none."""
        cfg = state.cfg
        marked = dict(_marked(self._model.module, offloads=cfg.offload_activations == "auto"))
        self._names = tuple(marked)
        if not marked and cfg.memory_budget_gib is not None:
            warn_user(
                "memory_budget_gib has no effect: there is no layer to choose for; call"
                ' smp.set_activation_checkpointing(layers, strategy="auto")',
            )
        here = {
            name: layer
            for name, layer in marked.items()
            if state.pp_size == 1 or state.pp_rank in ModuleCall.of(layer.module).pp_ranks
        }
        if not here:
            return None  # nor have the other ranks of this stage, so nobody waits for this one
        allowed = {Choice.KEEP, Choice.OFFLOAD if cfg.offload_activations is True else Choice.RECOMPUTE}
        if cfg.offload_activations == "auto" and self._engine is not None:
            allowed.add(Choice.OFFLOAD)
        chooser = Chooser(
            here,
            lambda: (*self._model.local_parameters(), *self._model.local_buffers()),
            link_for(state.device, cfg.timeout_seconds) if self._engine is None else self._engine.link,
            self._engine,
            limit_bytes=device_limit("memory_budget_gib", state.device, cfg.memory_budget_gib, state.local_size),
            allowed=frozenset(allowed),
            # Other stages choose in other steps, if they choose at all: what they wait for is not waited for here.
            agree=functools.partial(
                largest_of,
                group=state.process_group(CommGroup.DP_GROUP),
                device=torch.device("cpu"),
                what="the choice of what layers do with their activations",
            ),
            microbatches=cfg.microbatches,
            live=_planned_live(),
            any_optimizer=True,
        )
        state.reset_hooks.append(chooser.updates.handle.remove)  # the handle: it keeps no model alive
        if self._saved:
            self._take_saved(chooser)
        return chooser

    def _take_saved(self, chooser: Chooser) -> None:
        if missing := sorted(set(self._names) - self._saved.keys()):
            self._saved = {}
            warn_user(
                f"the checkpoint has no choice for `{missing[0]}`, so the first steps are measured again: it was saved"
                " with other layers, or before the choice",
            )
            return
        chooser.take({name: Choice(self._saved[name]) for name in chooser.layers})


def _line(chooser: Chooser) -> str:
    """Describe the choice of this stage (log line)."""
    assert chooser.facts is not None
    assert chooser.pick is not None
    counts = count_choices(chooser.choices.values())
    planned = chooser.facts.device_bytes(chooser.pick)
    return (
        f"Activations on pipeline rank {state.pp_rank}: of {len(chooser.layers)} layers {counts};"
        f" {amount(planned)} of {amount(chooser.facts.limits.device_bytes)} planned."
    )


def _marked(root: nn.Module, *, offloads: bool) -> Iterator[tuple[str, ChosenCheckpoint]]:
    """Yield the layers of all ranks to choose for, by path; of nested ones the outermost.

    `offloads`: also those that are checkpointed in any case, whose inputs may leave or stay.
    """
    seen: set[nn.Module] = set()
    for name, module in root.named_modules():
        call = ModuleCall.of(module)
        if module in seen or not isinstance(call.checkpointing, ModuleCheckpoint):
            continue
        seen.update(module.modules())
        if state.pp_size > 1 and not call.pp_ranks:
            continue  # it runs where its input is, now here and now there
        if offloads and not isinstance(call.checkpointing, ChosenCheckpoint):
            call.checkpointing = ChosenCheckpoint(module, call.checkpointing.preserve_rng_state)
            call.checkpointing.may_keep = False
        if isinstance(call.checkpointing, ChosenCheckpoint):
            yield name, call.checkpointing


def _planned_live() -> int:
    """Return how many microbatches the schedule may hold at a time."""
    cfg = state.cfg
    if state.pp_size == 1:
        return 1
    # A split backward holds a microbatch until its second half.
    halves = 2 if cfg.pipeline == "zero_bubble" else 1
    return min(halves * cfg.active_microbatches, cfg.microbatches)
