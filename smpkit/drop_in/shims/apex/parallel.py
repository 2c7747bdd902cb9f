"""Apex's data parallelism: torch's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from smpkit.errors import UnsupportedError

__all__ = ["DistributedDataParallel", "SyncBatchNorm", "convert_syncbn_model"]

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
