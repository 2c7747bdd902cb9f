"""What smpkit's Python costs beside its peers, from benchmarks that take turns with them: ratios of processor time.

Processor time depends little on what else the machine runs, and a ratio little on the machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.activation_offload.overhead import overhead_table
from tests.goldens.items import Items

__all__ = ["collect"]

ROOT = Path(__file__).parents[2]


def collect() -> Items:
    return {
        "a microbatch of a pipeline, smpkit / torch's 1F1B": _pipeline(),
        "a saved tensor, offloaded by smpkit / allocated and copied": _offloading(),
    }


def _pipeline() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        subprocess.run(
            [*launch, "-m", "benchmarks.pipeline.overhead", "--out", str(path)],
            cwd=ROOT,
            check=True,
            timeout=600,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # where each rank's layers lie, thirteen times
        )
        figures = json.loads(path.read_text())
    ours, theirs = (figures[f"a microbatch, {name}, fastest step"] for name in ("smpkit", "torch 1F1B"))
    return {f"rank {rank}": round(mine / other, 2) for rank, (mine, other) in enumerate(zip(ours, theirs, strict=True))}


def _offloading() -> dict[str, float]:
    rows = {row["name"]: row for row in overhead_table()}
    ours, theirs = rows["smpkit, `activations`"], rows["allocate and copy, both ways"]
    return {kind: round(ours[f"least {kind}"] / theirs[f"least {kind}"], 2) for kind in ("pack", "unpack")}
