"""The memory of the optimizer's states: aligned, exact, given back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from smpkit.torch.offload_model.pages import zero_bytes, zeros

PAGE = 2 << 20


@pytest.mark.parametrize("num_elements", [0, 5, PAGE // 4 - 1, PAGE // 4, PAGE + 12_345])
def test_it_is_zeros_of_exactly_that_size(num_elements: int) -> None:
    tensor = zeros(num_elements)
    assert tensor.shape == (num_elements,)
    assert tensor.dtype is torch.float32
    assert not tensor.any()
    assert tensor.untyped_storage().nbytes() == 4 * num_elements  # what torch.save writes
    tensor.fill_(1)
    assert tensor.sum() == num_elements


def test_what_is_large_starts_at_a_large_page() -> None:
    tensors = [zero_bytes(PAGE + extra) for extra in (0, 1, PAGE)]
    assert [tensor.data_ptr() % PAGE for tensor in tensors] == [0, 0, 0]
    assert zeros(PAGE, torch.float64).data_ptr() % PAGE == 0


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="asks Linux for the size of the process")
def test_it_goes_back_to_the_system_with_the_last_tensor() -> None:
    def num_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * 4096

    before = num_bytes()
    whole = zero_bytes(256 << 20)
    part = whole[:64].view(torch.float32)
    del whole
    assert num_bytes() - before >= 192 << 20  # threads of other tests may end meanwhile, and give back their stacks
    assert part.tolist() == [0.0] * 16
    del part
    assert num_bytes() - before < 128 << 20
