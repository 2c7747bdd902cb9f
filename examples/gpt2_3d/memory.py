"""What each rank holds, measured on the tensors that are there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import smpkit.torch as smp

KIB = 1024


@dataclass(frozen=True)
class Held:
    """Bytes of one rank, and where it stands."""

    place: str
    weights: int
    gradients: int
    optimizer: int
    offloaded: int
    """The most that waited in host memory during a step."""

    @classmethod
    def by_this_rank(cls, model: smp.DistributedModel, optimizer: Any) -> Held:
        """Add up what this rank holds after a step."""
        own = list(model.local_parameters())
        gradients = [parameter.grad for parameter in own if parameter.grad is not None]
        offloading = smp.state.cfg.offload_activations
        return cls(
            f"{smp.pp_rank()} {smp.tp_rank()} {smp.rdp_rank()}",
            _bytes(own),
            _bytes(gradients),
            _bytes(_states(optimizer.local_state_dict(gather_if_shard=False)["state"])),
            smp.offload_report().peak_host_bytes if offloading else 0,
        )


def table(held: Sequence[Held]) -> str:
    """Return a line per rank, and one for the ranks of one model together, in KiB."""
    head = f"{'rank':>4}  {'pp tp rdp':>9}  {'weights':>8}  {'gradients':>9}  {'optimizer':>9}  {'offloaded':>9}   KiB"
    lines = [
        f"{rank:>4}  {each.place:>9}  {each.weights / KIB:>8.1f}  {each.gradients / KIB:>9.1f}"
        f"  {each.optimizer / KIB:>9.1f}  {each.offloaded / KIB:>9.1f}"
        for rank, each in enumerate(held)
    ]
    one = [each for each in held if each.place.endswith(" 0")]
    together = f"{'one model':>15}  {sum(each.weights for each in one) / KIB:>8.1f}"
    return "\n".join([head, *lines, f"{together}  on {len(one)} ranks"])


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Count memory, each storage once: tied weights are one, and a weight without memory here is none."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _states(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _states(each)
