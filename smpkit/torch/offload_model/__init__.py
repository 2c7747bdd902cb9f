"""OffloadModel and its optimizer: train models larger than the device, one slice of layers at a time."""

from smpkit.torch.offload_model.model import OffloadModel
from smpkit.torch.offload_model.optimizer import OffloadOptimizer

__all__ = ["OffloadModel", "OffloadOptimizer"]
