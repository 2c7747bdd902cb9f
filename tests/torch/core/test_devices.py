"""`devices`: what torch does not unify is looked up, or replaced.

What it does on a GPU is tested in `tests/device`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from smpkit.errors import UnsupportedError, UsageError
from smpkit.torch.core import devices
from smpkit.torch.core.devices import backends
from smpkit.torch.distributed import gpus
from smpkit.torch.distributed.cores import bind
from smpkit.torch.distributed.host_memory import pinned_bytes
from smpkit.torch.offload.arena import Arena
from smpkit.torch.offload.link import link_for

CPU = torch.device("cpu")
XPU = torch.device("xpu", 1)


def install(monkeypatch: pytest.MonkeyPatch, num_devices: int = 4, **functions: Any) -> SimpleNamespace:
    """Give this process imaginary devices of Intel's, and their module."""
    module = SimpleNamespace(is_available=lambda: num_devices > 0, device_count=lambda: num_devices, **functions)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", module.device_count)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    return module


# --- which device -----------------------------------------------------------------------------------------------------


def test_ranks_take_the_devices_of_their_host_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert [devices.choose_device(rank) for rank in (0, 3, 5)] == [torch.device("xpu", index) for index in (0, 3, 1)]
    assert devices.current_device() == XPU
    assert devices.is_available(torch.device("xpu"))
    assert not devices.is_available(torch.device("cuda"))


def test_ranks_use_the_cpu_beside_a_device_without_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apple's has one queue and no process group; training there went to the CPU before, and must go on to."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("mps"))
    assert devices.choose_device(0) is None
    assert devices.current_device() == CPU
    assert not link_for(torch.device("mps"), 1.0).runs_ahead


def test_devices_that_their_module_tells_apart_are_known_by_that(monkeypatch: pytest.MonkeyPatch) -> None:
    place = SimpleNamespace(uuid="b7", pci_domain_id=1, pci_bus_id=0x3B, pci_device_id=10)
    install(monkeypatch, 1, get_device_properties=lambda device: place)
    assert [gpus.probe_gpu(cast("Any", SimpleNamespace(local_rank=rank)), {}).gpu for rank in (0, 1)] == ["b7", "b7"]
    assert devices.pci_address(XPU) == "0001:3b:0a.0"


@pytest.mark.parametrize("functions", [{}, {"get_device_properties": lambda device: SimpleNamespace()}])
def test_devices_that_nobody_tells_apart_are_each_rank_s_own(
    functions: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that see one device each all call theirs 0: by index they would seem to share it."""
    install(monkeypatch, 1, **functions)
    first, second = (gpus.probe_gpu(cast("Any", SimpleNamespace(local_rank=rank)), {}) for rank in (0, 1))
    assert first.gpu != second.gpu
    assert gpus.backend_of([first, second], "auto") == ("cpu:gloo,xpu:xccl", [])
    bind(XPU, {})  # nor is there a place on the bus to be near to


@pytest.mark.parametrize(
    ("name", "use"),
    [("is_current_stream_capturing", devices.is_capturing), ("default_generators", devices.default_generator)],
)
def test_a_plug_in_that_lacks_a_function_is_refused_by_name(
    name: str, use: Callable[[torch.device], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, init=lambda: None)
    with pytest.raises(UnsupportedError, match=rf"for devices of the type `xpu` has no `torch\.xpu\.{name}`"):
        use(XPU)


def test_what_a_plug_in_tells_is_taken_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    own = [torch.Generator(), torch.Generator()]
    install(monkeypatch, init=lambda: None, is_current_stream_capturing=lambda: True, default_generators=own)
    assert devices.is_capturing(XPU)
    assert devices.default_generator(XPU) is own[1]


# --- host memory ------------------------------------------------------------------------------------------------------


def test_memory_is_registered_by_a_module_that_offers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = dict[int, int]()
    install(monkeypatch, host_register=pinned.__setitem__, host_unregister=pinned.pop)
    tensor = pinned_bytes(XPU, 5000)
    assert tensor.nbytes == 5000
    assert pinned == {tensor.data_ptr(): 8192}  # whole pages
    del tensor
    assert pinned == {}


def refuse(address: int, num_bytes: int) -> int:
    raise RuntimeError("too much is locked")


@pytest.mark.parametrize("register", [refuse, lambda address, num_bytes: 12])
def test_memory_that_a_driver_does_not_take_is_a_spent_budget(
    register: Callable[[int, int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, host_register=register, host_unregister=lambda address: None)
    assert Arena(None, partial(pinned_bytes, XPU)).take(100) is None


# --- backends ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def of_a_plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register a backend, as a plug-in does when it is imported."""
    known = {**dist.Backend.default_device_backend_map, "hpu": "hccl"}
    monkeypatch.setattr(dist.Backend, "default_device_backend_map", known)


@pytest.mark.usefixtures("of_a_plug_in")
@pytest.mark.parametrize(
    ("kind", "backend"),
    [("cpu", None), ("cuda", "nccl"), ("xpu", "xccl"), ("hpu", "hccl"), ("mps", None), ("mtia", None)],
)
def test_a_device_s_backend_is_the_one_that_is_registered(kind: str, backend: str | None) -> None:
    assert backends.backend_for(torch.device(kind)) == backend
    assert backends.uses_nccl(torch.device(kind)) == (kind == "cuda")


@pytest.mark.parametrize(
    ("config", "kind", "connects"),
    [
        ("cpu:gloo,cuda:nccl", "cuda", True),
        ("cuda:nccl", "cuda", True),
        ("cpu:gloo,cuda:gloo", "cuda", False),
        ("cpu:gloo,cuda:ucc", "cuda", False),
        ("cpu:gloo,cuda:nccl", "cpu", False),
        ("cpu:gloo,cuda:nccl", "xpu", False),
        ("cpu:gloo,xpu:xccl", "xpu", True),
    ],
)
def test_devices_are_connected_by_their_own_backend_alone(
    config: str, kind: str, connects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    group: Any = SimpleNamespace(_get_backend=lambda device: device.type)
    assert backends.connects(group, torch.device(kind)) == connects
    assert backends.carries_host_tensors(group) == config.startswith("cpu")
    connected = [each for each in config.replace(":", ",").split(",") if each in ("cuda", "xpu")]
    assert cast("Any", backends.device_backends(group)) == (connected if "nccl" in config or "xccl" in config else [])


@pytest.mark.usefixtures("of_a_plug_in")
def test_ranks_with_devices_that_nothing_connects_are_refused_by_name() -> None:
    own, other, none = (gpus.GpuInfo(name, kind) for name, kind in (("a", "hpu"), ("b", "hpu"), ("c", "mtia")))
    assert gpus.backend_of([own, other], "auto") == ("cpu:gloo,hpu:hccl", [])
    assert gpus.backend_of([none], "auto") == ("gloo", [])  # there is nobody to connect
    for infos, asked in (([none, none], "auto"), ([own, other], "gloo"), ([own, own], "auto"), ([own, none], "auto")):
        with pytest.raises(UnsupportedError, match="gloo takes no tensors of "):
            gpus.backend_of(infos, asked)


def test_only_nccl_has_the_options_the_variables_and_the_errors_of_nccl() -> None:
    assert backends.message_options("xccl", timedelta(seconds=1)) is None
    environ = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
    backends.refuse_one_queue(XPU, environ)
    with pytest.raises(UsageError):
        backends.refuse_one_queue(torch.device("cuda"), environ)
    assert backends.error_of(cast("Any", object())) is None
