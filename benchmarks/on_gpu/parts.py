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


def _tests(name: str, title: str, seconds: float, files: Sequence[str], *more: str, alone: bool = False) -> Part:
    # Of plugins only these (PYTEST_DISABLE_PLUGIN_AUTOLOAD): those of a strange machine may warn, which is an error.
    plugins = [word for plugin in ("no:cacheprovider", "pytest_timeout", _PLUGIN) for word in ("-p", plugin)]
    chosen = ["-m", "pytest", "-q", *plugins, "-W", "default", "-m", "not slow and not docker", "--device", "cuda"]
    threads = {} if alone else {"OMP_NUM_THREADS": "1"}
    return Part(
        name, title, seconds, [*chosen, *files, *more], [*chosen, *files, "--collect-only"], alone, environment=threads
    )


_PLUGIN: Final = "benchmarks.on_gpu.journal"
_DEVICE_TESTS: Final = {
    "partition": ("cut as on the CPU; a label that is no class", 150, "tracing wrong_labels"),
    "engine": ("bits, streams, captured graphs, pinned memory", 150, "activation_offload pinned_memory"),
    "pipeline": ("two ranks on the GPU over gloo", 200, "pipeline"),
    "checkpoint": ("random numbers of layers that are recomputed", 200, "checkpoint_random"),
    "parallel": ("mixed precision", 170, "amp"),
    "model": ("OffloadModel; fused optimizers; torch.compile", 170, "offload_model optimizers"),
    "ambient": ("waits of the host; forks", 120, "host_syncs fork"),
    "overlap": ("overlap, peaks and throughput, measured", 150, "overlap peaks throughput"),
    "memcheck": ("compute-sanitizer", 200, "memcheck"),
}
"""Title, limit, and files of tests/device."""


def _device_tests() -> list[Part]:
    """Return parts of the tests that there are; a file that nobody has named above is a part of the last one."""
    found = {path.stem.removeprefix("test_") for path in (ROOT / "tests/device").glob("test_*.py")}
    found = {name for name in found if not name.startswith("sim_")}  # they are about the simulated device
    named = {file for *_, files in _DEVICE_TESTS.values() for file in files.split()}
    others = {"others": ("what is new", 120, " ".join(sorted(found - named)))}
    return [
        _tests(
            name, title, seconds, [f"tests/device/test_{file}.py" for file in files.split()], alone=name == "overlap"
        )
        for name, (title, seconds, files) in (_DEVICE_TESTS | others).items()
        if files
    ]


_TRANSPARENCY: Final = (
    *("pipeline_schedules", "pipeline_failures", "tensor_parallel", "data_parallel", "checkpointing"),
    "sharded_state",
)
_WORKERS: Final = ("-p", "xdist.plugin", "-n", "4", "--dist", "worksteal")


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


_TRAINING, _SIZES = "activation_offload training", "offload_model --only sizes"
_BENCHMARKS: Final = (
    _benchmark("activation-offload", "steps of 8192 tokens, all contestants", 170, _TRAINING, "--tokens", "8192"),
    _benchmark("offload-model", "FairScale's benchmark", 100, "offload_model --only words", "--rounds", "1"),
    _benchmark("pipeline-gpt", "a GPT over two ranks", 90, "pipeline --only gpt"),
    _benchmark("tensor-parallel", "blocks on two ranks", 90, "tensor_parallel"),
    _benchmark("offload-adamw", "AdamW on the host", 100, "offload_model --only optimizer"),
    _benchmark(
        "offload-model-sizes",
        "1.3 B parameters in slices",
        180,
        _SIZES,
        *("--models", "1.3 B", "--tokens", "8192", "32768"),
    ),
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
        "tune --model gpt --ranks 4",
        *("--steps", "3"),
        gpu="",  # on cores, of which such a machine has enough for its ranks
    ),
)

PARTS: Final[tuple[Part, ...]] = (
    *_device_tests(),
    _tests(
        "transparency",
        "each kind of parallelism on the GPU beside plain PyTorch on the CPU",
        170,
        [f"tests/transparency/test_{name}.py" for name in _TRANSPARENCY],
        *_WORKERS,
    ),
    *_BENCHMARKS,
)


def over_nccl(library: str) -> Part:
    """Return the tests of pipelines and replicas over NCCL 2.30 or later, which lets several ranks share a GPU if told.

    Args:
        library: a libnccl.so.2, loaded in place of torch's.
    """
    part = _tests("nccl", "two ranks on the GPU over NCCL", 200, ["tests/device/test_pipeline.py"], alone=True)
    nccl = {"LD_PRELOAD": library, "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
    return replace(part, environment={**nccl, NCCL: "1"})
