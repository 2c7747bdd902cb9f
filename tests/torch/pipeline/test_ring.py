"""Memory for messages is used again when nobody uses it any more, and never before."""

from __future__ import annotations

import torch

from smpkit.torch.pipeline.channels import ReceivePool

CPU = torch.device("cpu")


def made(**needs: int) -> ReceivePool:
    pool = ReceivePool(CPU)
    pool.fit({int(size[1:]): count for size, count in needs.items()})
    return pool


def addresses(pool: ReceivePool, num_bytes: int, count: int) -> list[int]:
    return [pool.take(num_bytes).memory.data_ptr() for _ in range(count)]


def test_a_block_comes_back_when_the_last_tensor_in_it_dies() -> None:
    pool = made(b64=1)
    value = pool.lend(pool.take(64)).view(torch.float32).detach().requires_grad_()
    first = value.data_ptr()
    loss = (value * value).sum()  # saves it
    del value
    assert addresses(pool, 64, 1) != [first]
    assert pool.num_unplanned == 1
    loss.backward()
    del loss
    pool.sweep()
    assert first in addresses(pool, 64, 1)


def test_the_block_that_has_been_free_longest_goes_first() -> None:
    pool = made(b8=3)
    lent = [pool.lend(pool.take(8)) for _ in range(3)]
    order = [each.data_ptr() for each in lent]
    while lent:
        lent.pop()
        pool.sweep()
    assert addresses(pool, 8, 3) == order[::-1]


def test_what_is_kept_beyond_the_step_is_replaced_and_the_ring_stays_as_large() -> None:
    pool, kept = made(b8=2), []
    for step in range(4):
        kept.append(pool.lend(pool.take(8)))
        kept[-1].fill_(step)
        pool.fit({8: 2})
        assert pool.num_bytes == 16
        assert len(set(addresses(pool, 8, 2)) | {each.data_ptr() for each in kept}) == 2 + len(kept)
        pool.fit({8: 2})
    assert [each[0].item() for each in kept] == [0, 1, 2, 3]
    assert pool.num_unplanned == 0


def test_sizes_of_two_kinds_of_steps_are_kept_and_older_ones_given_up() -> None:
    pool = made(b8=2)
    pool.fit({16: 1})
    assert pool.num_bytes == 32
    pool.fit({8: 2})
    assert pool.num_bytes == 32
    pool.fit({8: 2})
    assert pool.num_bytes == 16


def test_a_size_that_nobody_foresaw_is_allocated_for_once() -> None:
    pool = made(b8=1)
    value = pool.lend(pool.take(24))
    assert value.nbytes == 24
    assert (pool.num_unplanned, pool.num_bytes) == (1, 8)
    pool.give_back(pool.take(24))
    assert pool.num_bytes == 8
