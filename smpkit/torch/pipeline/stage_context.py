"""What the parts of the pipeline on one rank share: its place, its transport, and the output specs of all calls."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from smpkit.torch.pipeline.outputs import OutputSpecs
from smpkit.torch.pipeline.random_streams import RandomStreams
from smpkit.torch.pipeline.transport import Transport

if TYPE_CHECKING:
    from smpkit.torch.pipeline.microbatch import Microbatch

NO_RANK: Final = -1
"""The rank of a stage that holds nothing, and stands for all ranks where a step is planned without them."""


class StageContext:
    """One rank of a pipeline.

    Args:
        rank: pp_rank, or `NO_RANK`.
        pp_ranks: by id of a parameter of the model, the ranks that hold it.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        transport: Transport,
        random: RandomStreams,
        pp_ranks: Mapping[int, frozenset[int]],
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.transport = transport
        self.random = random
        self._pp_ranks = {key: ranks for key, ranks in pp_ranks.items() if len(ranks) < size}
        self.parameter_owners = {key: min(ranks) for key, ranks in self._pp_ranks.items()}
        """By id of a parameter that not every rank holds, the first rank that does."""
        self.output_specs = OutputSpecs()
        """Of calls in steps of the same kind as the one that runs, or ran last."""
        self.inside_unit = False
        """Whether a unit runs here now: calls inside it are not dispatched."""
        self.num_steps = 0
        """How many steps have begun."""
        self.microbatches: Sequence[Microbatch] = ()
        """Those of the step that runs, or ran last."""
        self.failed_alone = False
        """Whether code that only this rank runs has raised: the other ranks do not know, and wait."""
        self.modules: dict[str, nn.Module] = {}
        """Modules that code of this rank may call or inspect, by name."""
        self.remote_modules: dict[str, nn.Module] = {}
        """Modules of other ranks, by name."""
        self._trainable_entry = ""

    def set_trainable(self, trainable: bytes) -> None:
        """Note which parameters need gradients.

        Args:
            trainable: a byte for each parameter of the model, 1 where it does.
        """
        frozen = trainable.count(0)
        # Part of the call trace, so that a rank which freezes other parameters than the rest is reported.
        entry = f"a step with {frozen} frozen parameters ({zlib.crc32(trainable):08x})"
        self._trainable_entry = entry if frozen else ""

    def begin_step(self, microbatches: Sequence[Microbatch]) -> None:
        """Count a step, and keep its microbatches."""
        self.num_steps += 1
        self.microbatches = microbatches
        if self._trainable_entry:
            for microbatch in microbatches:
                microbatch.call_trace.append(self._trainable_entry)

    def weight_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the weight that a tensor is, or is a view of; None if it is none, or every rank holds it."""
        if id(tensor) in self.parameter_owners:
            return tensor
        return tensor._base if id(tensor._base) in self.parameter_owners else None

    def holds(self, rank: int, parameter: torch.Tensor) -> bool:
        pp_ranks = self._pp_ranks.get(id(parameter))
        return pp_ranks is None or rank in pp_ranks
