"""What `scripts/gpu` runs, in order of worth: tests first, then the transparency tests, then every benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

__all__ = ["JOURNAL", "NCCL", "PARTS", "ROOT", "Part", "over_nccl"]

ROOT: Final = Path(__file__).parents[2]
JOURNAL: Final = "GPU_TESTS_JOURNAL"
"""The variable that names the file in which a part's tests are written down."""
NCCL: Final = "RANKS_SHARE_A_GPU_OVER_NCCL"
"""Tells tests/device to let its ranks do so; smpkit's own variables do not reach a test."""

_PYTEST: Final = (
    *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "pytest_timeout", "-p", "benchmarks.on_gpu.journal"),
    *("-W", "default", "-m", "not slow and not docker", "--device", "cuda"),
)
"""Of plugins only these (PYTEST_DISABLE_PLUGIN_AUTOLOAD): those of a strange machine may warn, which is an error."""
_WORKERS: Final = ("-p", "xdist.plugin", "-n", "4", "--dist", "worksteal")


@dataclass(frozen=True, eq=False)
class Part:
    """What runs in a process of its own, within a limit of its own."""

    name: str
    title: str
    seconds: float
    """The most it may take; then its processes are killed, and what it has said until then counts."""
    command: Sequence[str]
    """What Python is given."""
    dry: Sequence[str]
    """The same for a machine without a GPU: tests are only collected, benchmarks run at sizes of seconds."""
    has_tests: bool
    is_alone: bool
    """Nothing runs beside it: it measures time, or takes most of the machine's memory."""
    by_default: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)


def _tests(name: str, title: str, seconds: float, paths: Sequence[str], *more: str, alone: bool = False) -> Part:
    start = (*_PYTEST, *paths)
    threads = {} if alone else {"OMP_NUM_THREADS": "1"}
    return Part(name, title, seconds, (*start, *more), (*start, "--collect-only"), True, alone, environment=threads)


def _benchmark(
    name: str, title: str, seconds: float, module: str, arguments: Sequence[str], dry: Sequence[str]
) -> Part:
    start = ("-m", f"benchmarks.{module}.main")
    return Part(name, title, seconds, (*start, *arguments), (*start, *dry), False, True)


_FILES: Final[Mapping[str, tuple[str, float, bool, tuple[str, ...]]]] = {
    "partition": (
        "cut as on the CPU; a rank that is killed, or has a wrong label",
        150,
        False,
        ("partition", "tracing", "killed_rank", "wrong_labels"),
    ),
    "engine": (
        "offload engine: bits, streams, captured graphs, pinned memory",
        150,
        False,
        ("activation_offload", "pinned_memory"),
    ),
    "pipeline": ("two ranks on the GPU over gloo", 200, False, ("pipeline",)),
    "checkpoint": ("random numbers of layers that are recomputed", 200, False, ("checkpoint_random",)),
    "parallel": (
        "tensor and data parallelism, mixed precision",
        170,
        False,
        ("tensor_parallel", "data_parallel", "amp"),
    ),
    "model": ("OffloadModel; fused optimizers; torch.compile", 170, False, ("offload_model", "optimizers")),
    "ambient": ("what a script may do around us; forks", 120, False, ("ambient", "host_syncs", "fork")),
    "overlap": ("overlap, peaks and throughput, measured", 150, True, ("overlap", "peaks", "throughput")),
    "soak": ("two hundred steps with sleeping streams; compute-sanitizer", 200, False, ("soak",)),
}
"""Title, limit, whether it runs alone, and files of tests/device."""

_CHOSEN: Final = (
    "pipeline_schedules",
    "tensor_parallel",
    "data_parallel",
    "checkpointing",
    "sharded_state",
)
"""Of tests/transparency: each kind of parallelism."""


def _gpu_parts() -> list[Part]:
    """Return parts of the tests that there are; a file that nobody has named above is a part of the last one."""
    found = {path.stem.removeprefix("test_") for path in (ROOT / "tests/device").glob("test_*.py")}
    found = {name for name in found if not name.startswith("sim_")}  # they are about the simulated device
    named = {file for *_, files in _FILES.values() for file in files}
    groups = {**_FILES, "others": ("what is new", 120, False, tuple(sorted(found - named)))}
    parts = []
    for name, (title, seconds, alone, files) in groups.items():
        paths = [f"tests/device/test_{file}.py" for file in files if file in found]
        if paths:
            parts.append(_tests(name, title, seconds, paths, alone=alone))
    return parts


_TRANSPARENCY: Final = _tests(
    "transparency",
    "each kind of parallelism on the GPU beside plain PyTorch on the CPU",
    170,
    [f"tests/transparency/test_{name}.py" for name in _CHOSEN],
    *_WORKERS,
)

_BENCHMARKS: Final = (
    _benchmark(
        "activation-offload",
        "training steps of 8192 tokens, all contestants",
        170,
        "activation_offload",
        ("training", "--dry", "--tokens", "8192"),
        ("training", "--dry", "--tokens", "32"),
    ),
    _benchmark(
        "offload-model",
        "FairScale's benchmark",
        100,
        "offload_model",
        ("--only", "words", "--dry", "--rounds", "1"),
        ("--only", "words", "--quick", "--steps", "1"),
    ),
    _benchmark(
        "pipeline-gpt", "a GPT over two ranks", 90, "pipeline", ("--only", "gpt", "--dry"), ("--only", "gpt", "--quick")
    ),
    _benchmark("tensor-parallel", "blocks on two ranks", 90, "tensor_parallel", ("--dry",), ("--quick",)),
    _benchmark(
        "offload-adamw",
        "AdamW on the host",
        100,
        "offload_model",
        ("--only", "optimizer", "--dry", "--build-seconds", "1"),
        ("--only", "optimizer", "--quick", "--build-seconds", "1"),
    ),
    _benchmark(
        "offload-model-sizes",
        "1.3 B parameters in slices",
        180,
        "offload_model",
        ("--only", "sizes", "--dry", "--models", "1.3 B", "--tokens", "8192", "32768"),
        ("--only", "sizes", "--quick"),
    ),
    _benchmark(
        "activation-offload-long",
        "training steps of 16384 and 32768 tokens, checkpointed",
        400,
        "activation_offload",
        ("training", "--dry", "--tokens", "16384", "32768"),
        ("training", "--dry", "--tokens", "32"),
    ),
    replace(
        _benchmark(
            "tune",
            "predicted beside measured steps over 4 ranks that sleep",
            500,
            "tune",
            ("--model", "gpt", "--ranks", "4", "--steps", "3", "--json"),
            ("--model", "gpt", "--ranks", "4", "--only", "1", "--steps", "1", "--seconds", "2"),
        ),
        environment={"CUDA_VISIBLE_DEVICES": ""},  # on cores, of which such a machine has enough for its ranks
    ),
)


def _everything() -> tuple[Part, ...]:
    """Return a part per file of tests/transparency and tests/torch (test 15), for several goes with `--resume`."""
    files = [
        path for folder in ("transparency", "torch") for path in sorted((ROOT / "tests" / folder).rglob("test_*.py"))
    ]
    names = [str(path.relative_to(ROOT)) for path in files]
    made = [_tests(f"all:{name}", "with a GPU in sight", 400, [name], *_WORKERS) for name in names]
    return tuple(replace(part, by_default=False) for part in made)


def over_nccl(library: str) -> Part:
    """Return the tests of pipelines and replicas over NCCL 2.30 or later, which lets several ranks share a GPU if told.

    Args:
        library: a libnccl.so.2, loaded in place of torch's.
    """
    variables = {
        "LD_PRELOAD": library,
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MAX_CTAS": "2",
        NCCL: "1",
    }
    part = _tests(
        "nccl",
        "two ranks on the GPU over NCCL",
        200,
        ["tests/device/test_pipeline.py", "tests/device/test_killed_rank.py", "tests/device/test_data_parallel.py"],
        alone=True,
    )
    return replace(part, environment=variables)


PARTS: Final[tuple[Part, ...]] = (*_gpu_parts(), _TRANSPARENCY, *_BENCHMARKS, *_everything())
