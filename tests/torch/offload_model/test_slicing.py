"""Slices: as equal as can be, never empty."""

from __future__ import annotations

import copy
import itertools
import random
from typing import Any

import torch
from torch import nn

from smpkit import OffloadModel
from smpkit.torch.offload_model.slices import cut_layers


def layers(*sizes: int) -> list[nn.Module]:
    return [nn.Linear(size, 1, bias=False) if size else nn.ReLU() for size in sizes]


def slice_ends(layers: list[nn.Module], num_slices: int, balance: Any = "params") -> list[int]:
    return list(itertools.accumulate(map(len, cut_layers(layers, num_slices, balance, lambda _: True))))


def lengths(ends: list[int]) -> list[int]:
    return [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def test_ten_equal_layers_in_six_differ_by_at_most_one() -> None:
    """FairScale cuts them 1 1 1 1 1 5."""
    assert sorted(lengths(slice_ends(layers(*[3] * 10), 6))) == [1, 1, 2, 2, 2, 2]


def test_a_big_layer_leaves_no_slice_empty() -> None:
    """FairScale cuts it 1 6 0."""
    assert lengths(slice_ends(layers(100, *[1] * 6), 3)) == [1, 3, 3]


def test_the_largest_slice_is_as_small_as_any_cut_makes_it() -> None:
    dice = random.Random(0)
    for _ in range(60):
        sizes = [dice.randrange(12) for _ in range(dice.randrange(1, 9))]
        count = dice.randrange(1, len(sizes) + 1)
        ends = slice_ends(layers(*sizes), count)
        assert min(lengths(ends)) >= 1
        cuts = ([*some, len(sizes)] for some in itertools.combinations(range(1, len(sizes)), count - 1))
        worst = [max(sum(sizes[start:end]) for start, end in zip([0, *cut[:-1]], cut, strict=True)) for cut in cuts]
        found = max(sum(sizes[start:end]) for start, end in zip([0, *ends[:-1]], ends, strict=True))
        assert found == min(worst)


def test_more_slices_than_layers_is_one_each() -> None:
    assert slice_ends(layers(1, 2, 3), 9) == [1, 2, 3]


def test_bytes_count_every_number_of_a_wide_layer_and_parameters_count_once() -> None:
    wide = [nn.Linear(4, 1, bias=False, dtype=torch.float64) for _ in range(2)]
    mixed = [*wide, *layers(4, 4, 4, 4)]  # of 32 and 16 bytes
    assert slice_ends(mixed, 2, "params") == [3, 6]
    assert slice_ends(mixed, 2, "bytes") == [2, 6]
    model = OffloadModel(nn.Sequential(*mixed), torch.device("cpu"), num_slices=2, balance="bytes")
    assert [len(list(piece.parameters())) for piece in model.model_slices] == [2, 4]


def test_a_slice_that_runs_again_does_not_begin_by_changing_its_input() -> None:
    """Torch's own rule for checkpoints; the cut is one layer later."""
    chain = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)), nn.Linear(4, 4))
    for checkpoint in (False, True):
        model: Any = OffloadModel(copy.deepcopy(chain), "cpu", checkpoint_activation=checkpoint)
        assert [len(piece.model_shard) for piece in model.model_slices] == ([2, 1] if checkpoint else [1, 1, 1])
        model(torch.randn(2, 4)).sum().backward()


def test_it_says_what_it_is_in_one_line() -> None:
    model = OffloadModel(nn.Sequential(*layers(2, 2, 2)), "cpu", num_slices=2)
    assert repr(model) == "OffloadModel(2 slices, run on cpu)"
