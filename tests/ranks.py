"""`run_ranks`, with what the ranks of these tests import loaded ahead."""

from __future__ import annotations

from smpkit.testing.ranks import FORKSERVER, RankFailed, preload, run_ranks

__all__ = ["FORKSERVER", "RankFailed", "run_ranks"]

preload("tests.preloaded")
