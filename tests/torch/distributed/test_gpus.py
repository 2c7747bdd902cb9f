"""Who uses a GPU, and who must not start because it should have one: no test needs one."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import smpkit.torch as smp
from smpkit.errors import ConfigError, UnsupportedError
from smpkit.torch.compat import cuda_on_cpu
from smpkit.torch.core.context import Launch
from smpkit.torch.core.devices import backends
from smpkit.torch.distributed import gpus
from smpkit.torch.distributed.gpus import GpuInfo, backend_of, notices_of, problems_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tells of machines whose GPU torch does not see")


@pytest.fixture(autouse=True)
def no_gpu_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "DEVICE_FILES", str(tmp_path / "nvidia[0-9]*"))


@pytest.fixture
def gpu_file(tmp_path: Path) -> Path:
    """Put a GPU beside the process, as one finds it in a container that was given the second one."""
    (tmp_path / "nvidiactl").touch()
    (tmp_path / "nvidia1").touch()
    return tmp_path / "nvidia1"


def message_of(*gpu_infos: GpuInfo) -> str:
    return str(ConfigError(problems_of(gpu_infos), subject="GPUs of the job"))


def test_a_machine_without_a_gpu_is_no_problem() -> None:
    gpu_info = gpus.probe_gpu(Launch(), {})
    assert (gpu_info.gpu, gpu_info.expected, gpu_info.cpu_reason, gpu_info.unused) == (None, None, None, None)
    assert problems_of([gpu_info, gpu_info]) == []
    assert notices_of([gpu_info, gpu_info]) == []


def test_a_gpu_that_the_launcher_counted_must_be_seen() -> None:
    text = message_of(GpuInfo(gpu="GPU-a"), gpus.probe_gpu(Launch(), {"SM_NUM_GPUS": "8", "CUDA_VISIBLE_DEVICES": "9"}))
    assert "rank 1 sees no GPU but should have one (SM_NUM_GPUS is 8)" in text
    assert f"torch {torch.__version__} is built " in text
    assert "CUDA_VISIBLE_DEVICES is 9" in text
    assert "hint: " in text
    assert "if the CPU is meant, set CUDA_VISIBLE_DEVICES='' or SMPKIT_CUDA_ON_CPU=1" in text


@pytest.mark.parametrize("count", ["0", "", "many"])
def test_no_gpu_that_the_launcher_counted_is_none_to_miss(count: str) -> None:
    assert gpus.probe_gpu(Launch(), {"SM_NUM_GPUS": count}).expected is None


def test_a_gpu_that_another_rank_has_is_one_to_miss() -> None:
    blind = gpus.probe_gpu(Launch(), {})
    text = message_of(blind, GpuInfo(gpu="GPU-a"), blind)
    assert "ranks 0 and 2 see no GPU but should have one (rank 1 has one)" in text


def test_a_build_for_cuda_beside_a_gpu_must_see_it(gpu_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    text = message_of(gpus.probe_gpu(Launch(), {}))
    assert f"rank 0 sees no GPU but should have one ({gpu_file} exists)" in text
    assert f"torch {torch.__version__} is built for CUDA 13.0" in text
    assert "torch says `" in text
    assert "hint: update the driver, or install a build of torch for an older CUDA" in text


def test_a_build_for_cpus_beside_a_gpu_is_worth_a_warning(gpu_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    gpu_info = gpus.probe_gpu(Launch(), {})
    assert problems_of([gpu_info, gpu_info]) == []
    (text,) = notices_of([gpu_info, gpu_info, GpuInfo()])
    assert f"{gpu_file} exists" in text
    assert "ranks 0 and 1 train on the CPU" in text


@pytest.mark.parametrize("build", ["13.0", None])
@pytest.mark.parametrize(
    "said",
    [
        {"CUDA_VISIBLE_DEVICES": ""},
        {"CUDA_VISIBLE_DEVICES": "-1"},
        {"CUDA_VISIBLE_DEVICES": "-1,0"},
        {"CUDA_VISIBLE_DEVICES": "NoDevFiles"},
        {"SMPKIT_CUDA_ON_CPU": "1"},
    ],
    ids=str,
)
@pytest.mark.usefixtures("gpu_file")
def test_who_means_the_cpu_gets_it(said: dict[str, str], build: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", build)
    gpu_info = gpus.probe_gpu(Launch(), {"SM_NUM_GPUS": "8", **said})
    assert problems_of([gpu_info, GpuInfo(gpu="GPU-a")]) == []
    assert notices_of([gpu_info]) == []


# --- the backend ------------------------------------------------------------------------------------------------------


FIRST, SECOND, ON_CPU = GpuInfo("a", "cuda"), GpuInfo("b", "cuda"), GpuInfo(cpu_reason="CUDA_VISIBLE_DEVICES=''")
SHARING, SHARING_OLD, SHARING_NONE = (
    GpuInfo("a", "cuda", shared_nccl=version) for version in ([2, 30, 1], [2, 28, 9], [])
)
BOTH = "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize(
    ("gpu_infos", "asked", "backend", "notice"),
    [
        ([FIRST, SECOND], "auto", BOTH, ""),
        ([FIRST, SECOND], "gloo", "gloo", ""),
        ([GpuInfo(), GpuInfo()], "nccl", "gloo", ""),
        ([FIRST, FIRST], "auto", "gloo", "2 ranks share 1 GPU, which nccl cannot do"),
        ([FIRST, ON_CPU], "auto", "gloo", "rank 1 uses the CPU (CUDA_VISIBLE_DEVICES='') while others have a GPU"),
        ([SHARING, SHARING], "auto", BOTH, "NCCL_MULTI_RANK_GPU_ENABLE=1"),
        ([SHARING, SHARING], "gloo", "gloo", ""),
        ([SHARING, GpuInfo("b", "cuda", shared_nccl=[2, 28, 9])], "auto", BOTH, ""),  # nothing is shared
    ],
)
def test_the_backend_is_that_of_the_gpus_where_each_rank_has_one(
    gpu_infos: list[GpuInfo], asked: str, backend: str, notice: str
) -> None:
    chosen, notices = backend_of(gpu_infos, asked)
    assert chosen == backend
    assert len(notices) == bool(notice)
    assert notice in "".join(notices)


@pytest.mark.parametrize(
    ("gpu_infos", "kind", "message"),
    [
        ([SHARING, SHARING_OLD], UnsupportedError, r"needs NCCL 2\.30 or newer, but rank 1 has 2\.28\.9"),
        ([SHARING_NONE, SHARING_NONE], UnsupportedError, "but rank 0 has none"),
        ([SHARING, FIRST], ConfigError, "SMPKIT_SHARED_GPU_NCCL: is 1 on some ranks but not on rank 1"),
    ],
    ids=["old", "missing", "not asked for"],
)
def test_an_nccl_that_cannot_share_a_gpu_is_refused(
    gpu_infos: list[GpuInfo], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        backend_of(gpu_infos, "auto")


def test_the_wish_to_share_a_gpu_is_told_with_the_version_that_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "nccl_version", lambda: (2, 30, 4))
    assert gpus.probe_gpu(Launch(), {"SMPKIT_SHARED_GPU_NCCL": "1"}).shared_nccl == (2, 30, 4)
    assert gpus.probe_gpu(Launch(), {}).shared_nccl is None


# --- scripts that say `cuda` ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("has_gpu", "environ", "installs"),
    [
        (True, {}, False),
        (True, {"SMPKIT_CUDA_ON_CPU": "1"}, True),
        (True, {"SMPKIT_CUDA_ON_CPU": "0", "CUDA_VISIBLE_DEVICES": ""}, False),
        (True, {"CUDA_VISIBLE_DEVICES": ""}, True),
        (False, {}, True),
        (False, {"SM_NUM_GPUS": "1"}, False),
    ],
    ids=str,
)
def test_cuda_is_the_cpu_only_where_there_is_no_gpu_or_the_cpu_is_meant(
    has_gpu: bool, environ: dict[str, str], installs: bool, request: pytest.FixtureRequest
) -> None:
    if has_gpu:
        request.getfixturevalue("gpu_file")
    assert run_ranks(install, 1, environ, gpus.DEVICE_FILES) == [installs]


def install(environ: dict[str, str], device_files: str) -> bool:
    gpus.DEVICE_FILES = device_files
    cuda_on_cpu.install(environ)
    return cuda_on_cpu.installed()


# --- several ranks ----------------------------------------------------------------------------------------------------


def told_at_init(prepare: Callable[[int], None], device_files: str) -> tuple[str, list[str], bool]:
    """Return the error of `smp.init()`, its warnings, and whether it left something behind."""
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    gpus.DEVICE_FILES = device_files
    prepare(int(os.environ["RANK"]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            smp.init({"ddp": True})
            error = ""
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    started = smp.is_initialized()
    smp.shutdown()
    return error, [str(warning.message) for warning in caught], started


def counted_on_rank_1(rank: int) -> None:
    if rank == 1:
        os.environ["SM_NUM_GPUS"] = "8"


def seen_on_rank_0(rank: int) -> None:
    if rank == 0:
        gpus.probe_gpu = lambda launch, environ=os.environ: GpuInfo("GPU-a")


def unused(_: int) -> None:
    torch.version.cuda = None


@pytest.fixture(params=["launcher", "rank 0"])
def store_in(request: pytest.FixtureRequest, reserved_port: int) -> dict[str, str]:
    """Return variables that say who serves the store."""
    in_rank_0 = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(reserved_port)}
    return in_rank_0 if request.param == "rank 0" else {}


@pytest.mark.parametrize(
    ("prepare", "reason"), [(counted_on_rank_1, "SM_NUM_GPUS is 8"), (seen_on_rank_0, "rank 0 has one")]
)
def test_a_rank_that_misses_its_gpu_ends_all(
    prepare: Callable[[int], None], reason: str, store_in: dict[str, str]
) -> None:
    for error, caught, started in run_ranks(told_at_init, 2, prepare, gpus.DEVICE_FILES, env=store_in):
        assert error.startswith("ConfigError: 1 problem in the GPUs of the job\n")
        assert f"rank 1 sees no GPU but should have one ({reason})" in error
        assert (caught, started) == ([], False)


@pytest.mark.usefixtures("gpu_file")
def test_a_gpu_that_torch_does_not_know_is_told_once() -> None:
    first, second = run_ranks(told_at_init, 2, unused, gpus.DEVICE_FILES)
    assert [first[0], second[0]] == ["", ""]
    assert len(first[1]) == 1
    assert "ranks 0 and 1 train on the CPU" in first[1][0]
    assert second[1] == []
