"""Count what ranks send each other: messages and bytes, of torch.distributed's own calls and of DTensor's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast")


class Traffic(TorchDispatchMode):
    """While active, counts collectives by kind, and the bytes of the largest tensor in each: what the group shares."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(str(func.name()).partition("::")[2], tree_leaves((args, kwargs, result)))
        return result

    def _count(self, name: str, values: list[Any]) -> None:
        # Of torch's names, such as `_allgather_base_` and `all_gather_into_tensor`, the letters.
        letters = name.replace("_", "")
        kind = next((kind for kind in _KINDS if letters.startswith(kind.replace("-", ""))), None)
        if kind is not None:
            sizes = [value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor)]
            self.messages[kind] += 1
            self.bytes[kind] += max(sizes)


def counted(work: Callable[[], object]) -> Traffic:
    """Return what `work` sends."""
    with Traffic() as traffic:
        work()
    return traffic
