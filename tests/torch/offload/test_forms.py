from __future__ import annotations

import torch

from smpkit.torch.offload.hooks import AUTOCAST_DTYPES, SpecCache


def test_what_is_alike_is_one_object_whether_or_not_it_is_in_doubt() -> None:
    specs = SpecCache()
    made = [specs.spec(dtype, torch.Size([3, 4])) for dtype in (torch.float32, torch.bfloat16, torch.complex64)]
    for may_be_casts in (True, True, False):
        specs.check_half_precision(may_be_casts=may_be_casts)
        assert AUTOCAST_DTYPES.isdisjoint(specs.always_offloadable) == may_be_casts
        assert all(specs.spec(dtype, torch.Size([3, 4])) is spec for spec in made for dtype in spec[:1])
    assert torch.complex64 not in specs.always_offloadable


def test_sizes_without_end_are_forgotten() -> None:
    specs = SpecCache()
    for length in range(5000):
        assert specs.spec(torch.float32, torch.Size([length])) == (torch.float32, torch.Size([length]))
    assert len(specs.always_offloadable[torch.float32]) <= 1024
