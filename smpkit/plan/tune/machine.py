"""A machine as predictions see it: how fast ranks compute, copy and send, and how much they hold.

A collective over n ranks is taken as a ring: an all-reduce sends `2 (n - 1) / n` of its bytes through the slowest link
between neighbours, an all-gather and a reduce-scatter half of that, each in `n - 1` rounds (twice as many) of the
link's latency. Where a collective was measured, the latency and speed are those that fit its measurements best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final, Literal

from smpkit.config.words import suggestion
from smpkit.errors import UsageError
from smpkit.plan.offload.work import LinkSpeed
from smpkit.plan.speed import Speed
from smpkit.plan.tune.calibration import Calibration, HostLink
from smpkit.plan.tune.instances import INSTANCES

Operation = Literal["all_reduce", "all_gather", "reduce_scatter"]

_COMPUTE_REACHED: Final = 0.5
"""Of the published peak: Megatron-LM's 1F1B reached 52 % on A100 (arXiv 2104.04473)."""
_LINKS_REACHED: Final = 0.8
"""Of published rates of links."""
_LOCAL_LATENCY: Final = 10e-6
_REMOTE_LATENCY: Final = 30e-6
_UPDATE_BYTES: Final = 28
"""That AdamW moves per parameter: reads weight, gradient and two states, writes three of them."""


@dataclass(frozen=True)
class Channel:
    """A way between two ranks."""

    bytes_per_second: float
    latency_seconds: float = 0.0


@dataclass(frozen=True)
class Machine:
    """One kind of host, and how hosts are connected."""

    name: str
    source: str
    """Where the facts are from, in words."""
    ranks_per_host: int
    device_bytes: int
    """That a rank may fill; on a CPU its share of the host."""
    host_bytes: int
    """Of one host, which all of its ranks share."""
    speed: Speed
    """Of a rank in single precision; what communication takes depends on the degrees, and is not in it."""
    half_flops: float
    """What a rank reaches in half precision."""
    updates_per_second: float
    local: Channel
    """Between ranks of a host."""
    remote: Channel
    """Between hosts, for one rank while all ranks of its host send."""
    parallel_ranks: float
    """How many ranks of a host compute at full speed at the same time."""
    on_host: bool = False
    """Ranks compute on the host: there is nothing to offload to."""
    measured: Mapping[tuple[Operation, int], Channel] = field(default_factory=dict)
    """Of collectives, by operation and number of ranks of a host."""

    def flops(self, dtype: str | None) -> float:
        """Return what a rank reaches in this half precision; None: in single."""
        return self.speed.flops_per_second if dtype is None else self.half_flops

    def channel(self, hosts: int) -> Channel:
        """Return the way between ranks that are on so many hosts."""
        return self.local if hosts == 1 else self.remote

    def collective_seconds(self, operation: Operation, num_bytes: float, ranks: int, hosts: int) -> float:
        """Return how long a collective takes whose whole value has so many bytes."""
        if ranks < 2:
            return 0.0
        fitted = self.measured.get((operation, ranks)) if hosts == 1 else None
        channel = fitted or self.channel(hosts)
        rounds = (2 if operation == "all_reduce" else 1) * (ranks - 1)
        return rounds * (channel.latency_seconds + num_bytes / ranks / channel.bytes_per_second)


def published(instance_type: str, *, tflops: float | None = None) -> Machine:
    """Return what vendors publish of an instance type, less what is usually lost.

    Args:
        tflops: what a device reaches in training, where that is known.
    """
    name = instance_type if instance_type.startswith("ml.") else f"ml.{instance_type}"
    if name not in INSTANCES:
        valid = suggestion(name, INSTANCES) or f"known are {', '.join(INSTANCES)}"
        raise UsageError(
            f"no published facts of `{instance_type}` are known", hint=f"{valid}; or `smpkit calibrate` on one"
        )
    instance = INSTANCES[name]
    gpu = instance.accelerator
    if tflops is None and gpu.half_flops is None:
        raise UsageError(
            f"no source is known for what {gpu.name} of `{name}` computes per second",
            hint="give `--tflops`, or run `smpkit calibrate` on one and give its file as `--calibration`",
        )
    half = tflops * 1e12 if tflops is not None else _COMPUTE_REACHED * (gpu.half_flops or 0.0)
    single = tflops * 1e12 if tflops is not None else _COMPUTE_REACHED * (gpu.single_flops or 0.0)
    out = _LINKS_REACHED * gpu.link_bytes_per_second
    peer = _LINKS_REACHED * (gpu.peer_bytes_per_second or gpu.link_bytes_per_second)
    network = _LINKS_REACHED * instance.network_bits_per_second / 8 / instance.count
    return Machine(
        name=name,
        source=(
            f"vendor figures, assuming {_COMPUTE_REACHED:.0%} of peak compute and {_LINKS_REACHED:.0%} of link speed"
        ),
        ranks_per_host=instance.count,
        device_bytes=gpu.memory_bytes,
        host_bytes=instance.host_memory_bytes,
        speed=Speed(single, LinkSpeed(out, out)),
        half_flops=half,
        updates_per_second=gpu.memory_bytes_per_second / _UPDATE_BYTES,
        local=Channel(peer, _LOCAL_LATENCY),
        remote=Channel(network, _REMOTE_LATENCY),
        parallel_ranks=instance.count,
    )


def from_calibration(calibration: Calibration) -> Machine:
    """Return what was measured, as predictions use it: of matrix products the fastest size."""
    machine = calibration.machine
    on_host = machine.device_memory_bytes == 0
    rates: dict[str, float] = {}
    shared: dict[str, float] = {}
    for rate in calibration.matmul:
        if rate.flops_per_second > rates.get(rate.dtype, 0.0):
            rates[rate.dtype], shared[rate.dtype] = rate.flops_per_second, rate.shared_flops_per_second
    single = rates.get("float32") or max(rates.values())
    half = max((rates[name] for name in ("bfloat16", "float16") if name in rates), default=single)
    speed = min(1.0, max(shared[name] / rates[name] for name in rates))
    memory = calibration.memory_bytes_per_second / 2
    local = _fit([(message.num_bytes, message.seconds) for message in calibration.messages], rounds=1, share=1.0)
    local = local or Channel(memory)
    return Machine(
        name=machine.host,
        source=f"measured on `{machine.host}` ({machine.kind}) with {calibration.ranks} ranks",
        ranks_per_host=calibration.ranks,
        device_bytes=machine.device_memory_bytes or machine.memory_bytes // calibration.ranks,
        host_bytes=machine.memory_bytes,
        speed=Speed(
            single,
            link=_speed_of(calibration.link) if calibration.link else LinkSpeed(memory, memory),
            action_seconds=calibration.action_seconds,
            operation_seconds=calibration.operation_seconds,
            moved_bytes_per_second=calibration.elementwise_bytes_per_second or inf,
            is_asynchronous=not on_host,
            split_seconds=calibration.split_seconds,
        ),
        half_flops=half,
        updates_per_second=calibration.updates_per_second,
        local=local,
        remote=local,
        parallel_ranks=max(1.0, speed * calibration.ranks),
        on_host=on_host,
        measured=dict(_collectives(calibration)),
    )


def _speed_of(link: HostLink) -> LinkSpeed:
    """Return what each direction reaches while the other one copies, too, as they do in the middle of a step."""
    share = min(1.0, link.both_bytes_per_second / (link.out_bytes_per_second + link.back_bytes_per_second))
    return LinkSpeed(share * link.out_bytes_per_second, share * link.back_bytes_per_second, link.latency_seconds)


def _collectives(calibration: Calibration) -> dict[tuple[Operation, int], Channel]:
    measured: dict[tuple[Operation, int], list[tuple[float, float]]] = {}
    for op in calibration.collectives:
        measured.setdefault((op.operation, op.ranks), []).append((op.num_bytes, op.seconds))
    fitted = {}
    for (operation, ranks), points in measured.items():
        rounds = (2 if operation == "all_reduce" else 1) * (ranks - 1)
        if channel := _fit(points, rounds, share=1 / ranks):
            fitted[operation, ranks] = channel
    return fitted


def _fit(points: Sequence[tuple[float, float]], rounds: int, share: float) -> Channel | None:
    """Return the channel through which `rounds` rounds of a share of the bytes take the measured seconds.

    The smallest value says the latency, and the largest the speed.
    """
    if not points:
        return None
    few, many = min(points), max(points)
    latency = max(few[1] / rounds, 1e-9)
    if few == many:
        return Channel(max(few[0] * share / latency, 1.0))
    per_byte = max((many[1] - few[1]) / (many[0] - few[0]), 1e-15)
    return Channel(rounds * share / per_byte, latency)


def with_memory(machine: Machine, device_gib: float | None, host_gib: float | None) -> Machine:
    """Return the machine with other limits of memory, where they are given."""
    return replace(
        machine,
        device_bytes=machine.device_bytes if device_gib is None else int(device_gib * 2**30),
        host_bytes=machine.host_bytes if host_gib is None else int(host_gib * 2**30),
    )
