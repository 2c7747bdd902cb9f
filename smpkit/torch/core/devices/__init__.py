"""Streams, events, memory and random numbers of an asynchronous device, such as a GPU.

The host queues work on the device and goes on. Code that must order copies, messages or measurements does so through
this package, so that it alone names torch's functions for it, and devices: elsewhere `scripts/check_devices.py` refuses
`torch.cuda` and "cuda". On a CPU, whose work has ended when a call returns, there is nothing to order: the functions
for streams and events do nothing and return None. `backends.py` is about connections between devices.

`torch.accelerator`, `torch.Stream` and `torch.Event` are any accelerator's. Random generators and whether a graph is
being captured are in the device's own module (`torch.cuda`, `torch.xpu`, a plug-in's), which must have them.

[Note: copies that do not block the host] A copy between a device and pageable memory makes the host wait for everything
queued on the stream. From and to pinned memory it is only queued; then that memory must not be written, or read, before
the copy has ended. The user's code does not know that, so the user's tensors are copied into pinned memory of our own
first, even if they are pinned. Torch's allocator of pinned memory records the copies that use a block, and reuses it
only when they have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Final

import torch

from smpkit.errors import UnsupportedError

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
    if not hasattr(properties, "pci_bus_id"):
        return None
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def _properties(device: torch.device) -> Any:
    tell = getattr(torch.get_device_module(device), "get_device_properties", None)
    return None if tell is None else tell(device)


def _of_module(device: torch.device, name: str) -> Any:
    """Return what the module of a device must have under a name."""
    module = torch.get_device_module(device)
    if not hasattr(module, name):
        raise UnsupportedError(
            f"the plug-in for devices of the type `{device.type}` has no `torch.{device.type}.{name}`",
            hint="update it, or train on the CPU: hide the device from torch",
        )
    return getattr(module, name)


def memory_bytes(device: torch.device) -> int:
    """Return the bytes of all tensors on a device."""
    return torch.accelerator.memory_allocated(device)


def total_bytes(device: torch.device) -> int | None:
    """Return the memory of a device, in use or not; None for the CPU."""
    return int(torch.accelerator.get_memory_info(device)[1]) if is_asynchronous(device) else None


def peak_bytes(device: torch.device) -> int | None:
    """Return the most bytes of tensors since `reset_peak`; None on the CPU, which does not count them."""
    return torch.accelerator.max_memory_allocated(device) if is_asynchronous(device) else None


def reset_peak(device: torch.device) -> None:
    """Begin `peak_bytes` anew, for everybody who reads torch's statistics of this device."""
    if is_asynchronous(device):
        torch.accelerator.reset_peak_memory_stats(device)


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

    Between two that `keeps_time`, `elapsed_time` is the milliseconds that the device took from one to the other.
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


def wait_for_event(event: torch.Event | None) -> None:
    """Block the host until the device has reached an event, whatever has been queued since."""
    if event is not None:
        event.synchronize()


def is_capturing(device: torch.device) -> bool:
    """Return whether a graph is being captured from the current stream."""
    return is_asynchronous(device) and bool(_of_module(device, "is_current_stream_capturing")())


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


def host_registration(device: torch.device) -> tuple[Callable[[int, int], None], Callable[[int], object]] | None:
    """Return functions by which a driver pins memory of the host that is mapped already, and unpins it.

    The first takes an address and a number of bytes, and raises OSError if the driver refuses; the second takes the
    address. A plug-in's module may offer `host_register` and `host_unregister` with the same arguments; where it does
    not, this returns None, and only torch can allocate pinned memory.
    """
    module: Any = torch.get_device_module(device)
    flags: tuple[int, ...] = ()
    if device.type == "cuda":
        runtime = module.cudart()
        pin, unpin, flags = runtime.cudaHostRegister, runtime.cudaHostUnregister, (0,)
    elif hasattr(module, "host_register") and hasattr(module, "host_unregister"):
        pin, unpin = module.host_register, module.host_unregister
    else:
        return None

    def register(address: int, num_bytes: int) -> None:
        try:
            refusal = int(pin(address, num_bytes, *flags) or 0)
        except RuntimeError as error:
            raise OSError(f"the driver did not take {num_bytes} bytes of the host: {error}") from error
        if refusal and device.type == "cuda":
            # torch reads the last error after each kernel that it launches, and would report this one as the kernel's:
            # launch one here, which raises it.
            with suppress(RuntimeError):
                torch.ones(1, device="cuda")
            raise OSError(f"cudaHostRegister of {num_bytes} bytes failed with CUDA error {refusal}")
        if refusal:
            raise OSError(f"the driver did not take {num_bytes} bytes of the host: error {refusal}")

    return register, unpin


# --- random numbers ---------------------------------------------------------------------------------------------------


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that operators of a device draw from; its state can be read without a wait."""
    if not is_asynchronous(device):
        return torch.default_generator
    number: Any = device.index
    if number is None:
        number = torch.empty(0, device=device).get_device()
    _of_module(device, "init")()  # makes the generators
    generator: torch.Generator = _of_module(device, "default_generators")[number]
    return generator


def fork_rng(device: torch.device) -> AbstractContextManager[None]:
    """Restore the generators of the CPU and of a device after the block."""
    return torch.random.fork_rng([device] if is_asynchronous(device) else [], device_type=device.type)
