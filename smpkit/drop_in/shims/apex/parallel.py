"""Apex's data parallelism: torch's. And LARC."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smpkit.errors import UnsupportedError
from smpkit.torch.optim.gradient_norm import norms_of
from smpkit.torch.placement.dtensor import local_tensor_of

__all__ = ["LARC", "DistributedDataParallel", "Reducer", "SyncBatchNorm", "convert_syncbn_model"]

SyncBatchNorm = nn.SyncBatchNorm


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's, with Apex's arguments.

    Args:
        module: the model.
        delay_allreduce: average after backward, and so allow parameters without gradients.
        gradient_average: must be True.
        gradient_predivide_factor: of no importance: the result is the same.
        options: what tunes Apex's buckets; of no importance here.

    Raises:
        UnsupportedError: sums instead of averages.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        *,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        **options: Any,
    ) -> None:
        if not gradient_average:
            hint = "multiply the loss by the number of ranks"
            raise UnsupportedError("DistributedDataParallel averages gradients", hint=hint)
        super().__init__(module, find_unused_parameters=delay_allreduce)


def convert_syncbn_model(module: nn.Module, process_group: Any = None, channel_last: bool = False) -> nn.Module:
    """Return the model with batch norms that reckon over all ranks of the group."""
    converted: nn.Module = torch.nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)
    return converted


class Reducer:
    """Averages gradients over all ranks when it is told to.

    Args:
        module_or_grads_list: a model, which gets the first rank's weights at once, or the tensors to average.
    """

    def __init__(self, module_or_grads_list: nn.Module | Iterable[torch.Tensor]) -> None:
        self._module = module_or_grads_list if isinstance(module_or_grads_list, nn.Module) else None
        self._tensors = [] if isinstance(module_or_grads_list, nn.Module) else list(module_or_grads_list)
        if self._module is not None:
            for each in self._module.parameters():
                dist.broadcast(each.detach(), 0)

    def reduce(self) -> None:
        """Average the gradients that there are; all ranks call this."""
        grads = [each.grad for each in self._module.parameters()] if self._module is not None else self._tensors
        present = [each.detach() for each in grads if each is not None]
        for dtype in dict.fromkeys(each.dtype for each in present):
            alike = [each for each in present if each.dtype == dtype]
            flat = torch._utils._flatten_dense_tensors(alike)
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            whole = torch._utils._unflatten_dense_tensors(flat, alike)
            torch._foreach_copy_(alike, list(whole))


class LARC:
    """Give each tensor a learning rate in proportion to the norms of its weights and its gradient.

    The rate of a tensor is `trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)`. The optimizer inside does not
    decay weights itself; the decay is part of the gradient that it gets. Norms of divided tensors are of the whole.

    Args:
        optimizer: what takes the step; its methods and attributes are those of this object.
        trust_coefficient: how far a tensor may move, relative to its norm.
        clip: let the optimizer's own learning rate be the largest; False multiplies the two.
        eps: keeps the denominator from being 0.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trust_coefficient: float = 0.02,
        clip: bool = True,
        eps: float = 1e-8,
    ) -> None:
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.clip = clip
        self.eps = eps

    def __getattr__(self, name: str) -> Any:
        if name == "optim":  # not there yet: while it is copied, say
            raise AttributeError(name)
        return getattr(self.optim, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer inside."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optim.param_groups = groups

    def step(self, closure: Any = None) -> Any:
        """Scale the gradients, and let the optimizer take its step; `closure` is called before."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        decays = [group.get("weight_decay", 0.0) for group in self.param_groups]
        for group, decay in zip(self.param_groups, decays, strict=True):
            self._scale(group, decay)
            group["weight_decay"] = 0.0
        try:
            self.optim.step()
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                group["weight_decay"] = decay
        return loss

    @torch.no_grad()
    def _scale(self, group: dict[str, Any], decay: float) -> None:
        parameters = [each for each in group["params"] if each.grad is not None]
        if not parameters:
            return
        weights = [local_tensor_of(each) for each in parameters]
        gradients = [local_tensor_of(each.grad) for each in parameters]
        ours, theirs = norms_of(weights, parameters, 2.0), norms_of(gradients, parameters, 2.0)
        rates = self.trust_coefficient * ours / (theirs + decay * ours + self.eps)
        if self.clip:
            rates = (rates / group["lr"]).clamp(max=1.0)
        # Without weights or without a gradient there is no ratio, and the step is the optimizer's, without decay.
        adapts = (ours != 0) & (theirs != 0)
        torch._foreach_add_(gradients, torch._foreach_mul(weights, list((decay * adapts.to(ours)).unbind())))
        torch._foreach_mul_(gradients, list(torch.where(adapts, rates, 1.0).unbind()))
