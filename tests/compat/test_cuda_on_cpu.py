"""With `--cuda-on-cpu`, what public scripts use of `torch.cuda` works on the CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from smpkit.torch.compat import cuda_on_cpu
from tests.torch.steps import on_ranks

cuda: Any = torch.cuda
PAGE = Path(__file__).parents[2] / "docs/how-to/migrate-from-smp-v1.md"


def check_device() -> None:
    assert cuda.is_available()
    assert cuda.device_count() == 1
    assert cuda.is_bf16_supported()
    cuda.set_device("cuda:1")
    assert cuda.current_device() == 1
    assert torch.ones(1).device == torch.device("cuda:1")
    cuda.set_device(0)
    assert cuda.current_device() == 0


def check_what_has_no_effect() -> None:
    before = torch.get_rng_state()
    for name in ("empty_cache", "synchronize", "reset_max_memory_allocated", "reset_max_memory_cached"):
        assert getattr(cuda, name)() is None
    assert cuda.memory.reset_peak_memory_stats(device=0) is None
    cuda.manual_seed(3)
    cuda.random.manual_seed_all(3)
    cuda.set_rng_state(cuda.get_rng_state(), 0)
    cuda.random.set_rng_state_all(cuda.random.get_rng_state_all())
    with torch.random.fork_rng():
        torch.rand(1)
    assert torch.equal(before, torch.get_rng_state())


def check_memory() -> None:
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        assert 0 < getattr(cuda, name)(device=0) < 2**40
        assert getattr(cuda.memory, name) is getattr(cuda, name)


def check_autocast_and_scaler() -> None:
    x = torch.ones(2, 2, device="cuda")
    for context in (cuda.amp.autocast(), torch.autocast("cuda"), torch.amp.autocast("cuda", dtype=torch.float16)):
        with context:
            assert (x @ x).dtype is torch.float16
    parameter = torch.nn.Parameter(torch.ones(1, device="cuda"))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for scaler in (cuda.amp.GradScaler(init_scale=8.0), torch.amp.GradScaler("cuda", init_scale=8.0)):
        optimizer.zero_grad()
        scaler.scale(parameter.sum()).backward()
        assert parameter.grad is not None
        assert parameter.grad.item() == 8.0
        scaler.step(optimizer)
        scaler.update()
    assert parameter.item() == -1.0


def check_types() -> None:
    """D7 is the constructor with a device."""
    for kind in ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short"):
        made = getattr(cuda, f"{kind}Tensor")(2, 3).zero_()
        assert (made.shape, made.type()) == ((2, 3), f"torch.cuda.{kind}Tensor")
        assert isinstance(made, getattr(cuda, f"{kind}Tensor"))
    assert not isinstance(torch.ones(1), cuda.HalfTensor)
    assert cuda.IntTensor([7], device=torch.device("cuda", 0)).tolist() == [7]
    half = torch.ones(2).type("torch.cuda.HalfTensor")
    assert half.dtype is half.float().type(cuda.HalfTensor).dtype is torch.float16


def check_tensors() -> None:
    """Helpers of public scripts skip what is on the CPU; torch's code sees where a tensor is."""
    x = torch.ones(2).cuda()
    assert x.is_cuda
    assert x.device.type == "cuda"
    assert x.get_device() == 0
    assert torch.zeros(2, device=x.device).device == x.device
    inside: dict[str, Any] = {"__name__": "torch.somewhere", "x": x}
    exec("seen = (x.device.type, x.is_cuda)", inside)
    assert inside["seen"] == ("cpu", False)


@pytest.mark.parametrize(
    "check",
    [check_device, check_what_has_no_effect, check_memory, check_autocast_and_scaler, check_types, check_tensors],
)
@on_ranks(1)
def test_what_scripts_use_of_cuda_works_on_the_cpu(check: Callable[[], None]) -> None:
    cuda_on_cpu.install({"SMPKIT_CUDA_ON_CPU": "1"})
    check()


def test_the_page_names_all_of_it() -> None:
    named = set(re.findall(r"`([\w.]+)`", PAGE.read_text(encoding="utf-8")))
    assert set(cuda_on_cpu.PRETENDED) <= named


SCRIPT = """
import torch
assert torch.cuda.is_available()  # before anything of SMP
import smdistributed.modelparallel.torch as smp

smp.init()
torch.cuda.set_device(smp.local_rank())
layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
model = smp.DistributedModel(layers.to(torch.device("cuda", smp.local_rank())))
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))


@smp.step
def train_step(model, x):
    loss = model(x).pow(2).mean()
    model.backward(loss)
    return loss


x = torch.cuda.FloatTensor(8, 4).fill_(0.5)
if {parameter.type() for parameter in model.parameters()} != {"torch.cuda.FloatTensor"}:
    raise TypeError("parameters must be torch.cuda.FloatTensor")
losses = []
for _ in range(3):
    optimizer.zero_grad()
    losses.append(train_step(model, x).reduce_mean().item())
    optimizer.step()
assert losses[2] < losses[0]
if smp.rank() == 0:
    print("trained on", x.device)
"""


@pytest.mark.parametrize("flag", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_script_that_insists_on_cuda_runs_with_the_flag_only(flag: bool, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "smpkit", "compat", *(["--cuda-on-cpu"] if flag else [])]
    command += ["--parameters", '{"partitions": 2, "microbatches": 2}', "--", sys.executable]
    # Without the flag the script ends at its first assertion, on any number of ranks.
    command += ["-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"] if flag else ["train.py"]
    environ = {name: value for name, value in os.environ.items() if name != "SMPKIT_CUDA_ON_CPU"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=False)
    output = done.stdout + done.stderr
    assert (done.returncode == 0) is flag, output
    assert ("trained on cuda:0" if flag else "smpkit compat --cuda-on-cpu") in output
