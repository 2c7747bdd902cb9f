"""Messages go out in their order, as soon as their bytes are there, and at the latest before this rank waits."""

from __future__ import annotations

from typing import Any

import torch

from smpkit.torch.pipeline.transport import Outbox


class Event:
    """An event of a device; it happens when it is told to, or waited for."""

    def __init__(self) -> None:
        self.happened = False
        self.waits = 0

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        self.happened = True
        self.waits += 1


def outbox() -> tuple[Outbox, list[int]]:
    sent: list[int] = []
    return Outbox(lambda packed, target, tag: sent.append(tag)), sent


def send(box: Outbox, tag: int, ready: Any) -> None:
    box.send(torch.zeros(1), 1, tag, ready)


def test_what_is_there_already_goes_out_at_once() -> None:
    box, sent = outbox()
    send(box, 1, None)
    assert sent == [1]


def test_messages_are_sent_once_their_copies_are_over_and_none_overtakes_another() -> None:
    box, sent = outbox()
    first, second = Event(), Event()
    send(box, 1, first)
    send(box, 2, second)
    send(box, 3, None)
    second.happened = True
    box.poll()
    assert sent == []
    first.happened = True
    box.poll()
    assert sent == [1, 2, 3]
    assert first.waits == second.waits == 0


def test_before_a_wait_everything_is_sent() -> None:
    box, sent = outbox()
    events = [Event(), Event()]
    for tag, event in enumerate(events):
        send(box, tag, event)
    box.flush()
    box.flush()
    assert sent == [0, 1]
    assert [event.waits for event in events] == [1, 1]
