"""The engine says on which device it makes tensors and names no accelerator; `scripts/lint` sees where it does not."""

from __future__ import annotations

import pytest

from scripts import check_devices


def faults_of(line: str, *, may_name: bool = False) -> list[int]:
    """Return the lines of what is wrong in a module with this line in it."""
    return [number for number, _ in check_devices.problems_in(f"import torch\n{line}\n", may_name=may_name)]


@pytest.mark.parametrize(
    ("line", "is_right"),
    [
        ("x = torch.zeros(3)", False),
        ("x = torch.zeros(3, device='cpu')", True),
        ("x = torch.tensor([1], dtype=torch.int64)", False),
        ("x = torch.tensor([1], device=x.device)", True),
        ("x = f(torch.randn(\n    2,\n    3,\n))", False),
        ("x = torch.empty(2, **where)", True),
        ("x = torch.frombuffer(memory, dtype=torch.uint8)", True),
        ("x = y.new_zeros(3)", True),
        ("with torch.no_grad():\n    x = torch.zeros(3)", False),
        ("from torch import zeros", False),
        ("from torch import Tensor", True),
    ],
)
def test_calls_that_make_tensors_where_the_user_s_default_is_are_found(line: str, is_right: bool) -> None:
    assert faults_of(line) == ([] if is_right else [3 if line.startswith("with") else 2])


@pytest.mark.parametrize(
    ("line", "is_right"),
    [
        ("torch.cuda.synchronize()", False),
        ("from torch.cuda import Stream", False),
        ("from torch import cuda", False),
        ("import torch.cuda.amp", False),
        ("if x.is_cuda:\n    pass", False),
        ("if x.is_cpu:\n    pass", True),
        ("if x.device.type == 'cuda':\n    pass", False),
        ("y = x.to('cuda:1')", False),
        ("y = x.to(f'cuda:{rank}')", False),
        ("backend = 'nccl'", False),
        ("device = torch.device('xpu', 0)", False),
        ("if torch.version.cuda is None:\n    pass", True),
        ("def f():\n    'cuda'", True),
        ("y = x.cuda  # torch.cuda and nccl", True),
        ("text = 'there is no CUDA; nccl: none'", True),
    ],
)
def test_only_the_package_of_devices_knows_one_by_name(line: str, is_right: bool) -> None:
    assert faults_of(line) == ([] if is_right else [2])
    assert faults_of(line, may_name=True) == []
