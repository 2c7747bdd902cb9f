"""OffloadModel and its optimizer: train models larger than the device, one slice of layers at a time.

Parameters rest on the host. While a slice computes, `parameter.data` is a view of a device buffer, and autograd does
the rest in its own order, which is slice by slice: of all nodes that are ready, it runs the one made last::

    forward    load 0, enter 0 · load 1, run 0 · leave 0, enter 1 · load 2, run 1 · ...
    backward   enter 2, load 1 · gradients of 2 go home, leave 2, enter 1 · load 0 · ...

    model.py ──► slices.py   which layers and parameters are together, and where they lie on the host
        └──────► engine.py   load, enter, leave, begin_backward, finish: two device buffers, copies, events
    optimizer.py ──► engine.py   any of torch's rules, slice by slice, in a thread
"""

from smpkit.torch.offload_model.model import OffloadModel
from smpkit.torch.offload_model.optimizer import OffloadOptimizer

__all__ = ["OffloadModel", "OffloadOptimizer"]
