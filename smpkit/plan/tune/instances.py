"""What vendors publish of SageMaker's instance types: it serves where nothing was measured.

Only figures with a source are here, and a figure without one is None: then `smpkit calibrate` on such a machine, or an
option, has to say it. Where sources give products of half precision with sparsity only, dense ones are half of that.
Left out for want of a source: the throughput of dense matrix products on A10G, for which sources differ; Trainium and
Gaudi, on which the runtime has not run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["INSTANCES", "Accelerator", "Instance"]


@dataclass(frozen=True)
class Accelerator:
    """A GPU. Rates are peaks, per second and in one direction."""

    name: str
    memory_bytes: int
    half_flops: float | None
    """Dense products in half precision."""
    single_flops: float | None
    memory_bytes_per_second: float | None
    link_bytes_per_second: float
    """To the host."""
    peer_bytes_per_second: float | None
    """To the other GPUs of the host together; None: over the link to the host."""
    has_bfloat16: bool
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Instance:
    """An instance type."""

    accelerator: Accelerator
    count: int
    host_memory_bytes: int
    cores: int
    """Virtual processors."""
    network_bits_per_second: float
    sources: tuple[str, ...]


_GB: Final = 1e9
_GIB: Final = 2**30
_PCIE_3, _PCIE_4, _PCIE_5 = 16e9, 32e9, 64e9
"""Sixteen lanes, one direction."""

_NVIDIA: Final = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center"
_BATCH: Final = "https://docs.aws.amazon.com/batch/latest/userguide/gpu-jobs.html"
_P3: Final = "https://aws.amazon.com/blogs/aws/new-amazon-ec2-instances-with-up-to-8-nvidia-tesla-v100-gpus-p3/"
_P4: Final = "https://aws.amazon.com/blogs/compute/amazon-ec2-p4d-instances-deep-dive/"
_TORCHX: Final = "https://pytorch.org/torchx/main/_modules/torchx/specs/named_resources_aws.html"
_P5: Final = "https://agenticdaily.ai/articles/aws-maps-open-source-ml-stack-to-its-accelerated-instances"

_VANTAGE: Final = "https://github.com/tsaol/aws-gpu/blob/main/data"
"""Tables made from instances.vantage.sh, which has what EC2's own interface tells."""

_V100: Final = Accelerator(
    "NVIDIA V100 16 GB", 16 * _GIB, 125e12, 15.7e12, 897 * _GB, _PCIE_3, 150 * _GB, False,
    (_P3, "https://sysrqmts.com/gpus/compare/nvidia-tesla-t4-vs-nvidia-tesla-v100-sxm3-32-gb"),
)  # fmt: skip
_V100_4: Final = Accelerator(
    _V100.name, _V100.memory_bytes, 125e12, 15.7e12, 897 * _GB, _PCIE_3, 100 * _GB, False, _V100.sources
)
_A100: Final = Accelerator(
    "NVIDIA A100 40 GB", 40 * _GIB, 312e12, 19.5e12, 1555 * _GB, _PCIE_4, 300 * _GB, True,
    (f"{_NVIDIA}/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf",
     "https://glennklockwood.com/garden/processors/A100"),
)  # fmt: skip
_H100: Final = Accelerator(
    "NVIDIA H100 80 GB", 80 * _GIB, 989.4e12, 66.9e12, 3350 * _GB, _PCIE_5, 450 * _GB, True,
    ("https://glennklockwood.com/garden/processors/h100", _P5),
)  # fmt: skip
_A100_80: Final = Accelerator(
    "NVIDIA A100 80 GB", 80 * _GIB, 312e12, 19.5e12, 2039 * _GB, _PCIE_4, 300 * _GB, True,
    ("https://glennklockwood.com/garden/processors/A100",
     "https://www.thundercompute.com/blog/nvidia-a100-specs-full-guide"),
)  # fmt: skip
_H200: Final = Accelerator(
    "NVIDIA H200 141 GB", 141 * int(_GB), 989.4e12, 66.9e12, 4800 * _GB, _PCIE_5, 450 * _GB, True,
    ("https://lzwjava.github.io/nvidia-h200-gpu-specs-en", *_H100.sources),
)  # fmt: skip
"""It computes as an H100 does."""
_L4: Final = Accelerator(
    "NVIDIA L4", 24 * _GIB, 121e12, 30.3e12, 300 * _GB, _PCIE_4, None, True,
    ("https://grokipedia.com/page/NVIDIA_L4_vs_L40S",
     "https://fpsbench.com/compare/gpu/nvidia-l4-vs-nvidia-tesla-m40"),
)  # fmt: skip
_T4: Final = Accelerator(
    "NVIDIA T4", 16 * _GIB, 65.1e12, 8.1e12, 320 * _GB, _PCIE_3, None, False,
    ("https://sysrqmts.com/gpus/compare/nvidia-a100-sxm4-40-gb-vs-nvidia-tesla-t4",),
)  # fmt: skip
_A10G: Final = Accelerator(
    "NVIDIA A10G", 24 * _GIB, None, None, 600 * _GB, _PCIE_4, None, True,
    ("https://www.baseten.co/blog/nvidia-a10-vs-a10g-for-ml-model-inference/",),
)  # fmt: skip


def _of(kind: Accelerator, count: int, memory_gib: int, cores: int, gigabits: float, source: str) -> Instance:
    return Instance(kind, count, memory_gib * _GIB, cores, gigabits * 1e9, (source, *kind.sources))


INSTANCES: Final[Mapping[str, Instance]] = {
    "ml.p3.2xlarge": _of(_V100, 1, 61, 8, 10, _P3),
    "ml.p3.8xlarge": _of(_V100_4, 4, 244, 32, 10, _P3),
    "ml.p3.16xlarge": _of(_V100, 8, 488, 64, 25, _P3),
    "ml.p4d.24xlarge": _of(_A100, 8, 1100, 96, 400, _P4),
    "ml.p4de.24xlarge": _of(_A100_80, 8, 1152, 96, 400, f"{_VANTAGE}/p4de_instances.js"),
    "ml.p5.48xlarge": Instance(_H100, 8, 2048 * _GIB, 192, 3200e9, (_P5, _TORCHX, *_H100.sources)),
    "ml.p5en.48xlarge": _of(_H200, 8, 2048, 192, 3200, f"{_VANTAGE}/p5en_instances.js"),
    "ml.g4dn.xlarge": _of(_T4, 1, 16, 4, 25, _BATCH),
    "ml.g4dn.2xlarge": _of(_T4, 1, 32, 8, 25, _BATCH),
    "ml.g4dn.4xlarge": _of(_T4, 1, 64, 16, 25, _BATCH),
    "ml.g4dn.8xlarge": _of(_T4, 1, 128, 32, 50, _BATCH),
    "ml.g4dn.12xlarge": _of(_T4, 4, 192, 48, 50, _BATCH),
    "ml.g4dn.16xlarge": _of(_T4, 1, 256, 64, 50, _BATCH),
    "ml.g5.xlarge": _of(_A10G, 1, 16, 4, 10, _BATCH),
    "ml.g5.2xlarge": _of(_A10G, 1, 32, 8, 10, _BATCH),
    "ml.g5.4xlarge": _of(_A10G, 1, 64, 16, 25, _BATCH),
    "ml.g5.8xlarge": _of(_A10G, 1, 128, 32, 25, _BATCH),
    "ml.g5.12xlarge": _of(_A10G, 4, 192, 48, 40, _BATCH),
    "ml.g5.16xlarge": _of(_A10G, 1, 256, 64, 25, _BATCH),
    "ml.g5.24xlarge": _of(_A10G, 4, 384, 96, 50, _BATCH),
    "ml.g5.48xlarge": _of(_A10G, 8, 768, 192, 100, _BATCH),
    "ml.g6.xlarge": _of(_L4, 1, 16, 4, 10, _BATCH),
    "ml.g6.2xlarge": _of(_L4, 1, 32, 8, 10, _BATCH),
    "ml.g6.4xlarge": _of(_L4, 1, 64, 16, 25, _BATCH),
    "ml.g6.8xlarge": _of(_L4, 1, 128, 32, 25, _BATCH),
    "ml.g6.12xlarge": _of(_L4, 4, 192, 48, 40, f"{_VANTAGE}/g6_instances.js"),
    "ml.g6.16xlarge": _of(_L4, 1, 256, 64, 25, _BATCH),
    "ml.g6.24xlarge": _of(_L4, 4, 384, 96, 50, f"{_VANTAGE}/g6_instances.js"),
    "ml.g6.48xlarge": _of(_L4, 8, 768, 192, 100, f"{_VANTAGE}/g6_instances.js"),
}
"""By the name in `compute.instance_type`."""
