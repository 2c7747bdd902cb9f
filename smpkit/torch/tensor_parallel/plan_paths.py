"""Check, once per block, that its result depends on its inputs only through its row-divided layer.

Inside a block a rank's gradients are its own contribution, outside they are whole; the sum in the row-divided layer is
where one becomes the other. A block that lets something past that sum (a residual added inside, a gate on its result)
would train on wrong gradients without a sign, so the graph of its first call is looked at.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from smpkit.errors import UnsupportedError
from smpkit.torch.tensor_parallel.collectives import is_dry_run
from smpkit.torch.tensor_parallel.shards import shard_of

__all__ = ["GradientPathCheck"]


class GradientPathCheck:
    """The ends of the paths through one block, of the call that runs now."""

    def __init__(self, name: str, kind: str) -> None:
        self.name, self.kind = name, kind
        self._checked = False
        self._input_nodes: set[Node] = set()
        self._sum_nodes: set[Node] = set()

    def begin(self) -> None:
        """Forget the call before."""
        self._input_nodes.clear()
        self._sum_nodes.clear()

    def note_input(self, x: torch.Tensor) -> torch.Tensor:
        """Note a value as the divided layers of this rank get it."""
        return self._note(x, self._input_nodes)

    def note_sum(self, x: torch.Tensor) -> torch.Tensor:
        """Note a sum over the ranks."""
        return self._note(x, self._sum_nodes)

    def _note(self, x: torch.Tensor, nodes: set[Node]) -> torch.Tensor:
        if not self._checked and x.grad_fn is not None and not is_dry_run(x):
            nodes.add(x.grad_fn)
        return x

    def check(self, module: nn.Module, _: Any, output: Any) -> None:
        """Look at the result of the call (a forward hook).

        Raises:
            UnsupportedError: there is a path past the sum.
        """
        result = output[0] if isinstance(output, tuple | list) else output
        if self._checked or not self._sum_nodes or not isinstance(result, torch.Tensor) or result.grad_fn is None:
            return
        rows = {id(bias) for bias in _biases_added_after_sum(module)}
        whole = {id(each): name for name, each in module.named_parameters() if id(each) not in rows}
        bypass = self._find_bypass(result.grad_fn, whole)
        if bypass is not None:
            raise UnsupportedError(
                f"`{self.name}` ({self.kind}) cannot be divided over tensor-parallel ranks by its plan: {bypass}"
                " reaches its result past its row-divided layer",
                hint="except it with smp.set_tensor_parallelism(module, enabled=False)",
            )
        self._checked = True
        self.begin()

    def _find_bypass(self, root: Node, whole: dict[int, str]) -> str | None:
        pending, seen = [root], {root}
        while pending:
            node = pending.pop()
            if node in self._sum_nodes:
                continue
            if node in self._input_nodes:
                return "what enters it"
            name = whole.get(id(getattr(node, "variable", None)))
            if name is not None:
                return f"`{name}`"
            following = [each for each, _ in node.next_functions if each is not None and each not in seen]
            seen.update(following)
            pending.extend(following)
        return None


def _biases_added_after_sum(block: nn.Module) -> list[nn.Parameter]:
    """Return the biases that are added to the sum: those of the layers whose weight is divided by input features."""
    found = []
    for module in block.modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            shard = shard_of(module.weight)
            if shard is not None and shard.dim == 1:
                found.append(module.bias)
    return found
