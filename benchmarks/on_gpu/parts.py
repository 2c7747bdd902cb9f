"""What `scripts/gpu` runs, in order of worth: tests first, then the transparency tests, then every benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
JOURNAL: Final = "GPU_TESTS_JOURNAL"
"""The variable that names the file in which a part's tests are written down."""
NCCL: Final = "RANKS_SHARE_A_GPU_OVER_NCCL"
"""Tells tests/device to let its ranks do so; smpkit's own variables do not reach a test."""


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
    is_alone: bool = True
    """Nothing runs beside it: it measures time, or takes most of the machine's memory."""
    environment: Mapping[str, str] = field(default_factory=dict)


def _tests(name: str, title: str, seconds: float, arguments: Sequence[str], *, alone: bool = False) -> Part:
    # Of plugins only these (PYTEST_DISABLE_PLUGIN_AUTOLOAD): those of a strange machine may warn, which is an error.
    plugins = [word for plugin in _PLUGINS for word in ("-p", plugin)]
    chosen = ["-m", "pytest", "-q", *plugins, "-W", "default", "-m", "not slow and not docker", "--device", "cuda"]
    threads = {} if alone else {"OMP_NUM_THREADS": "1"}
    command = [*chosen, *arguments]
    return Part(name, title, seconds, command, [*command, "--collect-only"], alone, environment=threads)


_PLUGINS: Final = ("no:cacheprovider", "pytest_timeout", "xdist.plugin", "benchmarks.on_gpu.journal")
_DEVICE_TESTS: Final = (
    ("partition", "cut as on the CPU; a label that is no class", 150, "tracing wrong_labels"),
    ("engine", "bits, streams, captured graphs, pinned memory", 150, "activation_offload pinned_memory"),
    ("pipeline", "two ranks on the GPU over gloo", 200, "pipeline"),
    ("checkpoint", "random numbers of layers that are recomputed", 200, "checkpoint_random"),
    ("parallel", "mixed precision", 170, "amp"),
    ("model", "OffloadModel; fused optimizers; torch.compile", 170, "offload_model optimizers"),
    ("ambient", "waits of the host; forks", 120, "host_syncs fork"),
    ("overlap", "overlap, peaks and throughput, measured", 150, "overlap peaks throughput"),
    ("memcheck", "compute-sanitizer", 200, "memcheck"),
)
"""Name, title, limit, and files of tests/device."""
_NAMED: Final = [file for *_, files in _DEVICE_TESTS for file in files.split()]
_TRANSPARENCY: Final = (
    *("pipeline_schedules", "pipeline_failures", "tensor_parallel", "data_parallel", "checkpointing"),
    "sharded_state",
)


def _file(name: str) -> str:
    return f"tests/device/test_{name}.py"


def _benchmark(name: str, title: str, seconds: float, command: str, *more: str, gpu: str | None = None) -> Part:
    """Return a part that runs a benchmark.

    Args:
        command: the benchmark's folder, and arguments.
        more: arguments with a GPU.
        gpu: the one that it sees; by default all.
    """
    folder, *arguments = command.split()
    start = ("-m", f"benchmarks.{folder}.main", *arguments)
    environment = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
    return Part(name, title, seconds, (*start, "--dry", *more), (*start, "--quick"), environment=environment)


_TRAINING: Final = "activation_offload training"
PARTS: Final[tuple[Part, ...]] = (
    *(
        _tests(name, title, seconds, [*map(_file, files.split())], alone=name == "overlap")
        for name, title, seconds, files in _DEVICE_TESTS
    ),
    # Those of `sim_` are about the simulated device.
    _tests(
        "others",
        "what is new",
        120,
        ["tests/device", "--ignore-glob=*/test_sim_*", *(f"--ignore={_file(name)}" for name in _NAMED)],
    ),
    _tests(
        "transparency",
        "each kind of parallelism on the GPU beside plain PyTorch on the CPU",
        170,
        ["-n", "4", "--dist", "worksteal", *(f"tests/transparency/test_{name}.py" for name in _TRANSPARENCY)],
    ),
    _benchmark("activation-offload", "steps of 8192 tokens, all contestants", 170, _TRAINING, "--tokens", "8192"),
    _benchmark("offload-model", "FairScale's benchmark", 100, "offload_model words", "--repetitions", "1"),
    _benchmark("pipeline-gpt", "a GPT over two ranks", 90, "pipeline gpt"),
    _benchmark("tensor-parallel", "blocks on two ranks", 90, "tensor_parallel"),
    _benchmark("offload-adamw", "AdamW on the host", 100, "offload_model optimizer"),
    _benchmark("offload-model-sizes", "1.3 B parameters in slices", 180, "offload_model sizes"),
    _benchmark(
        "activation-offload-long",
        "steps of 16384 and 32768 tokens, checkpointed",
        400,
        _TRAINING,
        *("--tokens", "16384", "32768"),
    ),
    _benchmark(
        "tune",
        "predicted beside measured steps over 4 ranks that sleep",
        500,
        "tune gpt-4",
        *("--repetitions", "3"),
        gpu="",  # on cores, of which such a machine has enough for its ranks
    ),
)


def over_nccl(library: str) -> Part:
    """Return the tests of pipelines and replicas over NCCL 2.30 or later, which lets several ranks share a GPU if told.

    Args:
        library: a libnccl.so.2, loaded in place of torch's.
    """
    part = _tests("nccl", "two ranks on the GPU over NCCL", 200, [_file("pipeline")], alone=True)
    nccl = {"LD_PRELOAD": library, "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
    return replace(part, environment={**nccl, NCCL: "1"})
