"""What tells of no gradient, and what is posted ahead."""

from __future__ import annotations

import pytest
import torch

from smpkit.torch.core.tensor_spec import spec_of
from smpkit.torch.pipeline.executor import num_ahead
from smpkit.torch.pipeline.messages import is_none_gradient, none_gradient_message

MIB = 2**20


def test_all_small_receives_are_posted_before_the_first_wait_and_of_large_ones_the_first() -> None:
    assert num_ahead([MIB // 4] * 6) == 4
    assert num_ahead([0, 0, 2 * MIB, 0]) == 2
    assert num_ahead([2 * MIB, 2 * MIB]) == 1


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128]
named = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def arrived(value: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a message as its receiver has it."""
    buffer = torch.empty(shape, dtype=dtype)
    buffer.untyped_storage().copy_(value.untyped_storage())
    return buffer


@named
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 0)])
def test_it_has_the_size_of_a_gradient_and_is_known_by_every_element(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    value = torch.empty(shape, dtype=dtype)
    message = none_gradient_message(spec_of(value))
    assert message.nbytes == value.nbytes
    got = arrived(message, dtype, shape)
    assert bool(got.isnan().all())
    assert is_none_gradient(got, spec_of(value)) == (got.numel() > 0)
    if got.numel() > 1:
        got.view(-1)[-1] = 1
        assert not is_none_gradient(got, spec_of(value))


@named
def test_what_is_computed_is_none_of_it(dtype: torch.dtype) -> None:
    spec = spec_of(torch.empty(4, dtype=dtype))
    zeros, infinity = torch.zeros(4, dtype=dtype), torch.full((4,), float("inf"), dtype=dtype)
    computed = [
        zeros,
        infinity,
        zeros / 0,
        infinity - infinity,
        infinity * 0,
        torch.full((4,), float("nan"), dtype=dtype),
    ]
    for value in [*computed, *[-each for each in computed]]:
        assert not is_none_gradient(value, spec)
        assert not is_none_gradient(value.to(torch.complex128 if dtype.is_complex else torch.float64).to(dtype), spec)


def test_types_without_room_for_it_send_zeros() -> None:
    spec = spec_of(torch.empty(3, dtype=torch.float8_e5m2))
    got = arrived(none_gradient_message(spec), torch.float8_e5m2, (3,))
    assert got.float().tolist() == [0, 0, 0]
    assert not is_none_gradient(got, spec)
