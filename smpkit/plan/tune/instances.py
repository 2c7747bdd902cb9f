"""What vendors publish of SageMaker's instance types: it serves where nothing was measured.

Rates of accelerators are those of NVIDIA's data sheets, dense products where a sheet has those with sparsity only;
hosts and networks those of AWS's pages on EC2 instance types. A figure without a source is None: then `smpkit
calibrate` on such a machine, or an option, has to say it. Left out for want of a source: dense matrix products of A10G,
for which sources differ; Trainium and Gaudi, on which the runtime has not run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_GB: Final = 1e9
_GIB: Final = 2**30
_PCIE_3, _PCIE_4, _PCIE_5 = 16e9, 32e9, 64e9
"""Sixteen lanes, one direction."""


@dataclass(frozen=True)
class Accelerator:
    """A GPU. Rates are peaks, per second and in one direction."""

    name: str
    memory_bytes: int
    half_flops: float | None
    """Dense products in half precision."""
    single_flops: float | None
    memory_bytes_per_second: float
    link_bytes_per_second: float
    """To the host."""
    peer_bytes_per_second: float | None = None
    """To the other GPUs of the host together; None: over the link to the host."""

    @property
    def model(self) -> str:
        """Its name without maker and memory: `A100`."""
        return self.name.split()[1]


@dataclass(frozen=True)
class Instance:
    """An instance type."""

    accelerator: Accelerator
    count: int
    host_memory_bytes: int
    network_bits_per_second: float


_V100: Final = Accelerator("NVIDIA V100 16 GB", 16 * _GIB, 125e12, 15.7e12, 897 * _GB, _PCIE_3, 150 * _GB)
_V100_OF_4: Final = Accelerator("NVIDIA V100 16 GB", 16 * _GIB, 125e12, 15.7e12, 897 * _GB, _PCIE_3, 100 * _GB)
_A100: Final = Accelerator("NVIDIA A100 40 GB", 40 * _GIB, 312e12, 19.5e12, 1555 * _GB, _PCIE_4, 300 * _GB)
_A100_80: Final = Accelerator("NVIDIA A100 80 GB", 80 * _GIB, 312e12, 19.5e12, 2039 * _GB, _PCIE_4, 300 * _GB)
_H100: Final = Accelerator("NVIDIA H100 80 GB", 80 * _GIB, 989.4e12, 66.9e12, 3350 * _GB, _PCIE_5, 450 * _GB)
_H200: Final = Accelerator("NVIDIA H200 141 GB", 141 * 10**9, 989.4e12, 66.9e12, 4800 * _GB, _PCIE_5, 450 * _GB)
_T4: Final = Accelerator("NVIDIA T4", 16 * _GIB, 65.1e12, 8.1e12, 320 * _GB, _PCIE_3)
_L4: Final = Accelerator("NVIDIA L4", 24 * _GIB, 121e12, 30.3e12, 300 * _GB, _PCIE_4)
_A10G: Final = Accelerator("NVIDIA A10G", 24 * _GIB, None, None, 600 * _GB, _PCIE_4)

_TYPES: Final = (
    # GPUs, GiB of the host's memory, Gbit/s of its network
    ("p3.2xlarge", _V100, 1, 61, 10),
    ("p3.8xlarge", _V100_OF_4, 4, 244, 10),
    ("p3.16xlarge", _V100, 8, 488, 25),
    ("p4d.24xlarge", _A100, 8, 1152, 400),
    ("p4de.24xlarge", _A100_80, 8, 1152, 400),
    ("p5.48xlarge", _H100, 8, 2048, 3200),
    ("p5en.48xlarge", _H200, 8, 2048, 3200),
    ("g4dn.xlarge", _T4, 1, 16, 25),
    ("g4dn.2xlarge", _T4, 1, 32, 25),
    ("g4dn.4xlarge", _T4, 1, 64, 25),
    ("g4dn.8xlarge", _T4, 1, 128, 50),
    ("g4dn.12xlarge", _T4, 4, 192, 50),
    ("g4dn.16xlarge", _T4, 1, 256, 50),
    ("g5.xlarge", _A10G, 1, 16, 10),
    ("g5.2xlarge", _A10G, 1, 32, 10),
    ("g5.4xlarge", _A10G, 1, 64, 25),
    ("g5.8xlarge", _A10G, 1, 128, 25),
    ("g5.12xlarge", _A10G, 4, 192, 40),
    ("g5.16xlarge", _A10G, 1, 256, 25),
    ("g5.24xlarge", _A10G, 4, 384, 50),
    ("g5.48xlarge", _A10G, 8, 768, 100),
    ("g6.xlarge", _L4, 1, 16, 10),
    ("g6.2xlarge", _L4, 1, 32, 10),
    ("g6.4xlarge", _L4, 1, 64, 25),
    ("g6.8xlarge", _L4, 1, 128, 25),
    ("g6.12xlarge", _L4, 4, 192, 40),
    ("g6.16xlarge", _L4, 1, 256, 25),
    ("g6.24xlarge", _L4, 4, 384, 50),
    ("g6.48xlarge", _L4, 8, 768, 100),
)
INSTANCES: Final[Mapping[str, Instance]] = {
    f"ml.{name}": Instance(gpu, count, gib * _GIB, gigabits * 1e9) for name, gpu, count, gib, gigabits in _TYPES
}
"""By the name in `compute.instance_type`."""


_SLOWER_CARDS: Final = frozenset({"V100", "H100", "H200"})
"""Models whose PCIe and NVL cards compute less than the modules that instances have; A100's compute as much."""


def published_flops(device: str, half: str | None) -> tuple[str, float] | None:
    """Return the model and the peak of an accelerator, in half precision or (None) single; None: it is not known here.

    Args:
        device: its name, such as `NVIDIA A100-SXM4-40GB`.
    """
    words = set(re.split(r"[\s-]+", device))
    if words & {"PCIe", "PCIE", "NVL"}:
        words -= _SLOWER_CARDS
    for instance in INSTANCES.values():
        gpu = instance.accelerator
        flops = gpu.single_flops if half is None else gpu.half_flops
        if gpu.model in words and flops is not None:
            return gpu.model, flops
    return None
