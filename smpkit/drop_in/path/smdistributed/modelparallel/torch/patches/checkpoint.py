"""`checkpoint` and `checkpoint_sequential`, where SMP v1's documentation imports them from."""

from __future__ import annotations

from smpkit.torch import checkpoint, checkpoint_sequential

__all__ = ["checkpoint", "checkpoint_sequential"]
