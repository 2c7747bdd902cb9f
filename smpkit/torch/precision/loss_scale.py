"""How much the loss is multiplied with, so that gradients in float16 neither vanish nor overflow.

A dynamic scale tries for the largest that works: it shrinks when a gradient is not finite, and grows after a window of
steps in which all were (names and rules are SMP v1's, which are Apex's)::

    scale    2^32 ──x──► 2^31 ──x──► 2^30 ── scale_window good steps ──► 2^31 ──x──► ...      x: a step is skipped

With `delayed_shift` above 1 that many overflows are forgiven (each skips its step all the same) before one shrinks it.
All ranks of a model skip a step together, or none does (`all_reduce_found_inf`): else their weights, and their scales,
would differ from then on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

import torch
import torch.distributed as dist

from smpkit.errors import UsageError
from smpkit.plan.mesh import CommGroup
from smpkit.torch.core.runtime import state
from smpkit.torch.distributed.deadline import waiting


class StaticLossScaler:
    """The same scale in every step."""

    at_minimum: Final = True

    def __init__(self, scale: float = 1.0) -> None:
        self.loss_scale: Final = scale

    def update_scale(self, overflow: bool) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {"loss_scale": self.loss_scale}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Do nothing: the script decides what the scale is."""


@dataclass
class DynamicLossScaler:
    """A scale that shrinks when a gradient overflows and grows when none has for a while.

    Args:
        init_scale: the first scale.
        scale_factor: what the scale is divided by or multiplied with.
        scale_window: the number of steps in a row without overflow after which the scale grows.
        min_scale: the scale does not go below.
        delayed_shift: how many overflows it takes to shrink the scale ("hysteresis").
        consecutive_hysteresis: count only overflows in a row; else a good step in between forgives nothing, and only
            growth starts the count anew.

    Raises:
        UsageError: a value out of its range.
    """

    init_scale: float = 2.0**32
    scale_factor: float = 2.0
    scale_window: int = 1000
    min_scale: float = 1.0
    delayed_shift: int = 1
    consecutive_hysteresis: bool = False

    def __post_init__(self) -> None:
        for name in ("init_scale", "min_scale", "scale_window", "delayed_shift"):
            value = getattr(self, name)
            if not (0 < value < math.inf):
                raise UsageError(f"`{name}` of the loss scale must be more than 0, got {value!r}")
        if not 1 < self.scale_factor < math.inf:
            raise UsageError(f"`scale_factor` of the loss scale must be more than 1, got {self.scale_factor!r}")
        self._scale = float(self.init_scale)
        self._forgiven_left = self.delayed_shift - 1
        self._good_steps = 0

    @property
    def loss_scale(self) -> float:
        """What the loss of the next backward is multiplied with."""
        return self._scale

    @property
    def at_minimum(self) -> bool:
        """Whether an overflow would not make the scale smaller."""
        return self._scale <= self.min_scale

    def update_scale(self, overflow: bool) -> None:
        """Adapt the scale to whether a gradient of the latest step was not finite."""
        if overflow:
            self._good_steps = 0
            if self._forgiven_left:
                self._forgiven_left -= 1
            else:
                self._scale = max(self._scale / self.scale_factor, self.min_scale)
            return
        self._good_steps += 1
        grows = self._good_steps == self.scale_window
        if grows:
            self._good_steps = 0
            self._scale *= self.scale_factor
        if grows or self.consecutive_hysteresis:
            self._forgiven_left = self.delayed_shift - 1

    def state_dict(self) -> dict[str, Any]:
        return {
            "loss_scale": self._scale,
            "good_steps": self._good_steps,
            "forgiven_left": self._forgiven_left,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where `state_dict()` was taken, or from the value of a static scale."""
        self._scale = max(float(state_dict["loss_scale"]), self.min_scale)
        self._good_steps = int(state_dict.get("good_steps", 0)) % self.scale_window
        self._forgiven_left = min(int(state_dict.get("forgiven_left", self.delayed_shift)), self.delayed_shift - 1)


LossScaler = StaticLossScaler | DynamicLossScaler


def loss_scaler_of(static: float | None, dynamic: bool, arguments: Mapping[str, Any]) -> LossScaler:
    """Return what the arguments of `smp.DistributedOptimizer` ask for.

    Args:
        static: the scale if it is not dynamic; None is 1.
        arguments: of DynamicLossScaler; SMP v1's scripts pass them as one dict, `dynamic_loss_args`.
    """
    settings = dict(arguments)
    settings.update(settings.pop("dynamic_loss_args", None) or {})
    known = [field.name for field in fields(DynamicLossScaler)]
    if unknown := sorted(settings.keys() - set(known)):
        raise UsageError(
            f"DistributedOptimizer has no argument {', '.join(f'`{name}`' for name in unknown)}",
            hint=f"a dynamic loss scale takes {', '.join(f'`{name}`' for name in known)}",
        )
    if dynamic:
        return DynamicLossScaler(**settings)
    scale = 1.0 if static is None else float(static)
    if not 0 < scale < math.inf:
        raise UsageError(f"static_loss_scale must be more than 0, got {static!r}")
    return StaticLossScaler(scale)


def group_of_all_gradients() -> dist.ProcessGroup:
    """Return the group whose ranks have the gradients of the whole model between them."""
    # Reduced gradients are equal on all replicas, so the ranks of one model are enough. With sharded states each
    # replica has the gradients of a part only.
    cfg = state.cfg
    sharded = cfg.ddp and (cfg.shard_optimizer_state or cfg.sharded_data_parallel_degree > 1)
    return state.process_group(CommGroup.WORLD if sharded else CommGroup.MP_GROUP)


def all_reduce_found_inf(found_inf: torch.Tensor) -> torch.Tensor:
    """Return the largest `found` (1 for a gradient that is not finite, else 0) of all ranks; all of them call this."""
    if not state.initialized:
        return found_inf
    group = group_of_all_gradients()
    if group.size() > 1:
        with waiting("the agreement whether all gradients are finite", group):
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=group)
    return found_inf
