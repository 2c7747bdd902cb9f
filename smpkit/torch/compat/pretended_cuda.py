"""Let scripts that insist on CUDA run on the CPU: `torch.cuda` looks to them as if there were a GPU.

`SMPKIT_CUDA_ON_CPU=1`, which `smpkit compat --cuda-on-cpu` sets, asks for it. The script and its libraries see a GPU:
`torch.cuda.is_available()` is True, tensors are on `cuda:0`, and their types are `torch.cuda.FloatTensor` and so on.
Torch and smpkit themselves see the CPU, because their code acts on what it sees. The module of the calling function
tells who asks.

`REPLACEMENTS` says what stands for what. Anything else of `torch.cuda` stays as it is, and fails as without a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from smpkit.torch.compat.devices_in_calls import CudaToCpuMode, answering, to_cpu

__all__ = ["REPLACEMENTS", "install"]

_TRUTHFUL: Final = frozenset({"torch", "smpkit"})
"""Packages that see the CPU."""
_TYPES: Final = ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
_CAPABILITY: Final = (8, 0)
"""Compute capability: of an A100, the oldest on which bfloat16 works, as it does on the CPU."""


def install() -> None:
    """Begin; for the life of this process."""
    for name, replacement in REPLACEMENTS.items():
        owner, attribute = _owner_of(name)
        for place in {owner, _home_of(name, getattr(owner, attribute, None), owner)}:
            setattr(place, attribute, replacement)
    _PretendedCudaMode().__enter__()  # type: ignore[no-untyped-call]


def _owner_of(name: str) -> tuple[Any, str]:
    *path, attribute = name.split(".")
    owner: Any = torch
    for part in path[1:]:
        owner = getattr(owner, part)
    return owner, attribute


def _home_of(name: str, original: Any, owner: Any) -> Any:
    """Return the module of `torch.cuda` that defines what `torch.cuda` exports: scripts use both of its names."""
    home = sys.modules.get(getattr(original, "__module__", ""))
    defines = getattr(home, name.rpartition(".")[2], None) is original
    return home if name.startswith("torch.cuda.") and defines else owner


def _is_asked_by_script(depth: int = 2) -> bool:
    """Return whether code outside of torch and smpkit called the function that calls this one."""
    name = str(sys._getframe(depth).f_globals.get("__name__"))
    return name.partition(".")[0] not in _TRUTHFUL


class _PretendedCudaMode(CudaToCpuMode):
    """Shows tensors as if they were on a GPU, and takes them there by leaving them where they are."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        shown = _SHOWN.get(func)
        if shown is not None and _is_asked_by_script():
            return shown(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def _type_of(tensor: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
    """Stand for `Tensor.type`."""
    if dtype is None:
        return tensor.type().replace("torch.", "torch.cuda.", 1)
    return tensor.type(_on_cpu(dtype), non_blocking, **kwargs)


def _on_cpu(kind: Any) -> Any:
    """Return a tensor type by its name on the CPU; anything else as it is."""
    return kind.replace("torch.cuda.", "torch.", 1) if isinstance(kind, str) else kind


# --- devices ----------------------------------------------------------------------------------------------------------


class _Current:
    """The device that the script has chosen."""

    index = 0


_current: Final = _Current()


def _is_available() -> bool:
    return _is_asked_by_script() or _is_really_available()


def _device_count() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if _is_asked_by_script() else _real_count()


_is_really_available: Final = torch.cuda.is_available
_real_count: Final = torch.cuda.device_count
_real_is_autocast_enabled: Final[Callable[..., bool]] = torch.is_autocast_enabled
_real_load: Final = torch.load
_real_set_default_tensor_type: Final = torch.set_default_tensor_type
_real_init_process_group: Final = dist.init_process_group
_real_init_autocast: Final[Callable[..., None]] = torch.autocast.__init__
_real_init_scaler: Final[Callable[..., None]] = torch.amp.GradScaler.__init__


def _set_device(device: Any) -> None:
    index = device if isinstance(device, int) else torch.device(device).index
    _current.index = max(0, index or 0)


@contextlib.contextmanager
def _device(device: Any) -> Iterator[None]:
    outer = _current.index
    if device is not None:
        _set_device(device)
    try:
        yield
    finally:
        _current.index = outer


def _properties() -> types.SimpleNamespace:
    return types.SimpleNamespace(
        name=_device_name(),
        major=_CAPABILITY[0],
        minor=_CAPABILITY[1],
        total_memory=_total_bytes(),
        multi_processor_count=os.cpu_count() or 1,
        warp_size=32,
    )


def _device_name() -> str:
    return "CPU in place of a GPU (smpkit)"


_SHOWN: Final[Mapping[Any, Callable[..., Any]]] = {
    torch.Tensor.device.__get__: lambda *_: torch.device("cuda", _current.index),
    torch.Tensor.is_cuda.__get__: lambda *_: True,  # type: ignore[attr-defined]
    torch.Tensor.get_device: lambda *_: _current.index,
    torch.Tensor.type: _type_of,
}
"""What the script gets from methods and attributes of tensors."""


# --- memory -----------------------------------------------------------------------------------------------------------


def _total_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _memory_info() -> tuple[int, int]:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), _total_bytes()


def _memory_stats() -> dict[str, int]:
    now, peak = _resident_bytes(), _peak_bytes()
    kinds = ("allocated_bytes.all", "reserved_bytes.all", "active_bytes.all")
    return {f"{kind}.{which}": value for kind in kinds for which, value in (("current", now), ("peak", peak))}


def _memory_summary() -> str:
    return f"resident memory of this process: {_resident_bytes()} bytes, at most {_peak_bytes()} bytes"


# --- streams and events -----------------------------------------------------------------------------------------------


class Event:
    """Stands for `torch.cuda.Event`: all work is done by the time it is recorded."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._time: float | None = None

    def record(self, *_: Any) -> None:
        """Note the time."""
        self._time = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds from this event to another."""
        if self._time is None or end_event._time is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")  # torch's words
        return (end_event._time - self._time) * 1000

    def query(self) -> bool:
        """Return that it has happened."""
        return True

    def synchronize(self) -> None:
        """Return at once."""

    def wait(self, stream: Any = None) -> None:
        """Return at once."""


class Stream:
    """Stands for `torch.cuda.Stream`: work is done in the order of the program."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", _current.index)
        self.cuda_stream = 0

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return that all work is done."""
        return True

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event."""
        event = event or Event()
        event.record()
        return event

    def wait_event(self, event: Any) -> None:
        """Return at once."""

    def wait_stream(self, stream: Any) -> None:
        """Return at once."""


def _stream(stream: Any) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext(stream)


_default_stream: Final = Stream()


# --- random numbers ---------------------------------------------------------------------------------------------------

_generator: Final = torch.Generator("cpu")
"""Its state is what scripts save and restore as the GPU's; all numbers come from the CPU's generator."""


def _get_rng_state() -> torch.Tensor:
    return _generator.get_state()


def _set_rng_state(new_state: torch.Tensor, *_: Any) -> None:
    _generator.set_state(new_state)


# --- what takes the name of a device ----------------------------------------------------------------------------------


class _CudaAutocast(torch.autocast):
    """Stands for `torch.cuda.amp.autocast`."""

    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True) -> None:
        super().__init__("cpu", dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


def _init_autocast(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
    if device_type == "cuda":
        device_type = "cpu"
        # torch's default on a GPU; the CPU's own would be bfloat16.
        if not args and kwargs.get("dtype") is None:
            kwargs["dtype"] = torch.float16
    _real_init_autocast(self, device_type, *args, **kwargs)


class _CudaGradScaler(torch.amp.GradScaler):
    """Stands for `torch.cuda.amp.GradScaler`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu", *args, **kwargs)


def _init_scaler(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
    _real_init_scaler(self, "cpu" if device == "cuda" else device, *args, **kwargs)


def _is_autocast_enabled(device_type: str | None = None) -> bool:
    if device_type in (None, "cuda") and _is_asked_by_script():
        device_type = "cpu"
    return _real_is_autocast_enabled() if device_type is None else _real_is_autocast_enabled(device_type)


@functools.wraps(_real_load)
def _load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
    if isinstance(map_location, dict):
        map_location = {key: to_cpu(value) for key, value in map_location.items()}
    # None, too: a file that was saved on a GPU.
    location = "cpu" if map_location is None else to_cpu(map_location)
    return _real_load(f, location, *args, **kwargs)


def _set_default_tensor_type(kind: Any) -> None:
    _real_set_default_tensor_type(_on_cpu(kind))


@functools.wraps(_real_init_process_group)
def _init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    if backend is not None and not dist.is_nccl_available():
        backend = "gloo" if backend == "nccl" else backend.replace("cuda:nccl", "cuda:gloo")
    _real_init_process_group(backend, *args, **kwargs)


def _storage_itself(self: Any, *_: Any, **__: Any) -> Any:
    return self


REPLACEMENTS: Final[Mapping[str, Any]] = {
    "torch.cuda.is_available": _is_available,
    "torch.cuda.device_count": _device_count,
    "torch.cuda.is_initialized": answering(lambda: True),
    "torch.cuda.init": answering(),
    "torch.cuda.current_device": answering(lambda: _current.index),
    "torch.cuda.set_device": _set_device,
    "torch.cuda.device": _device,
    "torch.cuda.device_of": answering(contextlib.nullcontext),
    "torch.cuda.get_device_name": answering(_device_name),
    "torch.cuda.get_device_properties": answering(_properties),
    "torch.cuda.get_device_capability": answering(lambda: _CAPABILITY),
    "torch.cuda.is_bf16_supported": answering(lambda: True),
    "torch.cuda.can_device_access_peer": answering(lambda: False),
    "torch.cuda.synchronize": answering(),
    "torch.cuda.ipc_collect": answering(),
    "torch.cuda.empty_cache": answering(),
    "torch.cuda.reset_peak_memory_stats": answering(),
    "torch.cuda.reset_max_memory_allocated": answering(),
    "torch.cuda.reset_max_memory_cached": answering(),
    "torch.cuda.reset_accumulated_memory_stats": answering(),
    "torch.cuda.set_per_process_memory_fraction": answering(),
    "torch.cuda.memory_allocated": answering(_resident_bytes),
    "torch.cuda.memory_reserved": answering(_resident_bytes),
    "torch.cuda.memory_cached": answering(_resident_bytes),
    "torch.cuda.max_memory_allocated": answering(_peak_bytes),
    "torch.cuda.max_memory_reserved": answering(_peak_bytes),
    "torch.cuda.max_memory_cached": answering(_peak_bytes),
    "torch.cuda.memory_stats": answering(_memory_stats),
    "torch.cuda.memory_summary": answering(_memory_summary),
    "torch.cuda.mem_get_info": answering(_memory_info),
    "torch.cuda.Event": Event,
    "torch.cuda.Stream": Stream,
    "torch.cuda.stream": _stream,
    "torch.cuda.set_stream": answering(),
    "torch.cuda.current_stream": answering(lambda: _default_stream),
    "torch.cuda.default_stream": answering(lambda: _default_stream),
    "torch.cuda.manual_seed": answering(),
    "torch.cuda.manual_seed_all": answering(),
    "torch.cuda.seed": answering(),
    "torch.cuda.seed_all": answering(),
    "torch.cuda.initial_seed": _generator.initial_seed,
    "torch.cuda.get_rng_state": answering(_get_rng_state),
    "torch.cuda.set_rng_state": _set_rng_state,
    "torch.cuda.get_rng_state_all": lambda: [_get_rng_state()],
    "torch.cuda.set_rng_state_all": lambda states: _set_rng_state(next(iter(states))),
    "torch.cuda.nvtx.range_push": answering(),
    "torch.cuda.nvtx.range_pop": answering(),
    "torch.cuda.nvtx.mark": answering(),
    "torch.cuda.profiler.start": answering(),
    "torch.cuda.profiler.stop": answering(),
    "torch.cuda.amp.autocast": _CudaAutocast,
    "torch.cuda.amp.GradScaler": _CudaGradScaler,
    **{f"torch.cuda.{name}Tensor": getattr(torch, f"{name}Tensor") for name in _TYPES},
    "torch.Tensor.record_stream": answering(),
    "torch.autocast.__init__": _init_autocast,
    "torch.amp.GradScaler.__init__": _init_scaler,
    "torch.is_autocast_enabled": _is_autocast_enabled,
    "torch.set_default_tensor_type": _set_default_tensor_type,
    "torch.load": _load,
    "torch.UntypedStorage.cuda": _storage_itself,
    "torch.TypedStorage.cuda": _storage_itself,
    "torch.distributed.init_process_group": _init_process_group,
}
"""What stands for what, by full name."""
