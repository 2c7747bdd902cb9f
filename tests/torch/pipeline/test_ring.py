"""Memory for messages is used again when nobody uses it any more, and never before."""

from __future__ import annotations

import torch

from smpkit.torch.pipeline.ring import Ring

CPU = torch.device("cpu")


def made(**needs: int) -> Ring:
    ring = Ring(CPU)
    ring.fit({int(size[1:]): count for size, count in needs.items()})
    return ring


def addresses(ring: Ring, num_bytes: int, count: int) -> list[int]:
    return [ring.take(num_bytes).memory.data_ptr() for _ in range(count)]


def test_a_block_comes_back_when_the_last_tensor_in_it_dies() -> None:
    ring = made(b64=1)
    value = ring.lend(ring.take(64)).view(torch.float32).detach().requires_grad_()
    first = value.data_ptr()
    loss = (value * value).sum()  # saves it
    del value
    assert addresses(ring, 64, 1) != [first]
    assert ring.num_unplanned == 1
    loss.backward()
    del loss
    ring.sweep()
    assert first in addresses(ring, 64, 1)


def test_the_block_that_has_been_free_longest_goes_first() -> None:
    ring = made(b8=3)
    lent = [ring.lend(ring.take(8)) for _ in range(3)]
    order = [each.data_ptr() for each in lent]
    while lent:
        lent.pop()
        ring.sweep()
    assert addresses(ring, 8, 3) == order[::-1]


def test_what_is_kept_beyond_the_step_is_replaced_and_the_ring_stays_as_large() -> None:
    ring, kept = made(b8=2), []
    for step in range(4):
        kept.append(ring.lend(ring.take(8)))
        kept[-1].fill_(step)
        ring.fit({8: 2})
        assert ring.num_bytes == 16
        assert len(set(addresses(ring, 8, 2)) | {each.data_ptr() for each in kept}) == 2 + len(kept)
        ring.fit({8: 2})
    assert [each[0].item() for each in kept] == [0, 1, 2, 3]
    assert ring.num_unplanned == 0


def test_sizes_of_two_kinds_of_steps_are_kept_and_older_ones_given_up() -> None:
    ring = made(b8=2)
    ring.fit({16: 1})
    assert ring.num_bytes == 32
    ring.fit({8: 2})
    assert ring.num_bytes == 32
    ring.fit({8: 2})
    assert ring.num_bytes == 16


def test_a_size_that_nobody_foresaw_is_allocated_for_once() -> None:
    ring = made(b8=1)
    value = ring.lend(ring.take(24))
    assert value.nbytes == 24
    assert (ring.num_unplanned, ring.num_bytes) == (1, 8)
    ring.give_back(ring.take(24))
    assert ring.num_bytes == 8
