from __future__ import annotations

import threading
import time

import pytest
import torch

from smpkit.errors import DeadlineError, SmpkitError, UsageError
from smpkit.torch.offload.emulated import CopyEvent, EmulatedLink
from smpkit.torch.offload.link import CopyBatch, link_for


def pair(value: int = 1, size: int = 64) -> CopyBatch:
    return CopyBatch([torch.full((size,), value, dtype=torch.uint8)], [torch.zeros(size, dtype=torch.uint8)])


def test_without_speed_and_latency_a_copy_is_made_in_place_by_no_thread() -> None:
    before = threading.active_count()
    link, copies = link_for(torch.device("cpu"), 60.0), pair()
    assert link.send(copies, [], "it").done()
    assert torch.equal(copies.sources[0], copies.targets[0])
    assert threading.active_count() <= before


def test_copies_of_one_direction_are_made_in_order_and_directions_do_not_wait_for_each_other() -> None:
    link, gate = EmulatedLink(latency_seconds=0.001), CopyEvent()
    copies = [pair(number) for number in range(3)]
    out = [link.send(each, [gate] if number == 0 else [], "out") for number, each in enumerate(copies)]
    link.synchronize(link.fetch(pair(), [], "back"), "back")
    assert not out[2].done()  # it waits behind the first one, which waits for the gate
    gate.end()
    for event, each in zip(out, copies, strict=True):
        link.synchronize(event, "out")
        assert torch.equal(each.sources[0], each.targets[0])
    link.close()


def test_a_copy_takes_latency_and_bytes_over_rate() -> None:
    link = EmulatedLink(out_bytes_per_second=1e6, latency_seconds=0.01)
    start = time.perf_counter()
    link.synchronize(link.send(pair(size=20_000), [], "it"), "it")
    assert time.perf_counter() - start >= 0.03
    link.close()


def test_a_copy_waits_for_the_events_before_it_across_directions() -> None:
    link = EmulatedLink(latency_seconds=0.02)
    ((device, host),), back = pair(7), torch.zeros(64, dtype=torch.uint8)
    out = link.send(CopyBatch([device], [host]), [], "it")
    link.synchronize(link.fetch(CopyBatch([host], [back]), [out], "it"), "it")
    assert torch.equal(back, device)
    link.close()


def test_a_wait_past_its_deadline_names_who_waited() -> None:
    link = EmulatedLink(latency_seconds=0.001, deadline_seconds=0.05)
    with pytest.raises(DeadlineError, match=r"`layers.3` waited 0.05 s for a copy"):
        link.wait(CopyEvent(), "`layers.3`")  # as if of a copy that never ends


def test_a_copy_that_waits_for_nothing_that_comes_ends_at_the_deadline_too() -> None:
    link = EmulatedLink(latency_seconds=0.001, deadline_seconds=0.05)
    event = link.send(pair(), [CopyEvent()], "`layers.3`")
    time.sleep(0.1)
    with pytest.raises(DeadlineError, match=r"`layers.3` waited 0.05 s"):
        link.synchronize(event, "`layers.3`")
    link.close()


def test_a_copy_that_fails_fails_those_that_wait_for_it() -> None:
    link = EmulatedLink(latency_seconds=0.001)
    wrong = CopyBatch([torch.zeros(4, dtype=torch.uint8)], [torch.zeros(5, dtype=torch.uint8)])
    event = link.send(wrong, [], "`layers.1`")
    with pytest.raises(SmpkitError, match=r"`layers.1` was not copied"):
        link.synchronize(event, "`layers.1`")
    assert not event.done()
    link.close()


def test_threads_end_when_there_is_nothing_to_copy_and_start_again() -> None:
    before = threading.active_count()
    link = EmulatedLink(latency_seconds=0.001)
    for _ in range(2):
        link.synchronize(link.send(pair(), [], "it"), "it")
        deadline = time.monotonic() + 60
        while threading.active_count() > before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert threading.active_count() <= before


def test_closing_completes_what_was_given() -> None:
    before = threading.active_count()
    link, copies = EmulatedLink(latency_seconds=0.01), [pair(number) for number in range(3)]
    events = [link.send(each, [], "it") for each in copies]
    link.close()
    assert all(event.done() for event in events)
    assert threading.active_count() <= before


@pytest.mark.parametrize(("rate", "latency", "deadline"), [(0.0, 0.0, 1.0), (1.0, -1.0, 1.0), (1.0, 0.0, 0.0)])
def test_a_link_that_cannot_be_is_refused(rate: float, latency: float, deadline: float) -> None:
    with pytest.raises(UsageError):
        EmulatedLink(rate, latency_seconds=latency, deadline_seconds=deadline)
