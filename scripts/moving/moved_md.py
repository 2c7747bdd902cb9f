"""Write docs/internals/moved.md from the tables beside this script."""

from __future__ import annotations

import ast
import io
import pathlib
import subprocess
import tarfile

HERE = pathlib.Path(__file__).parent
ROOMS = {
    "names1": "Pipeline, processes and failures",
    "names2": "Offloading, activation checkpointing, checkpoints",
    "names3": "Tensor and data parallelism, placement, precision",
}
HEAD = """# Where things were before

Notes and reviews written before 23 November 2026 name modules and identifiers as they were then. This page maps them to
today's. The last commit with the old layout is d6e05b5 (`git show d6e05b5:smpkit/torch/pipeline/moves.py`).
"""


def modules() -> list[tuple[str, str]]:
    rows = []
    for line in (HERE / "layout.txt").read_text().splitlines():
        if not line.startswith("#") and "<-" in line:
            new, olds = line.split("<-")
            rows += [(f"smpkit.torch.{old}", f"smpkit.torch.{new.strip()}") for old in olds.split()]
    for table in ("outer.tsv", *sorted(path.name for path in HERE.glob("*_moved.tsv"))):
        for line in (HERE / table).read_text().splitlines():
            if line.strip():
                old, new = line.split("\t")[:2]
                rows.append((old, new))
    moved = dict(rows)
    return sorted((old, moved.get(new, new)) for old, new in rows if old != moved.get(new, new))


def tests() -> list[tuple[str, str]]:
    lines = (HERE / "tests.txt").read_text().splitlines()
    pairs = [line.split(" -> ") for line in lines if " -> " in line and not line.startswith("#")]
    return sorted((old, new) for old, new in pairs)


def defined() -> set[str]:
    """Return the names that were classes, functions, attributes or variables of a module: what notes cite."""
    archive = subprocess.run(["git", "archive", "d6e05b5", "smpkit"], capture_output=True, check=True).stdout
    found = set()
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar.getmembers():
            stream = tar.extractfile(member) if member.name.endswith(".py") else None
            if stream is None:
                continue
            tree = ast.parse(stream.read())
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    found.add(node.name)
                elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    found.add(node.attr)
            bodies = [tree.body, *(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
            for statement in (statement for body in bodies for statement in body):
                targets = getattr(statement, "targets", [getattr(statement, "target", None)])
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


DEFINED = defined()


def renamed(table: str) -> list[tuple[str, str]]:
    rows = set()
    for line in (HERE / f"{table}.tsv").read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            old, new = line.split("\t")[:2]
            if old in DEFINED:
                rows.add((old, new))
    return sorted(rows, key=lambda row: (row[0].lower().lstrip("_"), row))


def main() -> None:
    text = [HEAD, "## Modules", "", "| then | now |", "|---|---|"]
    text += [f"| `{old}` | `{new}` |" if " " not in new else f"| `{old}` | {new} |" for old, new in modules()]
    text += ["", "## Tests", "", "Below `tests.torch`.", "", "| then | now |", "|---|---|"]
    text += [f"| `{old}` | `{new}` |" for old, new in tests()]
    text += ["", "## Names", "", "A name with two entries meant two things; the second name says which."]
    for table, title in ROOMS.items():
        news: dict[str, list[str]] = {}
        for old, new in renamed(table):
            news.setdefault(old, []).append(new)
        entries = [f"`{old}` → {', '.join(f'`{new}`' for new in new_names)}" for old, new_names in news.items()]
        text += ["", f"### {title}", ""]
        line = ""
        for entry in entries:
            if line and len(line) + len(entry) + 3 > 118:
                text.append(line + " ·")
                line = entry
            else:
                line = f"{line} · {entry}" if line else entry
        text.append(line)
    pathlib.Path("docs/internals/moved.md").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
