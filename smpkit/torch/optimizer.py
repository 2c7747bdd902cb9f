"""`smp.DistributedOptimizer`: a real `torch.optim.Optimizer` around the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from smpkit.errors import UnsupportedError, UsageError
from smpkit.torch.gathering import merge_everywhere
from smpkit.torch.model import PARTIAL_KEY
from smpkit.torch.optimizer_states import completed, listed, merged, united
from smpkit.torch.sharded_state import StateShards
from smpkit.torch.state import state
from smpkit.torch.unread import read_now

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer(torch.optim.Optimizer):
    """Wrap an optimizer for training under an SMP v1 configuration (the class of the same name in SMP v1).

    It shares `param_groups` and `state` with the optimizer inside, so learning-rate schedulers, gradient scalers and
    hooks may be given either. It may be made before or after the model is wrapped, and may wrap any object that has
    `param_groups`, `state`, `step` and `zero_grad`.

    Args:
        optimizer: the optimizer to wrap.
        static_loss_scale, dynamic_loss_scale, dynamic_loss_args: act with `fp16` only; scripts pass them always.

    Raises:
        UsageError: before `smp.init()`, or for something that is no optimizer.
    """

    def __init__(
        self,
        optimizer: Any,
        static_loss_scale: float | None = 1.0,
        dynamic_loss_scale: bool = False,
        **dynamic_loss_args: Any,
    ) -> None:
        # torch.optim.Optimizer.__init__ is left out: it would make param_groups and state of its own, and a scheduler
        # that holds this object would change the learning rate of a copy.
        _check(optimizer)
        self.optimizer = optimizer
        state.optimizer = self

    _is_accelerate_prepared = True
    """Accelerate has nothing to add: its own wrapper would hide the methods that SMP v1 added."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was left out because gradients had overflowed (accelerate's name for it)."""
        return bool(getattr(self, "overflow", False))

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # copy and pickle look before __init__ has run
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def defaults(self) -> dict[str, Any]:
        defaults: dict[str, Any] = getattr(self.optimizer, "defaults", {})
        return defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self.optimizer.defaults = value

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer}

    def __setstate__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update this rank's parameters."""
        if state.model is not None:
            state.model.run_post_step_hooks()
        shards = _shards()
        if shards is None:
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)
        if isinstance(self.optimizer, torch.optim.LBFGS):
            raise UnsupportedError(
                "LBFGS looks at all parameters at once, but shard_optimizer_state gives each rank some of them",
                hint="remove shard_optimizer_state, or use another optimizer",
            )
        with shards.only_owned():
            result = self.optimizer.step() if closure is None else self.optimizer.step(closure)
        shards.spread()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of this rank's parameters."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole optimizer state, in torch's layout; all ranks of a pipeline call this.

        With `shard_optimizer_state` all data-parallel ranks call it as well.
        """
        result = self.orig_state_dict()
        if _shards() is not None:
            result = {**result, "state": merged(result["state"], self._parameters())}
        if state.pp_size == 1:
            return result
        return {**result, "state": merge_everywhere(result["state"])}

    def orig_state_dict(self) -> dict[str, Any]:
        """Return the state in torch's layout, as it is on this rank."""
        read_now()
        result: dict[str, Any] = self.optimizer.state_dict()
        return result

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """Return this rank's state, plus `_smp_is_partial` = True.

        Args:
            gather_if_shard: with `shard_optimizer_state`, collect the shards of the ranks of RDP_GROUP, all of which
                call this: on rdp_rank 0 `["state"]` is then a list by rdp_rank. Else it is this rank's own shard.
        """
        own = {**self.orig_state_dict(), PARTIAL_KEY: True}
        if gather_if_shard and _shards() is not None:
            own["state"] = listed(own["state"])
        return own

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a full or partial state dict; for a partial one all ranks of a pipeline call this.

        With `shard_optimizer_state` all data-parallel ranks call it for a partial one; it may come from any number of
        them.
        """
        read_now()
        values = {key: value for key, value in state_dict.items() if key != PARTIAL_KEY}
        if "state" in values:
            values["state"] = united(values["state"])
        if state.pp_size > 1 and state_dict.get(PARTIAL_KEY):
            values["state"] = merge_everywhere(values["state"])
        shards = _shards()
        if shards is not None:
            if state_dict.get(PARTIAL_KEY):
                values["state"] = completed(values["state"], self._parameters(), shards.owns)
            values["state"] = {n: each for n, each in values["state"].items() if shards.owns(self._parameters()[n])}
        self.optimizer.load_state_dict(values)
        self.keep_own_states()

    def keep_own_states(self) -> None:
        """Let go of the states of parameters that other ranks hold or own, and keep the others beside theirs."""
        model = state.model
        if model is None or not model.partitioned or (model.pipeline is None and _shards() is None):
            return
        for parameter, values in list(self.state.items()):
            if not model.owns(parameter):
                del self.state[parameter]
                continue
            for key, value in values.items():
                # Step counts stay where the optimizer put them; moments lie beside their parameter.
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    values[key] = value.to(parameter.device)

    def _parameters(self) -> list[torch.Tensor]:
        """Return the parameters by the numbers that state dicts give them."""
        return [parameter for group in self.param_groups for parameter in group["params"]]


def _shards() -> StateShards | None:
    """Return who owns which parameter, where the optimizer state is sharded and this rank's part of the model known."""
    model = state.model
    return None if model is None or model.data_parallel is None else model.data_parallel.shards


def _check(optimizer: Any) -> None:
    if not state.initialized:
        raise UsageError("DistributedOptimizer was made before smp.init()", hint="call `smp.init()` first")
    if isinstance(optimizer, DistributedOptimizer):
        raise UsageError("this optimizer is a DistributedOptimizer already", hint="wrap an optimizer once")
    missing = [name for name in ("param_groups", "state", "step", "zero_grad") if not hasattr(optimizer, name)]
    if missing:
        raise UsageError(
            f"{type(optimizer).__name__} is no optimizer: it has no {', '.join(f'`{n}`' for n in missing)}"
        )
