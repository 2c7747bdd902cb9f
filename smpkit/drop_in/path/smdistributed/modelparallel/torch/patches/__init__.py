"""What SMP v1 offers in place of functions of torch."""

from __future__ import annotations

from . import checkpoint as checkpoint

__all__ = ["checkpoint"]
