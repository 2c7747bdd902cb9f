"""Which rank has which place in the pipeline, tensor and data-parallel grid, and which ranks form a group.

A placement strategy is three letters, D (reduced data parallel), P (pipeline) and T (tensor). The right-most letter
varies fastest over ascending global ranks, the left-most slowest, as digits of a number do::

    rank = c(s0) * size(s1) * size(s2) + c(s1) * size(s2) + c(s2)

`cluster` is DPT, so the ranks of one model sit side by side; `spread` is TPD, so replicas do. `Mesh.draw()` of eight
ranks with `cluster` and all degrees 2::

            pp 0       pp 1
            tp 0 tp 1  tp 0 tp 1
    rdp 0      0    1     2    3
    rdp 1      4    5     6    7
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Final

from smpkit.errors import ConfigError, UsageError

if TYPE_CHECKING:  # importing it takes 0.2 s, which readers of events do not need
    from smpkit.config.modelparallel import ModelParallelConfig

_ALIASES: Final = {"cluster": "DPT", "spread": "TPD"}


class CommGroup(Enum):
    """A kind of group; a rank belongs to exactly one group of each kind (`smp.CommGroup`)."""

    WORLD = "WORLD"
    """All ranks."""
    MP_GROUP = "MP_GROUP"
    """PP x TP: the ranks that together hold one model."""
    DP_GROUP = "DP_GROUP"
    """TP x RDP: the ranks that hold the same pipeline partition."""
    TP_GROUP = "TP_GROUP"
    """The ranks that share the distributed modules of one partition."""
    PP_GROUP = "PP_GROUP"
    """One pipeline."""
    RDP_GROUP = "RDP_GROUP"
    """Exact replicas (reduced data parallel)."""


@dataclass(frozen=True, order=True)
class Coordinates:
    """The place of one rank in the grid."""

    pp: int
    tp: int
    rdp: int


# A group of a kind is the set of ranks that agree in these coordinates.
_FIXED: Final[dict[CommGroup, tuple[str, ...]]] = {
    CommGroup.WORLD: (),
    CommGroup.MP_GROUP: ("rdp",),
    CommGroup.DP_GROUP: ("pp",),
    CommGroup.TP_GROUP: ("pp", "rdp"),
    CommGroup.PP_GROUP: ("tp", "rdp"),
    CommGroup.RDP_GROUP: ("pp", "tp"),
}


@dataclass(frozen=True)
class Mesh:
    """The grid of all ranks of a job; `rdp_size` is how many exact replicas of each part exist."""

    pp_size: int
    tp_size: int
    rdp_size: int
    strategy: str = "cluster"

    @classmethod
    def of(cls, config: ModelParallelConfig, world_size: int) -> Mesh:
        """Make the grid of `world_size` ranks; raise ConfigError if the degrees do not fit into them."""
        if problems := config.world_problems(world_size):
            raise ConfigError(problems)
        pp, tp = config.pipeline_parallel_degree, config.tensor_parallel_degree
        return cls(pp, tp, world_size // (pp * tp), config.placement_strategy)

    @property
    def size(self) -> int:
        return self.pp_size * self.tp_size * self.rdp_size

    @property
    def dp_size(self) -> int:
        """How many ranks hold (parts of) the same pipeline partition."""
        return self.tp_size * self.rdp_size

    @cached_property
    def _sizes(self) -> tuple[tuple[str, int], ...]:
        """Axis and size of each letter of the strategy, the slowest first."""
        axes = {"D": ("rdp", self.rdp_size), "P": ("pp", self.pp_size), "T": ("tp", self.tp_size)}
        return tuple(axes[letter] for letter in _ALIASES.get(self.strategy, self.strategy))

    def coordinates(self, rank: int) -> Coordinates:
        """Return the place of a global rank; raise UsageError if there is no such rank."""
        if not 0 <= rank < self.size:
            raise UsageError(f"there is no rank {rank} in a world of {self.size}", hint=f"use 0 to {self.size - 1}")
        place = {}
        for axis, size in reversed(self._sizes):
            rank, place[axis] = divmod(rank, size)
        return Coordinates(**place)

    def rank(self, coordinates: Coordinates) -> int:
        """Return the global rank at a place in the grid."""
        rank = 0
        for axis, size in self._sizes:
            place: int = getattr(coordinates, axis)
            rank = rank * size + place
        return rank

    def groups(self, kind: CommGroup) -> tuple[tuple[int, ...], ...]:
        """Return all groups of a kind, each in ascending global ranks, ordered by their first rank."""
        return self._groups[kind]

    def group(self, kind: CommGroup, rank: int) -> tuple[int, ...]:
        """Return the group of a kind that `rank` belongs to, in ascending global ranks."""
        self.coordinates(rank)
        return self._group_of[kind][rank]

    def index(self, kind: CommGroup, rank: int) -> int:
        """Return the position of `rank` in its group of a kind: `mp_rank`, `dp_rank` and so on."""
        return self.group(kind, rank).index(rank)

    @cached_property
    def _groups(self) -> dict[CommGroup, tuple[tuple[int, ...], ...]]:
        members: dict[CommGroup, dict[tuple[int, ...], list[int]]] = {kind: {} for kind in CommGroup}
        for rank in range(self.size):
            place = self.coordinates(rank)
            for kind, fixed in _FIXED.items():
                members[kind].setdefault(tuple(getattr(place, axis) for axis in fixed), []).append(rank)
        return {kind: tuple(sorted(map(tuple, groups.values()))) for kind, groups in members.items()}

    @cached_property
    def _group_of(self) -> dict[CommGroup, dict[int, tuple[int, ...]]]:
        return {kind: {rank: group for group in groups for rank in group} for kind, groups in self._groups.items()}

    def draw(self, columns: int | None = None) -> str:
        """Return the grid as text: a line per replica, a column per pipeline and tensor rank.

        Args:
            columns: characters of a line; further pipeline ranks stand below, after an empty line.
        """
        width = max(len(f"tp {self.tp_size - 1}"), len(str(self.size - 1)))
        label = len(f"rdp {self.rdp_size - 1}") + 2
        block = self.tp_size * (width + 1)
        tensors = "".join(f" {f'tp {tp}':>{width}}" for tp in range(self.tp_size))
        at_once = self.pp_size if columns is None else max(1, (columns - label + 1) // (block + 1))
        lines: list[str] = []
        for start in range(0, self.pp_size, at_once):
            stages = range(self.pp_size)[start : start + at_once]
            lines += [""] * (start > 0)
            lines.append(" " * label + " ".join(f" pp {pp}".ljust(block) for pp in stages))
            lines.append(" " * label + " ".join([tensors] * len(stages)))
            for rdp in range(self.rdp_size):
                rows = [[self.rank(Coordinates(pp, tp, rdp)) for tp in range(self.tp_size)] for pp in stages]
                blocks = ["".join(f" {rank:>{width}}" for rank in row) for row in rows]
                lines.append(f"rdp {rdp}".ljust(label) + " ".join(blocks))
        return "\n".join(line.rstrip() for line in lines)
