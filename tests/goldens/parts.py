"""The parts of the goldens; each is imported when it is collected, so that one that fails spoils no other."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from tests.goldens.items import Part

__all__ = ["CHEAP", "PARTS"]

CHEAP = ("pages", "plans", "requests", "commands", "errors")
"""What the default tests compare."""


def _call(module: str, function: str) -> Callable[[], Any]:
    def call() -> Any:
        return getattr(importlib.import_module(f"tests.goldens.{module}"), function)()

    return call


PARTS = {
    part.name: part
    for part in (
        Part(
            "hashes",
            "bits of losses, gradients and weights after a few steps, over a grid of ways to train",
            _call("hashes", "collect"),
            _call("hashes", "machine"),
        ),
        Part(
            "counts",
            "messages, bytes and Python calls of a steady step, frames around a layer; they may fall",
            _call("counts", "collect"),
            _call("counts", "machine"),
            may_fall=True,
            tolerances={"pp2 zero_bubble": 0.02, "pp2, 2 virtual stages": 0.02},  # schedules by what a step took
        ),
        Part("pages", "public names, configuration, JSON Schema, `--help` of every command", _call("pages", "collect")),
        Part("plans", "`smpkit plan --json` of a spread of configurations", _call("plans", "collect")),
        Part("models", "`smpkit plan --json` of models", _call("plans", "collect_models")),
        Part("requests", "`smpkit submit --dry-run` of a spread of jobs", _call("requests", "collect")),
        Part("commands", "command lines and variables of the image's launcher", _call("commands", "collect")),
        Part("errors", "messages and hints for bad input", _call("errors", "collect")),
        Part(
            "ratios",
            "processor time of smpkit / that of a peer, from the benchmarks",
            _call("ratios", "collect"),
            _call("counts", "machine"),
            default=False,
            may_fall=True,
            tolerances={
                "a microbatch of a pipeline, smpkit / torch's 1F1B": 0.1,
                "a saved tensor, offloaded by smpkit / allocated and copied": 0.2,  # microseconds of allocators
            },
        ),
    )
}
