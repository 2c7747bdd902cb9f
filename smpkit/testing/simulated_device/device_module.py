"""What torch finds of the device: the module `torch.sim`, and the process group of backend `sim`."""

from __future__ import annotations

import contextlib
import os
import types
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore  # torch.distributed's, which its types hide


class _Properties:
    """What `torch.sim.get_device_properties` returns."""

    name = "simulated accelerator"
    multi_processor_count = 1

    def __init__(self, index: int) -> None:
        self.uuid = f"sim-{os.getpid()}-{index}"
        self.total_memory = torch.accelerator.get_memory_info(index)[1]


def make(num_devices: int) -> types.ModuleType:
    """Return the module; the library is loaded, and the device renamed."""
    ops = torch.ops.sim
    generators = tuple(ops.default_generator(index) for index in range(num_devices))
    dtypes = [torch.float16, torch.bfloat16]

    def index_of(device: Any = None) -> int:
        if device is None:
            return torch.accelerator.current_device_index()
        if isinstance(device, int):
            return device
        index: int | None = torch.device(device).index
        return torch.accelerator.current_device_index() if index is None else index

    class Device:
        """A context in which a device is the current one; None and -1 leave it as it is."""

        def __init__(self, device: Any) -> None:
            self.index = -1 if device is None or device == -1 else index_of(device)
            self._before = -1

        def __enter__(self) -> None:
            self._before = torch.accelerator.current_device_index()
            if self.index >= 0:
                torch.accelerator.set_device_index(self.index)

        def __exit__(self, *_: object) -> None:
            torch.accelerator.set_device_index(self._before)

    def manual_seed_all(seed: int) -> None:
        for index in range(num_devices):
            ops.manual_seed(index, seed)

    def get_rng_state(device: Any = "sim") -> torch.Tensor:
        state: torch.Tensor = ops.get_rng_state(index_of(device))
        return state

    def default_stream(device: Any = None) -> torch.Stream:
        kind = int(torch._C._autograd.DeviceType.PrivateUse1)  # type: ignore[call-overload]
        return torch.Stream(stream_id=0, device_index=index_of(device), device_type=kind)

    def stream(stream: torch.Stream | None) -> AbstractContextManager[object]:
        return contextlib.nullcontext() if stream is None else stream

    owner = os.getpid()  # a fork has no threads that would carry messages, and its locks may be held by nobody

    module = types.ModuleType("torch.sim", __doc__)
    contents: dict[str, Any] = {
        "Event": torch.Event,
        "Stream": torch.Stream,
        "_initialized": True,
        "_is_in_bad_fork": lambda: os.getpid() != owner,
        "_lazy_init": lambda: None,
        "current_device": torch.accelerator.current_device_index,
        "current_stream": torch.accelerator.current_stream,
        "default_generators": generators,
        "default_stream": default_stream,
        "device": Device,
        "device_count": lambda: num_devices,
        "get_amp_supported_dtype": lambda: dtypes,
        "get_device_name": lambda _=None: _Properties.name,
        "get_device_properties": lambda device=None: _Properties(index_of(device)),
        "get_rng_state": get_rng_state,
        "host_register": ops.host_register,
        "host_unregister": ops.host_unregister,
        "init": lambda: None,
        "is_available": lambda: True,
        "is_bf16_supported": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "is_initialized": lambda: True,
        "manual_seed": lambda seed: ops.manual_seed(index_of(), seed),
        "manual_seed_all": manual_seed_all,
        "set_device": torch.accelerator.set_device_index,
        "set_rng_state": lambda state, device="sim": ops.set_rng_state(index_of(device), state),
        "set_stream": torch.accelerator.set_stream,
        "stream": stream,
        "synchronize": torch.accelerator.synchronize,
    }
    of_torch = (
        *("empty_cache", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
        *("memory_stats", "reset_peak_memory_stats"),
    )
    contents |= {name: getattr(torch.accelerator, name) for name in of_torch if hasattr(torch.accelerator, name)}
    module.__dict__.update(contents)
    return module


# ---- the process group, which torch.distributed takes for tensors of the device --------------------------------------


def register_backend() -> None:
    """Make `sim` the backend of tensors of the simulated device, as `nccl` is of CUDA's."""
    if dist.is_available() and not hasattr(dist.Backend, "SIM"):
        dist.Backend.register_backend("sim", _create, extended_api=True, devices=["sim"])


def _create(options: Any, _: object) -> Any:
    """Return a backend, for torch, which calls this in each rank of a new group."""
    rank, size = options.group_rank, options.group_size
    # Gloo of its own: the threads that carry messages must not come between the operations of the user's gloo.
    store = PrefixStore("sim", options.store)
    carrier = dist.ProcessGroupGloo(store, rank, size, options.timeout)
    group = dist.ProcessGroup(store, rank, size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, carrier)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    torch.ops.sim.add_backend(group.boxed(), options.group_id, options.timeout.total_seconds())
    return group._get_backend(torch.device("sim"))
