"""Take activations to the host in several ways on the same model, and write the tables of README.md.

Parts: `bytes` counts what moves per block; `simulated` and `policies` are steps on the simulated accelerator, in
virtual time; `training` measures steps on a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch

from benchmarks.activation_offload import contestants, simulated, training
from benchmarks.common import parser, report, table

_VIRTUAL: Final = {"simulated", "policies"}
"""The same on every machine."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("parts", nargs="*", metavar="PART", help="none: all that can run here")
    options.add_argument("--tokens", type=int, nargs="+", default=[8 << 10, 16 << 10, 32 << 10], help="of `training`")
    chosen = options.parse_args(arguments)
    parts: dict[str, Any] = {
        # First: autograd takes no device that is registered after the first backward of a process.
        "simulated": simulated.stage_rows,
        "policies": simulated.policy_rows,
        "bytes": contestants.rows,
        "training": partial(training.rows, [32] if chosen.quick else chosen.tokens),
    }
    if unknown := sorted(set(chosen.parts) - parts.keys()):
        options.error(f"no part `{unknown[0]}`; there are {', '.join(parts)}")
    # A process has one accelerator: a simulated one would take the place of a real one.
    left_out = _VIRTUAL if torch.cuda.is_available() else {"training"}
    for name in chosen.parts or [part for part in parts if part not in left_out]:
        rows = []
        for row in parts[name]():
            print(json.dumps(row), flush=True)
            rows.append(row)
        report(__file__, name, _tables(rows), chosen, rows, about=None if name in _VIRTUAL else "")
    return 0


def _tables(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table per title, with a column per key of its rows."""
    texts = []
    for title in dict.fromkeys(row.get("table", "") for row in rows):
        own = [{k: v for k, v in row.items() if k != "table"} for row in rows if row.get("table", "") == title]
        heads = list(dict.fromkeys(key for row in own for key in row))
        cells = [[_text(row.get(head, "")) for head in heads] for row in own]
        texts.append(f"{title}\n\n" * bool(title) + table(heads, cells))
    return "\n\n".join(texts)


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    raise SystemExit(main())
