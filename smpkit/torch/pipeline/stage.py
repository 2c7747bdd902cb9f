"""What one rank of the pipeline is and holds: its place, its connections, and what it knows of the others' calls."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smpkit.torch import devices
from smpkit.torch.backward_start import Starts
from smpkit.torch.pipeline.carried import Carried
from smpkit.torch.pipeline.random import RandomStreams
from smpkit.torch.pipeline.results import Results
from smpkit.torch.pipeline.transport import Transport

if TYPE_CHECKING:
    from smpkit.torch.pipeline.microbatch import Microbatch

__all__ = ["Stage"]


class Stage:
    """One rank of a pipeline.

    Args:
        rank, size: pp_rank and pp_size.
        device: where this rank computes.
        transport: the way to the other ranks.
        random: streams of random numbers.
        owners: by parameter (its id), the ranks that hold it.
        agreed: returns the first pipeline's text on all pipelines that must do the same in the same order; called on
            pp_rank 0. None: there are no others.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        transport: Transport,
        random: RandomStreams,
        owners: Mapping[int, frozenset[int]],
        agreed: Callable[[str], str] | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.transport = transport
        self.random = random
        self.weights_elsewhere = {key: min(ranks) for key, ranks in owners.items() if len(ranks) < size}
        """By parameter (its id) that not every rank holds, the first rank that does."""
        self.starts = Starts()
        self.results = Results(self.weights_elsewhere)
        """Of calls while the same parameters need gradients as now."""
        self.inside = False
        """Whether a placed module runs here now: what it calls is its own business."""
        self.python_values: dict[str, int] = {}
        """How often Python needed a value, by the function that asked."""
        self.num_steps = 0
        self.microbatches: Sequence[Microbatch] = ()
        """Of the step that runs, or ran last."""
        self.agreed: Callable[[str], str] = agreed or (lambda text: text)
        self.failed_alone = False
        """Whether what this rank alone runs has raised: other ranks do not know, and wait."""
        self.modules: dict[str, nn.Module] = {}
        """Those that code of this rank may call or look into, by name."""
        self.modules_elsewhere: dict[str, nn.Module] = {}
        """All others."""
        self.spanning: set[str] = set()
        """The names of those that lie on several ranks, or hold nothing: code between units runs them on all ranks."""
        self._owners = owners
        self._results: dict[bytes, Results] = {}
        self._way = ""

    def note_trainable(self, trainable: bytes) -> None:
        """Note which parameters need gradients: what calls return hangs on it, though no argument shows it.

        Args:
            trainable: a byte for each parameter of the model, 1 where it does.
        """
        known = self._results.get(trainable)
        if known is None:
            known = self._results[trainable] = Results(self.weights_elsewhere) if self._results else self.results
        if known is not self.results or self._way:
            self.results = known
            # A rank that freezes what others do not takes another way from here on, and is told so.
            self._way = f"a step with {trainable.count(0)} frozen parameters ({zlib.crc32(trainable):08x})"

    def begin_step(self, microbatches: Sequence[Microbatch]) -> None:
        """Note what runs from now on."""
        self.num_steps += 1
        self.microbatches = microbatches
        if self._way:
            for microbatch in microbatches:
                microbatch.path.append(self._way)

    def watched_modules(self) -> Carried:
        """Return who looks at what modules keep while a microbatch runs."""
        return Carried(self.modules, self.spanning)

    def hooked_elsewhere(self) -> list[str]:
        """Return the names of modules of other ranks that have forward hooks, which run over there."""
        return [name for name, module in self.modules_elsewhere.items() if module._forward_hooks]

    def owner_of(self, parameter: nn.Parameter) -> int | None:
        """Return the rank where operations with this parameter run; None if every rank holds it."""
        return self.weights_elsewhere.get(id(parameter))

    def holds(self, rank: int, parameter: torch.Tensor) -> bool:
        """Return whether a rank holds a parameter."""
        owners = self._owners.get(id(parameter))
        return owners is None or rank in owners

    def settle(self) -> None:
        """Wait until the GPU has computed what it was told to: what is timed is its work, not that of telling it."""
        devices.wait_for_stream(self.device)

    def count_python_value(self, func: Callable[..., Any]) -> None:
        """Note that Python needed a value: each time, ranks wait for each other."""
        name = getattr(func, "__name__", str(func))
        self.python_values[name] = self.python_values.get(name, 0) + 1
