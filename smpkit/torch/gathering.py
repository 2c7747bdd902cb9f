"""Put the parts of a state dict that the ranks of a pipeline hold together again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from smpkit.torch.comm import CommGroup, RankType, allgather, recv_from, send
from smpkit.torch.state import state

__all__ = ["merge_on_all_ranks", "merge_on_first_rank"]

_Key = TypeVar("_Key")


def merge_on_all_ranks(part: Mapping[_Key, Any]) -> dict[_Key, Any]:
    """Return the union of the parts of all ranks of this pipeline; all of them call this.

    Where several ranks hold an entry they hold equal ones.
    """
    merged: dict[_Key, Any] = {}
    for each in allgather(dict(part), CommGroup.PP_GROUP):
        merged.update(each)
    return merged


def merge_on_first_rank(part: Mapping[_Key, Any]) -> dict[_Key, Any]:
    """Return the union on pp_rank 0 and an empty dict on the others, which never see more than their own part."""
    if state.pp_rank > 0:
        send(dict(part), 0, RankType.PP_RANK)
        return {}
    merged = dict(part)
    for rank in range(1, state.pp_size):
        merged.update(recv_from(rank, RankType.PP_RANK))
    return merged
