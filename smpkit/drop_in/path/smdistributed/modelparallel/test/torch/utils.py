"""`dump_model` and `verify`."""

from __future__ import annotations

from smpkit.drop_in import mirror

__getattr__, __dir__, __all__ = mirror("smpkit.torch.compat.debugging")
