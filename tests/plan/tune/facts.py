"""Facts of an imaginary machine, as `smpkit calibrate` writes them."""

from __future__ import annotations

from typing import Any

MACHINE = {
    "host": "lab",
    "processor": "Some CPU",
    "cores": 4,
    "memory_bytes": 64 << 30,
    "device": "Some GPU",
    "devices": 4,
    "device_memory_bytes": 16 << 30,
}


def facts(**changes: Any) -> dict[str, Any]:
    """Return the content of a calibration; `changes` are of its top level."""
    matmul = {"dtype": "float32", "size": 1024, "flops_per_second": 10e12, "shared_flops_per_second": 10e12}
    collectives = [
        {"operation": "all_reduce", "ranks": 4, "num_bytes": size, "seconds": 6e-6 + 1.5 * size / 30e9}
        for size in (4096, 1 << 24)
    ]
    return {
        "format": 1,
        "machine": MACHINE,
        "ranks": 4,
        "seconds": 60.0,
        "matmul": [matmul, {**matmul, "dtype": "bfloat16", "flops_per_second": 40e12}],
        "memory_bytes_per_second": 1e12,
        "link": {
            "out_bytes_per_second": 20e9,
            "back_bytes_per_second": 22e9,
            "both_bytes_per_second": 30e9,
            "latency_seconds": 1e-5,
        },
        "messages": [{"num_bytes": size, "seconds": 2e-6 + size / 10e9} for size in (4096, 1 << 24)],
        "collectives": collectives,
        "updates_per_second": 1e9,
        **changes,
    }
