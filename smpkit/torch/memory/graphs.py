"""Which forwards of a model still have a backward to come."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from smpkit.torch.core.tensor_spec import tensors_in

__all__ = ["LiveGraphs"]


class LiveGraphs:
    """Counts forwards whose backward has not begun, and that a backward may still come to.

    A forward is over when the gradient of one of its outputs arrives, or when its graph is gone: a loss that the script
    never runs backward for must not count for ever.
    """

    def __init__(self) -> None:
        self._live: set[int] = set()
        self._count = 0
        self.most = 0
        """How many there were at a time."""
        self.num_backwards = 0

    @property
    def num_forwards(self) -> int:
        """How many there were."""
        return self._count

    def __len__(self) -> int:
        return len(self._live)

    def add(self, output: Any, last: Any) -> None:
        """Take note of a forward.

        Args:
            output: what it returned.
            last: what its last layer returned: a model may put its loss into an object that nobody can look into.
        """
        index = self._count
        self._count += 1
        found = _with_graph(output) or _with_graph(last)
        if not found:
            return
        self._live.add(index)
        self.most = max(self.most, len(self._live))
        end = _End(self, index)
        for tensor in found:
            tensor.register_hook(end.on_gradient)  # type: ignore[no-untyped-call]

    def end(self, index: int, *, by_backward: bool) -> None:
        """Take note that a forward is over."""
        if index in self._live:
            self._live.discard(index)
            self.num_backwards += by_backward

    def clear(self) -> None:
        """Forget forwards that an exception ended."""
        self._live.clear()


def _with_graph(output: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]


class _End:
    """Held by the hooks of a graph alone, so it goes with the graph."""

    def __init__(self, graphs: LiveGraphs, index: int) -> None:
        self._graphs, self._index = graphs, index

    def on_gradient(self, _gradient: Tensor) -> None:
        self._graphs.end(self._index, by_backward=True)

    def __del__(self) -> None:
        self._graphs.end(self._index, by_backward=False)
