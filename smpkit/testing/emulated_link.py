"""A link between "device" and host memory for the CPU, with the bandwidth, latency and jitter that a test asks for."""

from __future__ import annotations

from smpkit.torch.offload.emulated import EmulatedLink

__all__ = ["EmulatedLink"]
