"""Move and merge the modules of smpkit.torch as layout.txt says, and rewrite every import and path of them.

    python scripts/moving/move.py [--check]

A merged module has the docstring of the old module of its name, or else of the first; the imports and `__all__` of all;
and their bodies in the listed order, each other docstring turned into a comment at the head of its part. Names that two
parts define, and imports that the script cannot rewrite, are reported.
"""

from __future__ import annotations

import ast
import pathlib
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field

ROOT = pathlib.Path("smpkit/torch")
PREFIX = "smpkit.torch."
MARK = "smpkit\0torch\0"
HERE = pathlib.Path(__file__).parent
PACKAGES = {"checkpointing": "recompute", "partitioning": "placement"}
DOCSTRINGS = {
    "core": "What every part of the runtime stands on: the process's state, trees of values, tensor specs, module calls.",
    "distributed": "Ranks: how they start and find each other, their groups and objects, and how they fail together.",
    "placement": "Where each parameter lives: which pipeline rank owns it, its tensor-parallel shard, when it is made.",
    "data_parallel": "Data parallelism: gradient reduction, sharded optimizer state and sharded parameters.",
    "precision": "Half precision: casting a model, and the loss scale.",
    "optim": "What an optimizer step needs over all ranks: gradient norms and master weights.",
    "compat": "What other libraries expect: `torch.cuda` on the CPU, Hugging Face's Trainer, SMP v1's helpers.",
    "tensor_parallel.layers": "Tensor-parallel layers.",
    "tensor_parallel.hf_plan": "Tensor parallelism for Hugging Face models by the plan that comes with them (`_tp_plan`).",
}
PUBLIC = {"state", "model", "step", "amp", "nn", "optimizers", "checkpoint"}  # attributes of the package, not modules


def read_layout() -> dict[str, list[str]]:
    layout = {}
    for line in (HERE / "layout.txt").read_text().splitlines():
        if line.startswith("#") or "<-" not in line:
            continue
        new, old = line.split("<-")
        layout[new.strip()] = old.split()
    return layout


def read_tests() -> dict[str, str]:
    lines = (HERE / "tests.txt").read_text().splitlines()
    return dict(line.split(" -> ") for line in lines if " -> " in line and not line.startswith("#"))


LAYOUT = read_layout()
TESTS = read_tests()
MOVED = {old: new for new, olds in LAYOUT.items() for old in olds}


def file_of(module: str) -> pathlib.Path:
    return ROOT / (module.replace(".", "/") + ".py")


@dataclass
class Part:
    """One old module, cut up."""

    module: str
    docstring: str = ""
    imports: list[ast.Import | ast.ImportFrom] = field(default_factory=list)
    typing_imports: list[ast.Import | ast.ImportFrom] = field(default_factory=list)
    exported: list[str] = field(default_factory=list)
    body: str = ""
    names: set[str] = field(default_factory=set)
    texts: dict[str, str] = field(default_factory=dict)


def is_type_checking(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
        and not node.orelse
        and all(isinstance(inner, ast.Import | ast.ImportFrom) for inner in node.body)
    )


def names_of(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return {node.target.id}
    return set()


def cut(module: str, without: dict[str, str] | None = None) -> Part:
    """Cut up a module, but for assignments that another module has already, word for word (name and text)."""
    part = Part(module)
    source = file_of(module).read_text()
    tree = ast.parse(source)
    lines = source.splitlines()
    gone: set[int] = set()

    def drop(node: ast.stmt) -> None:
        gone.update(range(node.lineno - 1, node.end_lineno or node.lineno))

    for position, node in enumerate(tree.body):
        if position == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            part.docstring = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            drop(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            if not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
                part.imports.append(node)
            drop(node)
        elif is_type_checking(node):
            assert isinstance(node, ast.If)
            part.typing_imports += node.body  # type: ignore[arg-type]
            drop(node)
        elif isinstance(node, ast.Assign) and names_of(node) == {"__all__"}:
            part.exported = ast.literal_eval(node.value)
            drop(node)
        elif len(names_of(node)) == 1 and (without or {}).get(*names_of(node)) == ast.unparse(node):
            drop(node)
        else:
            part.names |= names_of(node)
            part.texts |= {name: ast.unparse(node) for name in names_of(node)}
    part.body = "\n".join(line for number, line in enumerate(lines) if number not in gone).strip("\n")
    return part


def aliases(nodes: list[ast.Import | ast.ImportFrom]) -> list[tuple[str | None, str, str | None]]:
    """Return (module or None for a plain import, name, as name)."""
    found = []
    for node in nodes:
        for alias in node.names:
            found.append((node.module if isinstance(node, ast.ImportFrom) else None, alias.name, alias.asname))
    return found


def written(imports: list[tuple[str | None, str, str | None]], indent: str = "") -> str:
    lines = []
    for module, name, as_name in dict.fromkeys(imports):
        what = name if as_name is None else f"{name} as {as_name}"
        lines.append(f"{indent}import {what}" if module is None else f"{indent}from {module} import {what}")
    return "\n".join(lines)


def rule_of(title: str) -> list[str]:
    """Return the line that begins a part of a module."""
    rule = f"# --- {title} "
    if len(rule) > 120:
        return textwrap.wrap(f"# --- {title}", 120, subsequent_indent="# ")
    return [rule + "-" * (120 - len(rule))]


def as_comment(docstring: str) -> str:
    text = ast.literal_eval(docstring).strip("\n")
    title, *rest = text.splitlines()
    title = title.strip().rstrip(".")
    lines = rule_of(title)
    while rest and not rest[0].strip():
        rest.pop(0)
    if any(len(line) > 118 for line in rest):
        wrapped = []
        for paragraph in "\n".join(rest).split("\n\n"):
            drawn = any(line.startswith((" ", "-", "*")) or "::" in line for line in paragraph.splitlines())
            wrapped.append(paragraph if drawn else textwrap.fill(paragraph, 118, break_on_hyphens=False))
        rest = "\n\n".join(wrapped).splitlines()
    lines += [f"# {line}".rstrip() for line in rest]
    return "\n".join(lines)


def problem(text: str) -> None:
    print("problem:", text)


def merge(new: str, olds: list[str]) -> str:
    texts: dict[str, str] = {}
    parts = []
    for old in olds:
        parts.append(cut(old, texts))
        texts |= parts[-1].texts
    inside = {PREFIX + old for old in olds}
    base = new.rsplit(".", 1)[-1]
    leading = next((part for part in parts if part.module.rsplit(".", 1)[-1] == base), parts[0])
    seen: dict[str, str] = {}
    for part in parts:
        for name in sorted(part.names):
            if name in seen:
                problem(f"{new}: {name} is in {seen[name]} and in {part.module}")
            seen[name] = part.module
    runtime, typing = [], []
    for part in parts:
        for found, target in ((aliases(part.imports), runtime), (aliases(part.typing_imports), typing)):
            for module, name, as_name in found:
                if module in inside:
                    if as_name is not None and as_name != name:
                        problem(f"{new}: {part.module} imports {name} of {module} as {as_name}")
                    continue
                if module is not None and f"{module}.{name}" in inside:
                    problem(f"{new}: {part.module} imports the module {module}.{name}")
                target.append((module, name, as_name))
                if name in seen and as_name is None and module != "typing":
                    problem(f"{new}: {part.module} imports {name} of {module}, which {seen[name]} defines")
    typing = [entry for entry in typing if entry not in runtime]
    pieces = [leading.docstring, "", "from __future__ import annotations", "", written(runtime)]
    if typing:
        if ("typing", "TYPE_CHECKING", None) not in runtime:
            problem(f"{new}: TYPE_CHECKING is not imported")
        pieces += ["", "if TYPE_CHECKING:", written(typing, "    ")]
    exported = sorted({name for part in parts for name in part.exported})
    if exported:
        pieces += ["", f"__all__ = {exported!r}"]
    for part in parts:
        if part is not leading:
            pieces += ["", "", as_comment(part.docstring), ""]
        elif part is not parts[0]:
            title = ast.literal_eval(part.docstring).strip().splitlines()[0].rstrip(".")
            pieces += ["", "", *rule_of(title), ""]
        pieces += ["", part.body]
    return "\n".join(pieces) + "\n"


def new_name(dotted: str) -> str:
    """Return the new path of a dotted name below smpkit.torch, by the longest known beginning."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        head = ".".join(parts[:length])
        if head in MOVED:
            return ".".join([MOVED[head], *parts[length:]])
    return ".".join([PACKAGES.get(parts[0], parts[0]), *parts[1:]])


def module_imports(text: str, path: str) -> str:
    """Rewrite `from smpkit.torch.package import module`: the name after `import` is a module that moves."""
    if "from smpkit.torch" not in text:
        return text
    replacements = []
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("smpkit.torch"):
            continue
        package = (node.module or "")[len("smpkit.torch") :].lstrip(".")
        moved, kept = [], []
        for alias in node.names:
            full = f"{package}.{alias.name}".lstrip(".")
            if full in MOVED and not (package == "" and alias.name in PUBLIC) and MOVED[full] != full:
                moved.append((MOVED[full], alias.asname or alias.name))
            else:
                kept.append(alias.name if alias.asname is None else f"{alias.name} as {alias.asname}")
        if not moved:
            continue
        indent = " " * node.col_offset
        new_lines = []
        if kept:
            new_lines.append(f"{indent}from {node.module} import {', '.join(kept)}\n")
        for new, name in moved:
            head, _, last = new.rpartition(".")
            where = MARK + head if head else MARK.rstrip("\0")
            new_lines.append(f"{indent}from {where} import {last}" + (f" as {name}" if name != last else "") + "\n")
        replacements.append((node.lineno - 1, node.end_lineno or node.lineno, new_lines))
    for start, end, new_lines in sorted(replacements, reverse=True):
        lines[start:end] = new_lines
    return re.sub(r"^( *)from smpkit\.torch([\w.]*) import (\w+)$", in_a_script, "".join(lines), flags=re.M)


def in_a_script(match: re.Match[str]) -> str:
    """Rewrite such an import in a string: a script that a test runs."""
    indent, package, name = match.groups()
    old = f"{package}.{name}".lstrip(".")
    if old not in MOVED or MOVED[old] == old or (not package and name in PUBLIC):
        return match[0]
    head, _, last = MOVED[old].rpartition(".")
    where = MARK + head if head else MARK.rstrip("\0")
    return f"{indent}from {where} import {last}" + (f" as {name}" if name != last else "")


def rewrite(text: str, path: str) -> str:
    if path.endswith(".py"):
        text = module_imports(text, path)
    text = re.sub(r"\bsmpkit\.torch\.([A-Za-z_][\w.]*[\w])", lambda match: MARK + new_name(match[1]), text)
    text = re.sub(r"\bsmpkit\.torch\.([A-Za-z_])(?![\w.])", lambda match: MARK + match[1], text)

    def path_of(match: re.Match[str]) -> str:
        dotted = match[1].replace("/", ".")
        return "smpkit/torch/" + MOVED.get(dotted, dotted).replace(".", "/") + ".py"

    text = re.sub(r"\bsmpkit/torch/([\w/]+)\.py\b", path_of, text)
    for old, new in PACKAGES.items():
        text = re.sub(rf"\bsmpkit/torch/{old}\b", f"smpkit/torch/{new}", text)
    return text.replace(MARK, PREFIX).replace(MARK.rstrip("\0"), PREFIX.rstrip("."))


def rewrite_tests(text: str) -> str:
    for old, new in TESTS.items():
        text = re.sub(rf"\btests\.torch\.{re.escape(old)}\b", "tests\0torch\0" + new, text)
        old_path, new_path = old.replace(".", "/"), new.replace(".", "/")
        text = re.sub(rf"\btests/torch/{old_path}\.py\b", f"tests\0torch/{new_path}.py", text)
        text = re.sub(rf"(?<![\w/])torch/{old_path}\.py\b", f"torch/{new_path}.py", text)
        if "." not in old:
            package, _, name = new.rpartition(".")
            text = re.sub(rf"\bfrom tests\.torch import {old}\b", f"from tests\0torch\0{package} import {name} as {old}", text)
    return text.replace("tests\0torch\0", "tests.torch.").replace("tests\0torch", "tests/torch")


def move_tests() -> None:
    tests = pathlib.Path("tests/torch")
    for old, new in TESTS.items():
        source, target = (tests / (name.replace(".", "/") + ".py") for name in (old, new))
        target.parent.mkdir(exist_ok=True)
        if len(source.parts) < len(target.parts):
            source.write_text(source.read_text().replace("Path(__file__).parents[2]", "Path(__file__).parents[3]"))
        git("mv", str(source), str(target))
        init = target.parent / "__init__.py"
        if not init.exists():
            init.write_text("")
    for package in PACKAGES:
        git("rm", "-q", str(tests / package / "__init__.py"))
    git("add", "tests")


def git(*arguments: str) -> None:
    subprocess.run(["git", *arguments], check=True)


def make_packages() -> None:
    for old, new in PACKAGES.items():
        (ROOT / new).mkdir(exist_ok=True)
        git("mv", str(ROOT / old / "__init__.py"), str(ROOT / new / "__init__.py"))
    for package, docstring in DOCSTRINGS.items():
        folder = ROOT / package.replace(".", "/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").write_text(f'"""{docstring}"""\n')
    (ROOT / "placement/__init__.py").write_text(f'"""{DOCSTRINGS["placement"]}"""\n')


def main() -> None:
    merged = {new: merge(new, olds) for new, olds in LAYOUT.items()}
    if "--check" in sys.argv:
        return
    sizes = {old: len(file_of(old).read_text()) for old in MOVED}
    make_packages()
    # A new file may have the path of an old one that goes elsewhere: first all out of the way, then in.
    for new, olds in LAYOUT.items():
        for old in olds:
            if old == max(olds, key=lambda module: sizes[module]):
                git("mv", str(file_of(old)), str(file_of(old)) + ".moving")
            else:
                git("rm", "-q", str(file_of(old)))
        olds.sort(key=lambda module: -sizes[module])
    for new, olds in LAYOUT.items():
        file_of(new).parent.mkdir(parents=True, exist_ok=True)
        git("mv", str(file_of(olds[0])) + ".moving", str(file_of(new)))
        file_of(new).write_text(merged[new])
    git("add", "-A", "smpkit/torch")
    move_tests()
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.split()
    for path in listed:
        if path.startswith(("scripts/moving/", "CHANGELOG", "benchmarks/results")):
            continue
        if (
            not path.endswith((".py", ".md", ".toml", ".sh", ".yaml", ".yml", ".json"))
            and "/" in path
            and not path.startswith("scripts/")
        ):
            continue
        if path.startswith("tests/goldens/recorded"):
            continue
        text = pathlib.Path(path).read_text()
        result = rewrite_tests(rewrite(text, path))
        if result != text:
            pathlib.Path(path).write_text(result)


if __name__ == "__main__":
    main()
