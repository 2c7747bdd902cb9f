"""Take activations to the host in several ways on the same model, and write the tables of README.md.

Parts: `bytes` counts what moves per block; `simulated` and `policies` are steps on the simulated accelerator, in
virtual time; `training` measures steps on a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch

from benchmarks.activation_offload import contestants, simulated, training
from benchmarks.common import Part, parser, run, table


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, nargs="+", default=[8 << 10, 16 << 10, 32 << 10], help="of `training`")
    parts: dict[str, Part] = {
        # First: autograd takes no device that is registered after the first backward of a process.
        "simulated": lambda _: table_of(simulated.stage_rows()),
        "policies": lambda _: table_of(simulated.policy_rows()),
        "bytes": lambda _: table_of(contestants.rows()),
        "training": lambda chosen: table_of(training.rows([32] if chosen.quick else chosen.tokens)),
    }
    # A process has one accelerator: a simulated one would take the place of a real one.
    run(__file__, options, parts, ["bytes", "training"] if torch.cuda.is_available() else [*parts][:3])


def table_of(results: Iterable[dict[str, Any]]) -> tuple[str, object]:
    """Print each row at once, since a run may be cut off; return a table with a column per key."""
    rows = []
    for row in results:
        print(json.dumps(row), flush=True)
        rows.append(row)
    heads = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[row.get(head, "") for head in heads] for row in rows]
    return table(heads, [[f"{cell:.4g}" if isinstance(cell, float) else cell for cell in row] for row in cells]), rows


if __name__ == "__main__":
    main()
