"""The module beside the decorator of the same name: `StepOutput`."""

from __future__ import annotations

from smpkit.drop_in import mirror

__getattr__, __dir__, __all__ = mirror("smpkit.torch.step")
