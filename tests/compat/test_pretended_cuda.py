"""With `--cuda-on-cpu`, what scripts of SMP v1's time use of `torch.cuda` works on the CPU."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks

cuda: Any = torch.cuda
PAGE = Path(__file__).parents[2] / "docs/how-to/migrate-from-smp-v1.md"


def events() -> bool:
    begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    begin.record()
    end.record(cuda.current_stream())
    end.synchronize()
    end.wait()
    return end.query() and 0 <= begin.elapsed_time(end) < 1000


def streams() -> bool:
    stream, event = cuda.Stream(priority=-1), cuda.Event()
    stream.wait_stream(cuda.current_stream())
    with cuda.stream(stream):
        x = torch.ones(2, device="cuda")
        x.record_stream(stream)
        stream.record_event(event)
    cuda.current_stream().wait_event(event)
    cuda.default_stream().synchronize()
    cuda.set_stream(stream)
    return stream.query() and stream.device == torch.device("cuda", 0)


def choose_device() -> bool:
    cuda.set_device(1)
    chosen = cuda.current_device() == 1 and torch.ones(1).device == torch.device("cuda:1")
    with cuda.device(3):
        inside = cuda.current_device() == 3
    cuda.set_device("cuda:0")
    return chosen and inside and cuda.current_device() == 0


def properties() -> bool:
    found = cuda.get_device_properties(0)
    return (found.major, found.minor) == cuda.get_device_capability() and found.total_memory > 2**28


def memory() -> bool:
    free, total = cuda.mem_get_info()
    return 0 < cuda.memory_allocated() <= total and 0 < cuda.max_memory_allocated() <= total and 0 < free <= total


def memory_by_its_old_names() -> bool:
    return all(each() > 0 for each in (cuda.memory_reserved, cuda.memory_cached)) and all(
        each(0) > 0 for each in (cuda.max_memory_reserved, cuda.max_memory_cached)
    )


def random_states() -> bool:
    before = torch.get_rng_state()
    cuda.manual_seed(3)
    cuda.manual_seed_all(3)
    cuda.seed()
    cuda.seed_all()
    state = cuda.get_rng_state()
    cuda.set_rng_state(state)
    cuda.set_rng_state_all(cuda.get_rng_state_all())
    return torch.equal(before, torch.get_rng_state()) and isinstance(cuda.initial_seed(), int)


def autocast() -> bool:
    x = torch.ones(2, 2, device="cuda")
    found = []
    for context in (cuda.amp.autocast(), torch.autocast("cuda"), torch.amp.autocast("cuda", dtype=torch.float16)):
        with context:
            found.append((x @ x).dtype is torch.float16 and torch.is_autocast_enabled())
    return all(found) and not torch.is_autocast_enabled()


def grad_scalers() -> bool:
    made = [cuda.amp.GradScaler(init_scale=8.0), torch.amp.GradScaler("cuda", init_scale=8.0)]
    return all(each.is_enabled() and each.get_scale() == 8.0 for each in made)


def typed_constructor(kind: str) -> bool:
    made = getattr(cuda, f"{kind}Tensor")(2, 3).zero_()
    name = f"torch.cuda.{kind}Tensor"
    return made.shape == (2, 3) and made.type() == name and isinstance(made, getattr(cuda, f"{kind}Tensor"))


def other_names() -> bool:
    """`torch.cuda.random.get_rng_state` is `torch.cuda.get_rng_state`: `Trainer` saves by the longer name."""
    homes = (cuda.random, cuda.memory, cuda.streams, cuda.amp.autocast_mode, cuda.amp.grad_scaler)
    exported = {**vars(cuda.amp), **vars(cuda)}
    differ = [
        name
        for home in homes
        for name in getattr(home, "__all__", ("Event", "Stream"))
        if f"torch.cuda.{name}" in replaced_names() and getattr(home, name) is not exported[name]
    ]
    return not differ and cuda.random.get_rng_state().numel() > 0


def replaced_names() -> set[str]:
    from smpkit.torch.compat import pretended_cuda

    return {name.replace(".amp.", ".") for name in pretended_cuda.REPLACEMENTS}


def tensors() -> bool:
    x = torch.ones(2).cuda()
    half = x.type("torch.cuda.HalfTensor")
    other = torch.zeros(2, device=x.device)
    seen = x.is_cuda and x.device.type == "cuda" and x.get_device() == 0 and other.device == x.device
    return seen and half.dtype is torch.float16 and x.type(cuda.HalfTensor).dtype is torch.float16


def default_type() -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_default_tensor_type("torch.cuda.DoubleTensor")
        double = torch.ones(1).dtype is torch.float64
        torch.set_default_tensor_type(cuda.FloatTensor)
    return double and torch.ones(1).dtype is torch.float32


def load() -> bool:
    file = io.BytesIO()
    torch.save({"x": torch.ones(2)}, file)
    places: list[Any] = ["cuda:0", torch.device("cuda"), {"cuda:0": "cuda:1"}, None, lambda storage, _: storage.cuda(0)]
    for place in places:
        file.seek(0)
        if not torch.equal(torch.load(file, map_location=place)["x"], torch.ones(2)):
            return False
    return True


def process_group() -> bool:
    dist.init_process_group("nccl")
    backend = dist.get_backend()
    dist.destroy_process_group()
    return str(backend) == "gloo"


def asks(name: str, expected: Any) -> Callable[[], bool]:
    def check() -> bool:
        owner: Any = torch
        for part in name.split(".")[1:]:
            owner = getattr(owner, part)
        return bool(owner() == expected)

    return check


CHECKS: dict[str, Callable[[], bool]] = {
    "torch.cuda.is_available": asks("torch.cuda.is_available", True),
    "torch.cuda.device_count": asks("torch.cuda.device_count", 1),
    "torch.cuda.is_initialized": asks("torch.cuda.is_initialized", True),
    "torch.cuda.is_bf16_supported": asks("torch.cuda.is_bf16_supported", True),
    "torch.cuda.can_device_access_peer": lambda: not cuda.can_device_access_peer(0, 1),
    **dict.fromkeys(["torch.cuda.current_device", "torch.cuda.set_device", "torch.cuda.device"], choose_device),
    "torch.cuda.device_of": lambda: cuda.device_of(torch.ones(1)).__enter__() is None,
    "torch.cuda.get_device_name": lambda: "CPU" in cuda.get_device_name(0),
    **dict.fromkeys(["torch.cuda.get_device_properties", "torch.cuda.get_device_capability"], properties),
    **{
        f"torch.cuda.{name}": asks(f"torch.cuda.{name}", None)
        for name in (
            *("init", "synchronize", "ipc_collect", "empty_cache", "reset_peak_memory_stats"),
            *("reset_max_memory_allocated", "reset_max_memory_cached", "reset_accumulated_memory_stats"),
            *("set_per_process_memory_fraction", "nvtx.range_pop", "profiler.start", "profiler.stop"),
        )
    },
    "torch.cuda.nvtx.range_push": lambda: cuda.nvtx.range_push("forward") is None,
    "torch.cuda.nvtx.mark": lambda: cuda.nvtx.mark("here") is None,
    **{f"torch.cuda.{name}": memory for name in ("memory_allocated", "max_memory_allocated", "mem_get_info")},
    **{
        f"torch.cuda.{name}": memory_by_its_old_names
        for name in ("memory_reserved", "memory_cached", "max_memory_reserved", "max_memory_cached")
    },
    "torch.cuda.memory_stats": lambda: cuda.memory_stats()["allocated_bytes.all.peak"] > 0,
    "torch.cuda.memory_summary": lambda: "bytes" in cuda.memory_summary(),
    "torch.cuda.Event": events,
    **{
        f"torch.cuda.{name}": streams for name in ("Stream", "stream", "set_stream", "current_stream", "default_stream")
    },
    **{
        f"torch.cuda.{name}": random_states
        for name in (
            *("manual_seed", "manual_seed_all", "seed", "seed_all", "initial_seed"),
            *("get_rng_state", "set_rng_state", "get_rng_state_all", "set_rng_state_all"),
        )
    },
    **dict.fromkeys(["torch.cuda.amp.autocast", "torch.autocast.__init__", "torch.is_autocast_enabled"], autocast),
    **dict.fromkeys(["torch.cuda.amp.GradScaler", "torch.amp.GradScaler.__init__"], grad_scalers),
    **{
        f"torch.cuda.{kind}Tensor": lambda kind=kind: typed_constructor(kind)  # type: ignore[misc]
        for kind in ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
    },
    "torch.set_default_tensor_type": default_type,
    **dict.fromkeys(["torch.load", "torch.UntypedStorage.cuda", "torch.TypedStorage.cuda"], load),
    "torch.distributed.init_process_group": process_group,
    **dict.fromkeys(["torch.cuda.default_stream", "torch.Tensor.record_stream"], streams),
    "tensors": tensors,
    "other names": other_names,
}


def run_checks() -> tuple[dict[str, str], list[str]]:
    """Return what went wrong, by name, and the names of all replacements."""
    from smpkit.torch.compat import cuda_on_cpu, pretended_cuda

    cuda_on_cpu.install({"SMPKIT_CUDA_ON_CPU": "1"})
    wrong = {}
    for name, check in CHECKS.items():
        try:
            if not check():
                wrong[name] = "not as expected"
        except Exception as error:  # noqa: PERF203
            wrong[name] = f"{type(error).__name__}: {error}"
    return wrong, list(pretended_cuda.REPLACEMENTS)


def test_what_scripts_use_of_cuda_works_on_the_cpu() -> None:
    ((wrong, replaced),) = run_ranks(run_checks, 1)
    assert wrong == {}
    assert set(replaced) <= CHECKS.keys()


def test_the_page_names_all_of_it() -> None:
    from smpkit.torch.compat import pretended_cuda

    named = set(re.findall(r"`([\w.]+)`", PAGE.read_text(encoding="utf-8")))
    for name in pretended_cuda.REPLACEMENTS:
        short = name.removesuffix(".__init__").removeprefix("torch.cuda.")
        assert {name.removesuffix(".__init__"), short} & named, f"{PAGE.name} does not name `{name}`"


def test_torch_itself_sees_the_cpu() -> None:
    (seen,) = run_ranks(what_torch_sees, 1)
    assert seen == [False, "cpu"]


def what_torch_sees() -> list[Any]:
    from smpkit.torch.compat import cuda_on_cpu

    cuda_on_cpu.install({"SMPKIT_CUDA_ON_CPU": "1"})
    inside = {"__name__": "torch.somewhere", "torch": torch}
    exec("seen = [torch.cuda.is_available(), torch.ones(1).device.type]", inside)
    return list(inside["seen"])  # type: ignore[call-overload]


SCRIPT = """
import torch
assert torch.cuda.is_available()  # before anything of SMP
import smdistributed.modelparallel.torch as smp

smp.init()
torch.cuda.set_device(smp.local_rank())
device = torch.device("cuda", smp.local_rank())
layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
model = smp.DistributedModel(layers.to(device))
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))


@smp.step
def train_step(model, x):
    loss = model(x).pow(2).mean()
    model.backward(loss)
    return loss


x = torch.cuda.FloatTensor(8, 4).fill_(0.5)
for parameter in model.parameters():
    if parameter.type() != "torch.cuda.FloatTensor":
        raise TypeError("parameters must be torch.cuda.FloatTensor, not " + parameter.type())
begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
begin.record()
losses = []
for _ in range(3):
    optimizer.zero_grad()
    losses.append(train_step(model, x).reduce_mean().item())
    optimizer.step()
end.record()
torch.cuda.synchronize()
assert losses[2] < losses[0] and begin.elapsed_time(end) > 0
if smp.rank() == 0:
    print("trained on", x.device, torch.cuda.max_memory_allocated() > 0)
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
    said = done.stdout + done.stderr
    if flag:
        assert done.returncode == 0, said
        assert "trained on cuda:0 True" in said
    else:
        assert done.returncode != 0
        assert "smpkit compat --cuda-on-cpu" in said
