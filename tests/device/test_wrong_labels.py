"""A label that is no class is an assertion on the GPU: the rank that has it says so, and no other waits for it.

Nobody sees the label before a kernel has stumbled on it. The error then comes out of whatever call the host makes next,
here or in a thread of gloo, and the GPU is of no use any more to this process: each rank is one of its own.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests.device.test_ranks import run

pytestmark = pytest.mark.real_gpu("assertions of kernels, after which the driver refuses the process")

_SCRIPT = """
import os
import torch
from torch import nn
from torch.nn import functional
import smpkit.torch as smp

CLASSES = 8
kind = os.environ["KIND"]
degree = {"data": {}, "pipeline": {"pipeline_parallel_degree": 2, "skip_tracing": True, "microbatches": 2}}
smp.init({"ddp": True, "timeout_seconds": 600, **degree.get(kind, {"tensor_parallel_degree": 2})})


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, CLASSES)

    def forward(self, x, labels):
        if kind == "tensor":
            ours = CLASSES // smp.tp_size()
            return smp.nn.cross_entropy(self.linear(x)[:, :ours].repeat(smp.tp_size(), 1), labels)
        return functional.cross_entropy(self.linear(x), labels)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), Head()

    def forward(self, x, labels):
        return self.head(self.body(x), labels)


@smp.step
def train_step(model, x, labels):
    loss = model(x, labels)
    model.backward(loss)
    return loss


model = smp.DistributedModel(Net())
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for wrong in (False, True):
    labels = torch.tensor([0, 1, -100, CLASSES - 1])
    if wrong and (kind == "pipeline" or smp.rank() == 1):
        labels[3] = CLASSES
    optimizer.zero_grad()
    loss = train_step(model, torch.ones(4, 8), labels).reduce_mean()
    optimizer.step()
    print("step", float(loss) > 0, flush=True)
print("the end", flush=True)
"""


def train(kind: str, folder: Path) -> list[subprocess.CompletedProcess[str]]:
    """Train on two ranks, the label being wrong in the second step, and return how each ended.

    Args:
        kind: of parallelism: data, pipeline or tensor; in the last both ranks have the labels of both, and both fail.
    """
    return run(_SCRIPT, folder, 2, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", KIND=kind)


def assertions_in(stderr: str) -> list[str]:
    """Return the assertions that failed on the device, each once: many threads of a kernel say the same."""
    return list(dict.fromkeys(re.findall(r"thread: \[[\d,]+\] Assertion `(.+?)` failed", stderr)))


def error_in(stderr: str) -> str:
    """Return what a script has ended with: the last traceback's error, and what follows it."""
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in stderr.splitlines()]
    starts = [number for number, line in enumerate(lines) if re.match(r"[\w.]*[A-Z]\w*Error: ", line)]
    return "\n".join(lines[starts[-1] :]) if starts else ""


def assert_it_names_the_assertion(error: str) -> None:
    """Check cause and way out, as torch says them: with CUDA_LAUNCH_BLOCKING=1 the traceback is that of the loss."""
    assert "device-side assert triggered" in error
    assert "CUDA_LAUNCH_BLOCKING=1" in error


@pytest.mark.parametrize("kind", ["data", "pipeline"])
def test_the_rank_with_the_label_is_named_to_the_other(kind: str, tmp_path: Path) -> None:
    first, second = train(kind, tmp_path)
    assert [rank.stdout for rank in (first, second)] == ["step True\n"] * 2, first.stderr + second.stderr
    assert second.returncode != 0  # 1, unless CUDA aborts the process when it ends
    assert any("n_classes" in each for each in assertions_in(second.stderr)), second.stderr
    assert_it_names_the_assertion(error_in(second.stderr))
    assert first.returncode == 1
    assert assertions_in(first.stderr) == []
    error = error_in(first.stderr)
    assert error.startswith("smpkit.errors.RemoteError: rank 1 failed: "), first.stderr
    assert_it_names_the_assertion(error)
    assert error.endswith("hint: see the traceback of rank 1")
    assert float(torch.ones(2, device="cuda").sum()) == 2  # other processes may go on


def test_tensor_parallel_ranks_that_share_the_label_all_name_it(tmp_path: Path) -> None:
    ranks = train("tensor", tmp_path)
    for rank in ranks:
        assert rank.stdout == "step True\n", rank.stderr
        assert rank.returncode != 0
        # The first to wait for its GPU says so to the other, which may hear of it before it waits for its own.
        assert_it_names_the_assertion(error_in(rank.stderr))
    named = [each for rank in ranks for each in assertions_in(rank.stderr)]
    assert "a label is neither one of 8 classes nor ignore_index (-100)" in named
