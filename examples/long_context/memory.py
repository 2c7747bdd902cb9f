"""The most memory that training took: asked of the GPU, or of Linux where the CPU is the device."""

from pathlib import Path

import torch

STATUS = Path("/proc/self/status")


class Peak:
    """Counts from where it is made."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
            self.before = held("VmRSS")

    def device_bytes(self, host: int) -> int:
        """Return the peak; a CPU's memory is the device's and the host's, so what waited on the host is taken off."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return held("VmHWM") - self.before - host


def held(name: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024
