"""Take activations to the host in several ways on the same model, and write the tables of README.md.

Parts: `bytes` counts what moves per block; `simulated` and `policies` are steps on the simulated accelerator, in
virtual time; `training` measures steps on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.activation_offload import contestants, simulated, training

_README: Final = Path(__file__).parent / "README.md"
_VIRTUAL: Final = {"simulated", "policies"}
"""The same on every machine."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="none: all that can run here")
    parser.add_argument("--results", type=Path, help="also write each part's rows and environment to this folder")
    parser.add_argument("--dry", action="store_true", help="leave README.md as it is")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8 << 10, 16 << 10, 32 << 10], help="of `training`")
    options = parser.parse_args(arguments)
    parts: dict[str, Any] = {
        "bytes": contestants.rows,
        "simulated": simulated.stage_rows,
        "policies": simulated.policy_rows,
        "training": partial(training.rows, options.tokens),
    }
    if unknown := sorted(set(options.parts) - parts.keys()):
        parser.error(f"no part `{unknown[0]}`; there are {', '.join(parts)}")
    # A process has one accelerator: a simulated one would take the place of a real one.
    left_out = _VIRTUAL if torch.cuda.is_available() else {"training"}
    for name in options.parts or [part for part in parts if part not in left_out]:
        rows = []
        for row in parts[name]():
            print(json.dumps(row), flush=True)
            rows.append(row)
        text = _tables(rows) if name in _VIRTUAL else f"{_tables(rows)}\n\n{_environment()}"
        print(f"\n{name}\n\n{text}")
        if options.results is not None:
            options.results.mkdir(parents=True, exist_ok=True)
            content = {"environment": _environment(), "rows": rows}
            (options.results / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
        if not options.dry:
            begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
            before, _, rest = _README.read_text().partition(begin)
            _README.write_text(f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}")
    return 0


def _environment() -> str:
    """Return what the numbers depend on."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (
        f"{os.cpu_count()} cores ({platform.machine()}), {device}, load average {os.getloadavg()[1]:.1f} over five"
        f" minutes; {platform.system()}, Python {platform.python_version()}, torch {torch.__version__},"
        f" {torch.get_num_threads()} thread(s)."
    )


def _tables(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table per title, with a column per key of its rows."""
    texts = []
    for title in dict.fromkeys(row.get("table", "") for row in rows):
        own = [{k: v for k, v in row.items() if k != "table"} for row in rows if row.get("table", "") == title]
        heads = list(dict.fromkeys(key for row in own for key in row))
        lines = [heads, ["---"] * len(heads), *([_text(row.get(head, "")) for head in heads] for row in own)]
        texts.append(f"{title}\n\n" * bool(title) + "\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(texts)


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    raise SystemExit(main())
