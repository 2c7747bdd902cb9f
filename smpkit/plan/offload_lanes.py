"""The two directions of a link in time: each copies in order, and while both copy they may slow each other."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from smpkit.plan.offload_work import LinkSpeed, Work

__all__ = ["Copy", "Lane", "Lanes"]


@dataclass(frozen=True)
class Copy:
    """A boundary on its way."""

    work: Work
    """The forward that made it, or the backward that needs it."""
    start_seconds: float
    end_seconds: float


class Lane:
    """One direction; what is in the queue waits for its turn, and the first of it is what is being copied."""

    def __init__(self, bytes_per_second: float, latency_seconds: float) -> None:
        self.queue: list[Work] = []
        self.copies: list[Copy] = []
        """Those that have ended, in order."""
        self.is_busy = False
        self._full_rate, self._latency_seconds = bytes_per_second, latency_seconds
        self._begun_seconds = self._since_seconds = self._left_bytes = 0.0
        self._rate = bytes_per_second

    @property
    def end_seconds(self) -> float:
        """When the present copy ends if the speed stays; infinity without one."""
        return self._since_seconds + self._left_bytes / self._rate if self.is_busy else inf

    def start(self, now_seconds: float) -> None:
        """Begin the next copy."""
        self.is_busy = True
        self._begun_seconds, self._rate = now_seconds, self._full_rate
        self._since_seconds, self._left_bytes = now_seconds + self._latency_seconds, self.queue[0].num_bytes

    def moves(self, now_seconds: float) -> bool:
        """Return whether bytes are on the link, not only a latency."""
        return self.is_busy and now_seconds >= self._since_seconds

    def change_seconds(self, now_seconds: float) -> float:
        """Return when the present copy's first byte goes or, later, when it ends."""
        return self._since_seconds if self.is_busy and not self.moves(now_seconds) else self.end_seconds

    def set_share(self, share: float, now_seconds: float) -> None:
        """Let the present copy go on with this share of the full speed."""
        rate = share * self._full_rate
        if self.moves(now_seconds) and rate != self._rate:
            self._left_bytes -= (now_seconds - self._since_seconds) * self._rate
            self._since_seconds, self._rate = now_seconds, rate

    def finish(self, now_seconds: float) -> Work | None:
        """Return what the present copy was of if it has ended now."""
        if not self.is_busy or self.end_seconds > now_seconds:
            return None
        self.is_busy = False
        self.copies.append(Copy(self.queue[0], self._begun_seconds, now_seconds))
        return self.queue.pop(0)


class Lanes:
    """Both directions of one link."""

    def __init__(self, link: LinkSpeed) -> None:
        self.out = Lane(link.out_bytes_per_second, link.latency_seconds)
        self.back = Lane(link.back_bytes_per_second, link.latency_seconds)
        self._slowdown = link.slowdown

    def share_out(self, now_seconds: float) -> None:
        """Give each direction its speed from now on."""
        both = self.out.moves(now_seconds) and self.back.moves(now_seconds)
        for lane in (self.out, self.back):
            lane.set_share(self._slowdown if both else 1.0, now_seconds)

    def change_seconds(self, now_seconds: float) -> float:
        """Return when something changes in either direction."""
        return min(self.out.change_seconds(now_seconds), self.back.change_seconds(now_seconds))
