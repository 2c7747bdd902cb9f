from __future__ import annotations

import torch

from smpkit.torch.offload.forms import CASTS, Forms


def test_what_is_alike_is_one_object_whether_or_not_it_is_in_doubt() -> None:
    forms = Forms()
    made = [forms.form(dtype, torch.Size([3, 4])) for dtype in (torch.float32, torch.bfloat16, torch.complex64)]
    for casts in (True, True, False):
        forms.doubt(casts=casts)
        assert CASTS.isdisjoint(forms.ordinary) == casts
        assert all(forms.form(dtype, torch.Size([3, 4])) is form for form in made for dtype in form[:1])
    assert torch.complex64 not in forms.ordinary


def test_sizes_without_end_are_forgotten() -> None:
    forms = Forms()
    for length in range(5000):
        assert forms.form(torch.float32, torch.Size([length])) == (torch.float32, torch.Size([length]))
    assert len(forms.ordinary[torch.float32]) <= 1024
