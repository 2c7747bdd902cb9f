"""The engine says on which device it makes tensors, and `scripts/lint` sees where it does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_SCRIPT = _ROOT / "scripts" / "check_devices.py"


def checked(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, _SCRIPT, folder], capture_output=True, text=True, check=False)


def test_the_product_says_its_devices() -> None:
    done = checked(_ROOT / "smpkit" / "torch")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("line", "is_right"),
    [
        ("x = torch.zeros(3)", False),
        ("x = torch.zeros(3, device='cpu')", True),
        ("x = torch.tensor([1], dtype=torch.int64)", False),
        ("x = torch.tensor([1], device=x.device)", True),
        ("x = f(torch.randn(\n    2,\n    3,\n))", False),
        ("x = torch.empty(2, **where)", True),
        ("x = torch.ones(2)  # device: the user's default", True),
        ("x = torch.normal(mean, deviation)", True),
        ("x = torch.normal(0.0, 1.0, size=(2,))", False),
        ("x = torch.frombuffer(memory, dtype=torch.uint8)", True),
        ("x = y.new_zeros(3)", True),
        ("with torch.device('cpu'):\n    x = torch.zeros(3)", True),
        ("with torch.no_grad():\n    x = torch.zeros(3)", False),
        ("from torch import zeros", False),
        ("from torch import Tensor", True),
    ],
)
def test_calls_that_make_tensors_where_the_user_s_default_is_are_found(
    line: str, is_right: bool, tmp_path: Path
) -> None:
    (tmp_path / "module.py").write_text(f"import torch\n{line}\n")
    done = checked(tmp_path)
    assert done.returncode == (not is_right)
    assert is_right or f"module.py:{3 if line.startswith('with') else 2}: " in done.stderr
