from __future__ import annotations

import threading
import time

import pytest
import torch

from smpkit.errors import DeadlineError, SmpkitError, UsageError
from smpkit.testing import EmulatedLink
from smpkit.torch.offload import link as links
from smpkit.torch.offload.link import DONE, AcceleratorLink, Copies, Link, link_for


def pair(value: int = 1, size: int = 64) -> Copies:
    return [(torch.full((size,), value, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8))]


def test_the_cpu_copies_at_once() -> None:
    link, copies = link_for(torch.device("cpu"), 60.0), pair()
    assert type(link) is Link
    assert link.send(copies, [DONE]).done()
    assert torch.equal(*copies[0])


def test_copies_of_one_direction_are_made_in_order_and_the_other_one_does_not_wait() -> None:
    threads, link, copies = threading.active_count(), EmulatedLink(latency_seconds=0.02), [pair(n) for n in range(3)]
    out = [link.send(each, []) for each in copies]
    assert [event.number for event in out] == sorted(event.number for event in out)
    back = link.fetch(pair(), [])
    link.synchronize(back, "back")
    assert not out[2].done()
    link.wait(out[2], "out")
    assert all(event.done() and torch.equal(*each[0]) for event, each in zip(out, copies, strict=True))
    late = link.send(pair(), [])
    link.close()
    assert late.done()
    assert threading.active_count() <= threads


def test_a_copy_takes_latency_and_bytes_over_rate_and_begins_after_what_it_waits_for() -> None:
    link, start = EmulatedLink(1e6, back_bytes_per_second=1e7, latency_seconds=0.01), time.perf_counter()
    ((device, host),), back = pair(7, 20_000), torch.zeros(20_000, dtype=torch.uint8)
    link.synchronize(link.fetch([(host, back)], [link.send([(device, host)], [])]), "it")
    assert time.perf_counter() - start >= 0.03 + 0.012
    assert torch.equal(back, device)
    link.close()


def test_a_wait_past_its_deadline_names_who_waited_and_so_does_a_copy_that_fails() -> None:
    link = EmulatedLink(latency_seconds=0.2, deadline_seconds=0.05)
    with pytest.raises(DeadlineError, match=r"`layers.3` waited 0.05 s for a copy"):
        link.wait(link.send(pair(), []), "`layers.3`")
    link.close()
    link = EmulatedLink(latency_seconds=1e-4)
    event = link.send([(torch.zeros(4), torch.zeros(5))], [])
    with pytest.raises(SmpkitError, match=r"`layers.1` was not copied"):
        link.synchronize(event, "`layers.1`")
    assert not event.done()
    link.close()


@pytest.mark.parametrize("options", [(0.0,), (1.0, -1.0), (1.0, 1.0, -1.0), (1.0, 1.0, 0.0, -1.0), (1, 1, 0, 0, 0, 0)])
def test_a_link_that_cannot_be_is_refused(options: tuple[float, ...]) -> None:
    with pytest.raises(UsageError, match=r"carries nothing|is no time"):
        EmulatedLink(*options)  # type: ignore[arg-type]


# --- an accelerator's, without one: see also tests/device -------------------------------------------------------------


class Forbidden:
    """An event while a graph is captured."""

    device = torch.device("cuda", 0)

    def query(self) -> bool:
        raise RuntimeError("operation not permitted when stream is capturing")


def test_while_a_graph_is_captured_no_event_is_asked_for_and_a_wait_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    event, link = object.__new__(links._StreamEvent), object.__new__(AcceleratorLink)
    event.event, event._is_done = Forbidden(), False  # type: ignore[assignment]
    link.device, link._deadline_seconds = Forbidden.device, 600.0
    assert not event.done()
    with pytest.raises(UsageError, match="`layer` would have to wait for a copy, while a CUDA graph is captured"):
        link.synchronize(event, "`layer`")


def test_the_speed_of_a_link_is_measured_once_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = [(1.0, 2.0)]
    monkeypatch.setattr(links, "_speeds", {})
    monkeypatch.setattr(torch, "Stream", lambda device: None)
    monkeypatch.setattr(AcceleratorLink, "_measure", lambda link: speeds.pop())
    for _ in range(2):
        link = AcceleratorLink(torch.device("meta", 0), 60.0)
        assert (link.out_bytes_per_second, link.back_bytes_per_second) == (1.0, 2.0)
