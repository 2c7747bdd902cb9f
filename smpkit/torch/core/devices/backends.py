"""Which backend of torch.distributed connects devices of a kind, and everything that is special to nccl.

gloo connects hosts. A device may have a backend of its own beside it: nccl for CUDA and ROCm, xccl for Intel's, hccl
for Ascend's and Gaudi, and whatever else a plug-in registers for its device.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from smpkit.errors import UsageError
from smpkit.observe.runs import RUN_DIR

GLOO: Final = "gloo"
NCCL: Final = "nccl"
SHARED_GPU_NCCL: Final = "SMPKIT_SHARED_GPU_NCCL"
FLIGHT_RECORD: Final = "TORCH_FR_DUMP_TEMP_FILE"
"""Where torch's flight recorder writes; it appends the rank."""
_LAUNCH_ORDER: Final = "NCCL_LAUNCH_ORDER_IMPLICIT"
_CONNECTIONS: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
_MESSAGE_CTAS: Final = 8
"""Thread blocks that nccl may use for a message, of 132 multiprocessors on an H100; NCCL_MAX_CTAS overrides it."""


def backend_for(device: torch.device) -> str | None:
    """Return the backend that a device has of its own; None for the CPU, and for devices whose plug-in has none."""
    name = dist.Backend.default_device_backend_map.get(device.type)
    return None if device.type == "cpu" or name in (None, GLOO) else name


def uses_nccl(device: torch.device) -> bool:
    """Return whether the backend of a device is nccl; all that is special to nccl depends on this."""
    return backend_for(device) == NCCL


def gloo_devices() -> list[str]:
    """Return the types of devices whose tensors gloo takes."""
    return dist.Backend.backend_capability[GLOO]


def backend_names() -> list[str]:
    """Return the names of all backends that devices have, a plug-in's too, as errors mention them."""
    return sorted(set(dist.Backend.default_device_backend_map.values()))


def device_names() -> list[str]:
    """Return the types of all devices that have a backend of their own, as errors mention them."""
    return sorted(kind for kind in dist.Backend.default_device_backend_map if backend_for(torch.device(kind)))


# --- of a group -------------------------------------------------------------------------------------------------------


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """Return a group's backends, by type of device."""
    pairs = str(dist.get_backend_config(group)).split(",")
    return {kind: backend for kind, _, backend in (pair.partition(":") for pair in pairs)}


def carries_host_tensors(group: dist.ProcessGroup) -> bool:
    """Return whether gloo carries CPU tensors in a group."""
    return backends_of(group).get("cpu") == GLOO


def connects(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether the backend of a device connects a group's ranks; nccl cannot where several share a GPU."""
    backend = backend_for(device)
    return backend is not None and backends_of(group).get(device.type) == backend


def device_backends(group: dist.ProcessGroup) -> list[Backend]:
    """Return what connects a group's devices and not its hosts: nothing, or one backend."""
    kinds = map(torch.device, backends_of(group))
    backends = [group._get_backend(device) for device in kinds if connects(group, device)]
    # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps them.
    return [getattr(backend, "wrapped_pg", backend) for backend in backends]


def error_of(backend: Backend) -> str | None:
    """Return the name of the error in which an operation has ended; None if there is none, or the backend cannot tell.

    A backend that cannot tell raises its errors where the host waits.
    """
    get_error = getattr(backend, "get_error", None)
    name: str | None = None if get_error is None else get_error().name
    return None if name == "SUCCESS" else name


# --- nccl -------------------------------------------------------------------------------------------------------------


def nccl_version() -> tuple[int, ...]:
    """Return the version of the nccl that is loaded, which may differ from the one at build time; () without nccl."""
    try:
        from torch._C._distributed_c10d import ProcessGroupNCCL
    except ImportError:
        return ()
    return tuple(ProcessGroupNCCL.get_runtime_nccl_version())  # type: ignore[call-arg]  # a static method


def message_options(backend: str, timeout: timedelta) -> object:
    """Return options by which messages start before compute, and leave most of the device to it; None: nccl only."""
    if backend != NCCL:
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = _MESSAGE_CTAS
    options._timeout = timeout  # else torch warns that it differs from `new_group`'s
    return options


def refuse_one_queue(device: torch.device, environ: Mapping[str, str] = os.environ) -> None:
    """Raise UsageError if variables make nccl's kernels or a GPU's streams wait for each other.

    A message of a pipeline waits on its GPU for another rank; what would wait behind it may be what that rank needs.
    """
    order, connections = environ.get(_LAUNCH_ORDER, "0"), environ.get(_CONNECTIONS, "32")
    refused = _LAUNCH_ORDER if order != "0" else _CONNECTIONS if connections == "1" else None
    if refused is not None and uses_nccl(device):
        raise UsageError(
            f"{refused} is {environ[refused]!r}: what a GPU does would wait for messages of the pipeline that other"
            " ranks have not received yet, and ranks could wait for each other for ever",
            hint=f"unset {refused}",
        )


def prepare(backend: str, launcher: str, *, single_host: bool) -> None:
    """Set the variables that nccl and torch's watchdog read when groups are made, unless the user has set them.

    `backend` is torch's name for the backends of the default group.
    """
    if NCCL not in backend:
        return
    # 2, "clean up only": on an error torch ends the kernels. By default it kills the process, and nobody would learn
    # which rank failed; `watcher.py` sees the error as well, and finds that out.
    handling = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    # torchrun sets 1 for every rank where the user has set nothing.
    if launcher == "torchrun" and os.environ.get(handling) == "1":
        del os.environ[handling]
    if "NCCL_ASYNC_ERROR_HANDLING" not in os.environ:  # the old name, which torch still reads
        os.environ.setdefault(handling, "2")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    # The most there are: streams that share a queue of the hardware wait for each other, and by default there are 8.
    os.environ.setdefault(_CONNECTIONS, "32")
    # Torch's flight recorder would leave its record of the last operations in the host's folder for temporary files.
    if (run := os.environ.get(RUN_DIR)) and "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" not in os.environ:  # its old name
        os.environ.setdefault(FLIGHT_RECORD, f"{run}/nccl_trace_rank_")
    if os.environ.get(SHARED_GPU_NCCL) == "1":
        os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    if single_host:  # as smpkit's own launcher does: nccl would listen at an address that other hosts reach
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
