"""Find each rank's GPU, and end a job in which a rank sees none that should have one: it must not train on the CPU."""

from __future__ import annotations

import glob
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from smpkit.errors import ConfigError, Problem, UnsupportedError
from smpkit.torch.core import devices
from smpkit.torch.core.context import Launch
from smpkit.torch.core.devices import backends
from smpkit.torch.core.devices.backends import GLOO, NCCL, SHARED_GPU_NCCL
from smpkit.torch.distributed.rendezvous import name_ranks

CUDA_ON_CPU: Final = "SMPKIT_CUDA_ON_CPU"
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_NO_DEVICE: Final = ("", "-1", "NoDevFiles")
"""First entries that mean no GPU: CUDA stops reading at an entry that names none."""
_NCCL_THAT_SHARES: Final = (2, 30)
"""The first version of nccl that lets ranks share a GPU."""

DEVICE_FILES = "/dev/nvidia[0-9]*"
"""The driver's device files, one for each GPU."""


@dataclass(frozen=True)
class GpuInfo:
    """What one rank knows about GPUs; the ranks exchange it as JSON.

    Args:
        gpu: identity of the GPU, or other accelerator, that it uses; None if torch sees none.
        kind: torch's name for this type of device.
        expected: why it should have one, as far as the rank itself knows.
        cpu_reason: the variable by which it uses the CPU on purpose.
        unused: a GPU's device file beside a build of torch that knows no GPUs.
        facts: about torch, for errors.
        hint: what to do where a GPU is missing.
        shared_nccl: the version of nccl, where `SMPKIT_SHARED_GPU_NCCL=1` is set.
    """

    gpu: str | None = None
    kind: str = "cpu"
    expected: str | None = None
    cpu_reason: str | None = None
    unused: str | None = None
    facts: str = ""
    hint: str = ""
    shared_nccl: Sequence[int] | None = None


def probe_gpu(launch: Launch, environ: Mapping[str, str] = os.environ) -> GpuInfo:
    """Return what this rank knows, without making a CUDA context."""
    shared = backends.nccl_version() if environ.get(SHARED_GPU_NCCL) == "1" else None
    if (device := devices.choose_device(launch.local_rank)) is not None:
        return GpuInfo(_identity(device, launch), device.type, shared_nccl=shared)
    cpu_reason = _why_cpu(environ)
    return GpuInfo(
        expected=None if cpu_reason else _why_expected(environ),
        cpu_reason=cpu_reason,
        unused=None if cpu_reason or _is_for_gpus() else _device_file(),
        facts="" if cpu_reason else _facts(environ),
        hint=_hint(),
        shared_nccl=shared,
    )


def _identity(device: torch.device, launch: Launch) -> str:
    # Not the index where there is something better: ranks that see one device each all call theirs 0. Where a module
    # does not tell devices apart, the launcher is believed to have given each rank its own.
    return devices.physical_device(device) or f"{socket.gethostname()}/{device.type}/{launch.local_rank}"


def _why_expected(environ: Mapping[str, str]) -> str | None:
    """Return why this process should have a GPU, by its machine and launcher; None if there is no reason."""
    count = environ.get("SM_NUM_GPUS", "").strip()
    if count.isdecimal() and int(count):
        return f"SM_NUM_GPUS is {count}"
    path = _device_file() if _is_for_gpus() else None
    return None if path is None else f"{path} exists"


def wants_gpu(environ: Mapping[str, str]) -> bool:
    """Return whether this process should use a GPU, of its machine or by its launcher, and not the CPU on purpose."""
    return not _why_cpu(environ) and (_device_file() is not None or _why_expected(environ) is not None)


def _device_file() -> str | None:
    return next(iter(sorted(glob.glob(DEVICE_FILES))), None)  # noqa: PTH207 - a path with a pattern in its name


def problems_of(gpu_infos: Sequence[GpuInfo]) -> list[Problem]:
    """Return the problems of a job's GPUs, from what each rank knows: ranks that should have one and see none."""
    having = [rank for rank, gpu_info in enumerate(gpu_infos) if gpu_info.gpu is not None]
    blind: dict[tuple[str, str], list[int]] = {}
    for rank, gpu_info in enumerate(gpu_infos):
        if gpu_info.gpu is not None or gpu_info.cpu_reason is not None:
            continue
        reason = gpu_info.expected or (f"rank {having[0]} has one" if having else None)
        if reason is not None:
            text = f"no GPU but should have one ({reason}): {gpu_info.facts}"
            blind.setdefault((text, gpu_info.hint), []).append(rank)
    return [
        Problem((), f"{name_ranks(ranks)} see{'s' * (len(ranks) == 1)} {text}", hint)
        for (text, hint), ranks in blind.items()
    ]


def notices_of(gpu_infos: Sequence[GpuInfo]) -> list[str]:
    """Return warnings about GPUs that this build of torch cannot use."""
    ranks = [rank for rank, gpu_info in enumerate(gpu_infos) if gpu_info.unused is not None]
    if not ranks:
        return []
    fact = f"{gpu_infos[ranks[0]].unused} exists, but torch {torch.__version__} is a build without CUDA"
    effect = f"{name_ranks(ranks)} train{'s' * (len(ranks) == 1)} on the CPU"
    return [f"{fact}: {effect}; if that is meant, say so with {_VISIBLE}='' or {CUDA_ON_CPU}=1"]


def backend_of(gpu_infos: Sequence[GpuInfo], asked: str) -> tuple[str, list[str]]:
    """Return torch's name of the backend, and warnings about slow ones.

    The backend is that of the devices (nccl for CUDA tensors) beside gloo for CPU tensors if every rank has a device of
    its own, else gloo for both. `asked` is `ddp_dist_backend`.
    """
    backend, notices = _find_backend(gpu_infos, asked)
    kinds = {gpu_info.kind for gpu_info in gpu_infos}
    if backend == GLOO and len(gpu_infos) > 1 and (kinds := kinds.difference(backends.gloo_devices())):
        why = "".join(f" ({notice})" for notice in notices)
        raise UnsupportedError(
            f"nothing connects the ranks' devices: gloo takes no tensors of {', '.join(sorted(kinds))}{why}",
            hint="import the plug-in that registers their backend before smp.init(), or let the ranks use the CPU",
        )
    return backend, notices


def _find_backend(gpu_infos: Sequence[GpuInfo], asked: str) -> tuple[str, list[str]]:
    without = [rank for rank, gpu_info in enumerate(gpu_infos) if gpu_info.gpu is None]
    if asked == GLOO or len(without) == len(gpu_infos):
        return GLOO, []
    if without:
        why = gpu_infos[without[0]].cpu_reason
        use = f"{name_ranks(without)} use{'s' * (len(without) == 1)} the CPU"
        return GLOO, [f"{use} ({why}) while others have a GPU: gloo connects all, and is slower"]
    kinds = sorted({gpu_info.kind for gpu_info in gpu_infos})
    if len(kinds) > 1:
        return GLOO, [f"the ranks have devices of {len(kinds)} kinds ({', '.join(kinds)}): gloo connects all"]
    own = backends.backend_for(torch.device(kinds[0]))
    if own is None:
        return GLOO, []
    both = f"cpu:{GLOO},{kinds[0]}:{own}"
    num_gpus = len({gpu_info.gpu for gpu_info in gpu_infos})
    if num_gpus == len(gpu_infos):
        return both, []
    ranks = f"{len(gpu_infos)} ranks share {num_gpus} GPU{'s' * (num_gpus > 1)}"
    if own != NCCL or all(gpu_info.shared_nccl is None for gpu_info in gpu_infos):
        return GLOO, [f"{ranks}, which {own} cannot do: gloo is used, and is slower"]
    _check_shared_nccl(gpu_infos)
    needs = "NCCL_MULTI_RANK_GPU_ENABLE=1 (set unless you have set it), and is faster with CUDA's multi-process service"
    return both, [f"{ranks} over nccl because of {SHARED_GPU_NCCL}=1, which needs {needs}"]


def _check_shared_nccl(gpu_infos: Sequence[GpuInfo]) -> None:
    silent = [rank for rank, gpu_info in enumerate(gpu_infos) if gpu_info.shared_nccl is None]
    if silent:
        raise ConfigError(
            [Problem((SHARED_GPU_NCCL,), f"is 1 on some ranks but not on {name_ranks(silent)}")], subject="environment"
        )
    for rank, gpu_info in enumerate(gpu_infos):
        assert gpu_info.shared_nccl is not None
        if tuple(gpu_info.shared_nccl[:2]) < _NCCL_THAT_SHARES:
            version = ".".join(map(str, gpu_info.shared_nccl)) or "none"
            raise UnsupportedError(
                f"{SHARED_GPU_NCCL}=1 needs NCCL 2.30 or newer, but rank {rank} has {version}",
                hint=f"unset {SHARED_GPU_NCCL}, or load a newer NCCL with LD_PRELOAD=.../libnccl.so.2",
            )


def _why_cpu(environ: Mapping[str, str]) -> str | None:
    """Return the variable, with its value, by which the CPU is used on purpose."""
    if environ.get(CUDA_ON_CPU) == "1":
        return f"{CUDA_ON_CPU}=1"
    visible = environ.get(_VISIBLE)
    if visible is not None and visible.split(",")[0].strip() in _NO_DEVICE:
        return f"{_VISIBLE}={visible or repr('')}"
    return None


def _is_for_gpus() -> bool:
    return torch.version.cuda is not None or torch.version.hip is not None


def _facts(environ: Mapping[str, str]) -> str:
    """Return, for errors, what decides whether torch can use a GPU."""
    versions = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    built = [f"for {kind} {version}" for kind, version in versions.items() if version]
    parts = [f"torch {torch.__version__} is built {[*built, 'without CUDA (torch.version.cuda is None)'][0]}"]
    if _VISIBLE in environ:
        parts.append(f"{_VISIBLE} is {environ[_VISIBLE]}")
    if _is_for_gpus() and (error := devices.cannot_use_cuda()) is not None:
        parts.append(f"torch says `{error.partition('. ')[0].strip()}`")
    return ", ".join(parts)


def _hint() -> str:
    remedy = "install a build of torch for CUDA"
    if torch.version.cuda is not None:
        remedy = "update the driver, or install a build of torch for an older CUDA"
    return f"{remedy}; if the CPU is meant, set {_VISIBLE}='' or {CUDA_ON_CPU}=1"
