"""Streams, events, memory and random numbers of an asynchronous device, such as a GPU.

The host queues work on the device and goes on. Code that must order copies, messages or measurements does so through
this package, so that it alone names torch's functions for it, and devices: elsewhere `scripts/check_devices.py` refuses
`torch.cuda` and "cuda". On a CPU, whose work has ended when a call returns, there is nothing to order: the functions
for streams and events do nothing and return None. `backends.py` is about connections between devices.

[Note: what torch does not unify] `torch.accelerator`, `torch.Stream` and `torch.Event` are any accelerator's. The rest
is in the device's own module (`torch.cuda`, `torch.xpu`, a plug-in's), which may lack it; each function here that looks
there says what happens then.

[Note: copies that do not block the host] A copy between a device and pageable memory makes the host wait for everything
queued on the stream. From and to pinned memory it is only queued; then that memory must not be written, or read, before
the copy has ended. The user's code does not know that, so the user's tensors are copied into pinned memory of our own
first, even if they are pinned. Torch's allocator of pinned memory records the copies that use a block, and reuses it
only when they have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

__all__ = [
    "Generator",
    "cannot_use_cuda",
    "choose_device",
    "current_device",
    "current_stream",
    "default_generator",
    "device_name",
    "fork_rng",
    "has_happened",
    "has_streams",
    "host_memory",
    "host_registration",
    "is_asynchronous",
    "is_available",
    "is_capturing",
    "make_current",
    "memory_bytes",
    "new_stream",
    "on_stream",
    "order_after",
    "pci_address",
    "peak_bytes",
    "physical_device",
    "record_event",
    "reset_peak",
    "to_device",
    "total_bytes",
    "wait_for_event",
    "wait_for_stream",
]

_PLAIN: Final = frozenset[type]({torch.Tensor, torch.nn.Parameter})
"""Subclasses may lie in memory in other ways."""
_WITHOUT_STREAMS: Final = frozenset({"mps"})
"""Accelerators with one queue, and no process group either: ranks compute on the CPU there."""


def is_asynchronous(device: torch.device) -> bool:
    """Return whether operators return before the device has computed their results."""
    return device.type not in ("cpu", "meta")


# --- which device -----------------------------------------------------------------------------------------------------


def has_streams(device: torch.device) -> bool:
    """Return whether copies of a device can run beside its computations."""
    return is_asynchronous(device) and device.type not in _WITHOUT_STREAMS


def current_device() -> torch.device:
    """Return the device that this process computes on: the current one of its accelerator, or the CPU without one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type in _WITHOUT_STREAMS:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def is_available(device: torch.device) -> bool:
    """Return whether this process can compute on devices of this type."""
    return device.type in ("cpu", current_device().type)


def choose_device(local_rank: int) -> torch.device | None:
    """Return a rank's accelerator among those of its host, without making a context there; None if there is none."""
    kind = current_device().type
    return None if kind == "cpu" else torch.device(kind, local_rank % torch.accelerator.device_count())


def make_current(device: torch.device) -> None:
    """Make a device the current one of this thread; a new thread begins with the first device."""
    # Even querying an event of another device can make a context on the current one: half a GiB for each process.
    if is_asynchronous(device) and device.index is not None:
        torch.accelerator.set_device_index(device.index)


def physical_device(device: torch.device) -> str | None:
    """Return the identity of a device, which is the same in every process; None where its module does not tell."""
    uuid = getattr(_properties(device), "uuid", None)
    return None if uuid is None else str(uuid)


def device_name(device: torch.device) -> str:
    """Return the model of an accelerator, as its module tells it, or the type of the device."""
    name = getattr(_properties(device), "name", None) if is_asynchronous(device) else None
    return str(name or device.type)


def pci_address(device: torch.device) -> str | None:
    """Return where a device is on the PCI bus, as Linux writes it: `0000:3b:00.0`; None if its module does not tell."""
    properties = _properties(device)
    try:
        return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError:
        return None


def _properties(device: torch.device) -> Any:
    found = getattr(torch.get_device_module(device), "get_device_properties", None)
    return None if found is None else found(device)


def memory_bytes(device: torch.device) -> int:
    """Return the bytes of all tensors on a device."""
    # What a plug-in's own module tells is right also where its allocator is not one of `torch.accelerator`'s.
    allocated = getattr(torch.get_device_module(device), "memory_allocated", torch.accelerator.memory_allocated)
    return int(allocated(device))


def total_bytes(device: torch.device) -> int | None:
    """Return the memory of a device, in use or not; None if its module does not tell, and for the CPU."""
    return int(torch.accelerator.get_memory_info(device)[1]) if is_asynchronous(device) else None


def peak_bytes(device: torch.device) -> int | None:
    """Return the most bytes of tensors since `reset_peak`; None on the CPU, which does not count them."""
    if not is_asynchronous(device):
        return None
    peak = getattr(torch.get_device_module(device), "max_memory_allocated", torch.accelerator.max_memory_allocated)
    return int(peak(device))


def reset_peak(device: torch.device) -> None:
    """Begin `peak_bytes` anew, for everybody who reads torch's statistics of this device."""
    if is_asynchronous(device):
        module = torch.get_device_module(device)
        getattr(module, "reset_peak_memory_stats", torch.accelerator.reset_peak_memory_stats)(device)


def cannot_use_cuda() -> str | None:
    """Return what torch says where it cannot use CUDA, or ROCm; None if it can."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # raises with the reason, unlike `is_available`
    except (RuntimeError, AssertionError) as error:
        return str(error)
    return None


# --- streams and events -----------------------------------------------------------------------------------------------


def current_stream(device: torch.device) -> torch.Stream | None:
    """Return the device's current stream in this thread."""
    return torch.accelerator.current_stream(device) if is_asynchronous(device) else None


def new_stream(device: torch.device, *, high_priority: bool = False) -> torch.Stream | None:
    """Return a new stream; at high priority its kernels start before those of others."""
    return torch.Stream(device, priority=-1 if high_priority else 0) if is_asynchronous(device) else None


@contextmanager
def on_stream(stream: torch.Stream | None) -> Iterator[None]:
    """Make a stream the current one in this thread; None: keep the present one.

    Unlike `with stream`, one stream may be entered by several threads, and again inside itself.
    """
    if stream is None:
        yield
        return
    # `set_stream` makes the stream's device the current one; a thread that had another must get it back.
    with torch.accelerator.device_index(stream.device_index):
        before = torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)


def record_event(device: torch.device, *, keeps_time: bool = False) -> torch.Event | None:
    """Return an event after everything that is queued on the current stream now.

    Args:
        keeps_time: `elapsed_time` of two such events is the milliseconds that the device took from one to the other.
    """
    if not is_asynchronous(device):
        return None
    event = torch.Event(device, enable_timing=keeps_time)
    event.record(torch.accelerator.current_stream(device))
    return event


def order_after(event: torch.Event | None, stream: torch.Stream | None) -> None:
    """Make a stream wait for an event before what is queued on it from now on; the host does not wait."""
    if stream is not None and event is not None:
        stream.wait_event(event)


def wait_for_stream(device: torch.device) -> None:
    """Block the host until everything on the current stream has run."""
    # Never synchronize the whole device: two ranks that send to each other would both wait for the other to receive.
    if (stream := current_stream(device)) is not None:
        stream.synchronize()


def has_happened(event: torch.Event | None) -> bool:
    """Return, without waiting, whether the device has reached an event."""
    return event is None or event.query()


def wait_for_event(event: torch.Event | None) -> None:
    """Block the host until the device has reached an event, whatever has been queued since."""
    if event is not None:
        event.synchronize()


def is_capturing(device: torch.device) -> bool:
    """Return whether a graph is being captured from the current stream; a module that cannot tell captures none."""
    if not is_asynchronous(device):
        return False
    query = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return query is not None and bool(query())


# --- host memory ------------------------------------------------------------------------------------------------------


def host_memory(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return uninitialised bytes on the host, pinned if `device` is asynchronous."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=is_asynchronous(device))


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return what `tensor.to(device)` does, without blocking the host; the caller may write to `tensor` at once.

    See [Note: copies that do not block the host].
    """
    is_plain = tensor.layout is torch.strided and type(tensor) in _PLAIN
    if tensor.device.type != "cpu" or not is_asynchronous(device) or not is_plain:
        return tensor.to(device)
    return torch.empty_like(tensor, requires_grad=False, pin_memory=True).copy_(tensor).to(device, non_blocking=True)


def host_registration(
    device: torch.device,
) -> tuple[Callable[[int, int], object], Callable[[int], object]] | None:
    """Return how a driver pins memory of the host that is mapped already, and how it unpins that.

    A plug-in's module may offer `host_register(address, num_bytes)` and `host_unregister(address)`. None where it does
    not: then torch has to allocate what shall be pinned.

    Returns:
        What takes an address and a number of bytes, and raises OSError if the driver does not take them; and what takes
        the address.
    """
    module: Any = torch.get_device_module(device)
    if device.type == "cuda":
        runtime = module.cudart()
        return partial(_register_with_cuda, runtime), runtime.cudaHostUnregister
    register, unregister = getattr(module, "host_register", None), getattr(module, "host_unregister", None)
    if register is None or unregister is None:
        return None
    return partial(_register, register), unregister


def _register(register: Callable[[int, int], int | None], address: int, num_bytes: int) -> None:
    try:
        error = register(address, num_bytes)
    except RuntimeError as refusal:
        raise OSError(f"the driver did not take {num_bytes} bytes of the host: {refusal}") from refusal
    if error:
        raise OSError(f"the driver did not take {num_bytes} bytes of the host: error {error}")


def _register_with_cuda(runtime: Any, address: int, num_bytes: int) -> None:
    if error := int(runtime.cudaHostRegister(address, num_bytes, 0)):
        _clear_last_error()
        raise OSError(f"cudaHostRegister of {num_bytes} bytes failed with CUDA error {error}")


def _clear_last_error() -> None:
    """Clear this thread's last CUDA error after a failed call of the runtime."""
    # torch asks for the last error after each kernel it launches, and would report this one as the kernel's. So launch
    # one here, which raises it.
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")


# --- random numbers ---------------------------------------------------------------------------------------------------


def default_generator(device: torch.device) -> Generator:
    """Return the generator that operators of a device draw from; its state can be read without a wait.

    A module without a list of generators has functions for them, which take a little longer.
    """
    if not is_asynchronous(device):
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    number: Any = device.index
    if number is None:
        number = torch.empty(0, device=device).get_device()
    if not hasattr(module, "default_generators"):
        return _ModuleGenerator(module, torch.device(device.type, number))
    module.init()  # makes the generators
    generator: torch.Generator = module.default_generators[number]
    return generator


@dataclass(frozen=True)
class _ModuleGenerator:
    """A device's generator, by the functions that `torch.random.fork_rng` asks of every module."""

    module: Any
    device: torch.device

    def get_state(self) -> torch.Tensor:
        state: torch.Tensor = self.module.get_rng_state(self.device)
        return state

    def set_state(self, new_state: torch.Tensor) -> None:
        self.module.set_rng_state(new_state, self.device)

    def manual_seed(self, seed: int) -> None:
        with torch.accelerator.device_index(self.device.index):  # it seeds the current device
            self.module.manual_seed(seed)


Generator = torch.Generator | _ModuleGenerator
"""Of one device."""


@contextmanager
def fork_rng(device: torch.device) -> Iterator[None]:
    """Restore the generators of the CPU and of a device after the block."""
    with torch.random.fork_rng([device] if is_asynchronous(device) else [], device_type=device.type):
        yield
