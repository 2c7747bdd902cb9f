"""OffloadModel and its optimizer: train models larger than the device, one slice of layers at a time.

::

    model.py ─► chain.py            cuts a model into slices; huggingface.py: models that are not nn.Sequential
        └────► engine.py ─► weights.py             one flat host buffer per slice, two on the device
                  │    ├──► gradients.py           the way back: two device buffers, host buffers
                  │    ├──► activation_offload.py  tensors at slice boundaries
                  │    └──► counted_link.py        copies and the bytes they move
                  └──► forward_pass.py             one forward and its backward, slice by slice
    optimizer.py ─► optimizer_state.py ─► kernels.py ─► compiled.py    updates on the CPU, in threads
"""

from smpkit.torch.offload_model.model import OffloadModel
from smpkit.torch.offload_model.optimizer import OffloadOptimizer

__all__ = ["OffloadModel", "OffloadOptimizer"]
