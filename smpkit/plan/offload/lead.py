"""When to load offloaded boundaries back: as late as compute still never waits, so that as few as possible are held."""

from __future__ import annotations

from collections.abc import Sequence

from smpkit.errors import UsageError

__all__ = ["auto_lead", "latest_issues"]


def latest_issues(compute_seconds: Sequence[float], load_seconds: Sequence[float]) -> list[int]:
    """Return for each piece of work the latest one at whose start its load can be issued without compute waiting.

    The device does the pieces in order, forwards and backwards of layers alike. Loads follow each other on one stream,
    in the order in which they are needed, so a slow one pushes those before it to an earlier time. The answer for a
    piece that loads nothing is the piece itself; 0 also means that even the beginning is too late.

    Args:
        compute_seconds: how long each piece of work takes.
        load_seconds: how long the stream is busy with what each piece needs back, latency included; 0 for nothing.
    """
    if len(compute_seconds) != len(load_seconds):
        raise UsageError(
            f"{len(compute_seconds)} compute times and {len(load_seconds)} load times do not belong together"
        )
    starts = [0.0]
    for seconds in compute_seconds:
        starts.append(starts[-1] + seconds)
    issues = list(range(len(compute_seconds)))
    deadline, issue = starts[-1], len(compute_seconds)
    for piece in reversed(range(len(compute_seconds))):
        if not load_seconds[piece]:
            continue
        deadline = min(deadline, starts[piece]) - load_seconds[piece]
        issue = min(issue, piece)
        while issue > 0 and starts[issue] > deadline:
            issue -= 1
        issues[piece] = issue
    return issues


def auto_lead(compute_seconds: Sequence[float], load_seconds: Sequence[float], most: int | None = None) -> int:
    """Return how many pieces of work ahead of its use a load must be issued so that compute never waits.

    It is the smallest such number: with one less, some load is late. Where the link cannot keep up, it is what the
    whole list would need, so give the most that you would hold.

    Args:
        compute_seconds: as in `latest_issues`.
        load_seconds: as in `latest_issues`.
        most: an upper bound of the answer, at least 1; None: no bound.

    Example:
        A link twice as slow as a forward needs two forwards of time before the first backward, and a backward of three
        hides every later load:

        >>> auto_lead([1, 1, 1, 3, 3, 3], [0, 0, 0, 2, 2, 2])
        2
    """
    issues = latest_issues(compute_seconds, load_seconds)
    lead = max((piece - issue for piece, issue in enumerate(issues)), default=0)
    return max(1, lead if most is None else min(lead, most))
