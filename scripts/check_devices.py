"""Find what the engine must not leave to chance about devices: where tensors are made, and which accelerator there is.

Messages, headers and flags have to lie on the host, and under `torch.set_default_device("cuda")` they would not. So
each call of a function such as `torch.zeros` names its device.

The engine runs on any accelerator of torch's, so only `core/devices` knows one by name: `torch.cuda`, `is_cuda`, and
strings such as "cuda:0" and "nccl" are refused elsewhere. Comments and docstrings may say them.

Usage: check_devices.py FOLDER...
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from torch.utils._device import _device_constructors

FACTORIES: Final = frozenset(function.__name__ for function in _device_constructors())
"""What takes its device from torch's default."""
NAMES: Final = frozenset({"cuda", "hccl", "hpu", "mps", "nccl", "npu", "xccl", "xpu"})
"""Devices, and what connects them."""
MAY_NAME: Final = ("core/devices", "compat/cuda_on_cpu.py")
"""The package that knows devices, and what stands for CUDA in old scripts."""


def problems_in(source: str, *, may_name: bool = False) -> Iterator[tuple[int, str]]:
    """Yield the line and the fault of each call that does not say its device, and of each device that has a name."""
    tree = ast.parse(source)
    statements = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings among them
    for node in ast.walk(tree):
        name, line = _of_torch(node), getattr(node, "lineno", 0)
        if name in FACTORIES and isinstance(node, ast.ImportFrom):
            yield line, f"call it as `torch.{name}`, which is checked"
        if name in FACTORIES and isinstance(node, ast.Call) and not {"device", None} & {k.arg for k in node.keywords}:
            yield line, f'`torch.{name}` without `device=`: write device="cpu" where the host is meant'
        if may_name:
            continue
        if name in NAMES and not isinstance(node, ast.Call):
            yield line, f"`torch.{name}` is one device: ask `smpkit.torch.core.devices`"
        if isinstance(node, ast.Attribute) and node.attr in {f"is_{device}" for device in NAMES}:
            yield line, f"`{node.attr}` is of one device: ask `smpkit.torch.core.devices`"
        text = node.value if isinstance(node, ast.Constant) and node not in statements else None
        if isinstance(text, str) and text.partition(":")[0] in NAMES:
            yield line, f'"{text}" is one device: ask `smpkit.torch.core.devices`, or compare with "cpu"'


def _of_torch(node: ast.AST) -> str:
    """Return which name of torch's top module a node calls, reads or imports."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name("torch"), attr=name)):
            return name
        case ast.Attribute(value=ast.Name("torch"), attr=name):
            return name
        case ast.Import(names=names):
            paths = [alias.name for alias in names]
        case ast.ImportFrom(module=module, names=names):
            paths = [f"{module}.{alias.name}" for alias in names]
        case _:
            return ""
    tops = [path.split(".")[1] for path in paths if path.startswith("torch.")]
    return next((name for name in tops if name in FACTORIES | NAMES), "")


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
