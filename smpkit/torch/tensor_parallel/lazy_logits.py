"""Outputs of Hugging Face models whose logits are gathered on first access.

Training reads the loss only. The logits of all classes are the largest values there are, so each tensor-parallel rank
keeps its classes until `output.logits` (or `output["logits"]`) is asked for, which all ranks of the group do together.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["with_lazy_logits"]


def with_lazy_logits(output: Any, gather: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a `ModelOutput` like `output`, whose `logits` are replaced by `gather(logits)` when they are looked at."""
    kind: Any = type(output)
    made = _lazy_class(kind)(**dict(OrderedDict.items(output)))
    vars(made)["_smp_gather"] = gather
    return made


@functools.cache
def _lazy_class(kind: Any) -> Any:
    return type(kind.__name__, (_LazyLogits, kind), {"__module__": kind.__module__, "_smp_kind": kind})


class _LazyLogits(OrderedDict[str, Any]):
    """What an output does before it hands its logits out."""

    _smp_kind: Any

    def _smp_gather_now(self) -> None:
        gather = vars(self).pop("_smp_gather", None)
        if gather is not None:
            self["logits"] = gather(vars(self)["logits"])

    def __getattribute__(self, name: str) -> Any:
        if name == "logits":
            self._smp_gather_now()
        return super().__getattribute__(name)

    def __getitem__(self, key: Any) -> Any:
        names = list(self.keys())
        if not isinstance(key, str):
            found = names[key]
            return self[found] if isinstance(found, str) else tuple(self[name] for name in found)
        if key == "logits":
            self._smp_gather_now()
        return dict.__getitem__(self, key)  # not Hugging Face's, which looks at every item

    def items(self) -> Any:
        self._smp_gather_now()
        return super().items()

    def values(self) -> Any:
        self._smp_gather_now()
        return super().values()

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self.keys() else default

    def __reduce__(self) -> Any:
        return self._smp_kind, tuple(getattr(self, name) for name in self._smp_kind.__dataclass_fields__)
