"""A job with a label that is no class on one rank: what each rank says, and that all of them end.

On a GPU nobody sees the label before a kernel has stumbled on it. Its assertion fails on the device, which is of no use
to this process from then on: the error comes out of whatever call the host makes next, here or in a thread of gloo.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

ROOT = Path(__file__).parents[1]
KINDS = ("data", "pipeline", "tensor")
"""Kinds of parallelism. In `tensor` both ranks have the labels of both, so that both fail."""

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


def train(kind: str, folder: Path, seconds: float, **variables: str) -> list[subprocess.CompletedProcess[str]]:
    """Train on two ranks, the label being wrong in the second step, and return how each ended.

    Args:
        kind: one of `KINDS`.
        folder: for the script.
        seconds: after which TimeoutExpired is raised; ranks that still run are killed.
        variables: of the ranks' environment.
    """
    path = folder / "wrong_labels.py"
    path.write_text(_SCRIPT, encoding="utf-8")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    place |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "KIND": kind}
    place |= {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", **variables}
    outputs = [(folder / f"{rank}.out", folder / f"{rank}.err") for rank in range(2)]
    ranks = []
    for rank, (out, err) in enumerate(outputs):
        with out.open("w") as told, err.open("w") as failed:
            own = {**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen([sys.executable, str(path)], env=own, stdout=told, stderr=failed))
    try:
        codes = [process.wait(seconds) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    return [
        subprocess.CompletedProcess(process.args, code, out.read_text(), err.read_text())
        for process, code, (out, err) in zip(ranks, codes, outputs, strict=True)
    ]


def assertions_in(stderr: str) -> list[str]:
    """Return the assertions that failed on the device, each once: many threads of a kernel say the same."""
    return list(dict.fromkeys(re.findall(r"thread: \[[\d,]+\] Assertion `(.+?)` failed", stderr)))


def error_in(stderr: str) -> str:
    """Return what a script has ended with: the last traceback's error, and what follows it."""
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in stderr.splitlines()]
    starts = [number for number, line in enumerate(lines) if re.match(r"[\w.]*[A-Z]\w*Error: ", line)]
    return "\n".join(lines[starts[-1] :]) if starts else ""
