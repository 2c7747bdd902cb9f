"""What a save and a resume cost grows as the number of ranks: who writes, opens and sends what, planned and counted."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from smpkit.torch.checkpoints import agreement, folder, reader
from smpkit.torch.checkpoints.entries import MAX_WRITERS, Chunk, writers_of
from smpkit.torch.checkpoints.folder import find_corruption, read_index
from smpkit.torch.checkpoints.reader import Reader, ReadSlice, Target, read_into
from smpkit.torch.checkpoints.tensors import open_tensors
from smpkit.torch.distributed.objects import object_from
from tests.torch.steps import on_ranks

AGREEMENTS = {"save": 4, "resume": 4}
"""Of a save to a folder that is known: the call, written, published, marked. Of a resume: who shares the
folder, which checkpoints there are, are they intact, loaded."""


def items_of(num_ranks: int) -> list[tuple[str, int, frozenset[int]]]:
    """Return what the ranks of data parallelism with sharded optimizer states hold: weights all, states one each."""
    everyone = frozenset(range(num_ranks))
    weights = [(f"weight {number}", 1000 + 37 * number, everyone) for number in range(96)]
    return weights + [(f"state {rank}", 4000, frozenset({rank})) for rank in everyone]


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 64, 512])
def test_the_plan_of_a_save_and_of_a_resume_is_linear(num_ranks: int) -> None:
    items = items_of(num_ranks)
    writers = writers_of(items)
    assert writers.keys() == {name for name, *_ in items}, "each is written once"
    written = Counter({writers[name]: 0 for name, *_ in items})
    for name, size, holders in items:
        assert writers[name] in holders
        written[writers[name]] += size if name.startswith("weight") else 0
    mean = written.total() / min(num_ranks, MAX_WRITERS)
    assert max(written.values()) <= mean + 1000 + 37 * 96
    # Each rank decides the same for what it holds, without knowing the rest.
    own = writers_of([item for item in items if num_ranks - 1 in item[2]])
    assert own.items() <= writers.items()
    model_files = {writers[name] for name, *_ in items if name.startswith("weight")}
    assert len(model_files) <= MAX_WRITERS, "whatever the number of ranks, of which each opens these when it resumes"


class CountingReader(Reader):
    """Counts what is opened and read of files that are not there."""

    def count(self, held: Mapping[str, tuple[torch.Tensor, Chunk]]) -> tuple[list[str], int]:
        """Return the files that a rank opens for the chunks that it holds, and how many elements it reads."""
        self.opened: list[str] = []
        self.num_read = 0
        read_into(self, {name: Target(tensor, [chunk]) for name, (tensor, chunk) in held.items()})
        return sorted(self.opened), self.num_read

    @contextlib.contextmanager
    def open(self, file: str) -> Iterator[ReadSlice]:
        self.opened.append(file)

        def read(key: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
            self.num_read += math.prod(sizes)
            return torch.zeros(*sizes, dtype=torch.uint8)

        yield read


@pytest.mark.parametrize("num_ranks", [8, 64, 512])
def test_half_as_many_ranks_open_and_read_each_shard_once(num_ranks: int) -> None:
    shards = [(f"model_{rank}", "weight", Chunk((4 * rank, 0), (4, 3), (0, 0))) for rank in range(num_ranks)]
    reader = CountingReader(Path(), {"weight": ((4 * num_ranks, 3), torch.uint8, shards)})
    for rank in range(num_ranks // 2):
        tensor, chunk = torch.empty(8, 3, dtype=torch.uint8), Chunk((8 * rank, 0), (8, 3), (0, 0))
        assert reader.count({"weight": (tensor, chunk)}) == (sorted([f"model_{2 * rank}", f"model_{2 * rank + 1}"]), 24)


@on_ranks(8)
def test_eight_ranks_do_what_was_planned(tmp_path: Path) -> None:
    smp.init({"ddp": True, "shard_optimizer_state": True})
    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Sequential(*(nn.Linear(8, 8) for _ in range(16))))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    smp.save_checkpoint(tmp_path, "one")
    with (
        mock.patch.object(agreement, "object_from", wraps=object_from) as agree,
        mock.patch.object(folder, "find_corruption", wraps=find_corruption) as compare,
        mock.patch.object(reader, "open_tensors", wraps=open_tensors) as load,
    ):
        smp.save_checkpoint(tmp_path, "two")
        saving = agree.call_count
        smp.resume_from_checkpoint(tmp_path)
    assert (saving, agree.call_count - saving) == (AGREEMENTS["save"], AGREEMENTS["resume"])
    models = {f"model_0_0_{rank}.safetensors" for rank in range(8)}
    loaded = {call.args[0].name for call in load.call_args_list}
    assert loaded == {*models, f"optimizer_0_0_{smp.rank()}.safetensors"}, "its own states, and no others'"
    compared = smp.allgather([file.name for call in compare.call_args_list for file in call.args[0]])
    files = sorted(read_index(tmp_path / "two_partial").files)
    assert sorted(name for names in compared for name in names) == files, "each file is compared once"
