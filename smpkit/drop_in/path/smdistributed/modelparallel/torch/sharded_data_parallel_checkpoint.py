"""What scripts save beside checkpoints of sharded data parallelism."""

from __future__ import annotations

from smpkit.drop_in import mirror

__getattr__, __dir__, __all__ = mirror("smpkit.torch.compat.sharded_checkpoint")
