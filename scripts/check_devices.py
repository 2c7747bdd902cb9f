"""Find what the engine must not leave to chance about devices: where tensors are made, and which accelerator there is.

Messages, headers and flags have to lie on the host, and under `torch.set_default_device("cuda")` they would not. So
each call of a function such as `torch.zeros` names its device. What lies in `with torch.device(...)` is right as well.

The engine runs on any accelerator of torch's, so only `core/devices` knows one by name: `torch.cuda`, `is_cuda`, and
strings such as "cuda:0" and "nccl" are refused elsewhere. Comments and docstrings may say them.

A line that means it all the same (the user's default, a name that is no device) says why in a comment that begins with
`# device:`.

Usage: check_devices.py FOLDER...
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

FACTORIES: Final = frozenset(
    {
        *("arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_quantized", "empty_strided", "eye"),
        *("full", "linspace", "logspace", "normal", "ones", "rand", "randint", "randn", "randperm", "range"),
        *("scalar_tensor", "sparse_bsc_tensor", "sparse_bsr_tensor", "sparse_compressed_tensor", "sparse_coo_tensor"),
        *("sparse_csc_tensor", "sparse_csr_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
        *("bartlett_window", "blackman_window", "hamming_window", "hann_window", "kaiser_window"),
    }
)
"""What takes its device from torch's default: `torch.utils._device._device_constructors` at torch 2.13."""

NAMES: Final = frozenset({"cuda", "hccl", "hpu", "mps", "nccl", "npu", "xccl", "xpu"})
"""Devices, and what connects them."""
MAY_NAME: Final = ("core/devices", "compat/cuda_on_cpu.py")
"""The package that knows devices, and what stands for CUDA in old scripts."""

_ESCAPE: Final = "# device:"


def problems_in(source: str, *, may_name: bool = False) -> list[tuple[int, str]]:
    """Return the line and the fault of each call that does not say its device, and of each device that has a name."""
    lines, tree = source.splitlines(), ast.parse(source)
    faults = [*_faults(tree), *([] if may_name else _named(tree))]
    return [
        (node.lineno, fault)
        for node, fault in sorted(faults, key=lambda found: found[0].lineno)
        if not any(_ESCAPE in line for line in lines[node.lineno - 1 : node.end_lineno])
    ]


def _named(tree: ast.Module) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    statements = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]  # docstrings among them
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Import | ast.ImportFrom) and (name := _device_of_torch(node)):
            yield node, f"`{name}` is one device: ask `smpkit.torch.core.devices`"
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or node in statements:
            continue
        if node.value.partition(":")[0] in NAMES:
            yield node, f'"{node.value}" is one device: ask `smpkit.torch.core.devices`, or compare with "cpu"'


def _device_of_torch(node: ast.Attribute | ast.Import | ast.ImportFrom) -> str | None:
    """Return the name of a device that a node asks of torch."""
    if isinstance(node, ast.Attribute):
        is_module = isinstance(node.value, ast.Name) and node.value.id == "torch" and node.attr in NAMES
        return ast.unparse(node) if is_module or node.attr.removeprefix("is_") in NAMES - {node.attr} else None
    names = [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{name}" for name in names]
    return next((name for name in names if name.startswith("torch.") and name.split(".")[1] in NAMES), None)


def _faults(node: ast.AST) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    if isinstance(node, ast.With) and any(_is_of_torch(item.context_expr, {"device"}) for item in node.items):
        return
    if isinstance(node, ast.ImportFrom) and node.module == "torch":
        for name in sorted(FACTORIES.intersection(alias.name for alias in node.names)):
            yield node, f"call it as `torch.{name}`, which is checked"
    if isinstance(node, ast.Call) and _is_of_torch(node, FACTORIES) and not _says_device(node):
        yield node, f'`{ast.unparse(node.func)}` without `device=`: write device="cpu" where the host is meant'
    for child in ast.iter_child_nodes(node):
        yield from _faults(child)


def _is_of_torch(node: ast.expr, names: frozenset[str] | set[str]) -> bool:
    called = node.func if isinstance(node, ast.Call) else None
    return (
        isinstance(called, ast.Attribute)
        and called.attr in names
        and isinstance(called.value, ast.Name)
        and called.value.id == "torch"
    )


def _says_device(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Attribute) and call.func.attr == "normal" and not _names(call) & {"size"}:
        return True  # of tensors, which have a device
    return "device" in _names(call) or any(keyword.arg is None for keyword in call.keywords)


def _names(call: ast.Call) -> set[str | None]:
    return {keyword.arg for keyword in call.keywords}


def main(folders: list[str]) -> int:
    """Print what is wrong in the Python files of folders; return how many faults there are."""
    count = 0
    for path in sorted(path for folder in folders for path in Path(folder).rglob("*.py")):
        may_name = any(part in path.as_posix() for part in MAY_NAME)
        for line, fault in problems_in(path.read_text(encoding="utf-8"), may_name=may_name):
            count += 1
            sys.stderr.write(f"{path}:{line}: {fault}\n")
    return count


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
