"""Activations leave the device after forward and are back before backward needs them.

::

    public.py ─► build.py ─► engine.py ─► scope.py     saved-tensor hooks: pack to a handle, unpack to the tensor
                                 ├──────► departures.py  copies to the host;  arrivals.py: back
                                 ├──────► record.py    one saved storage: where its bytes are
                                 ├──────► prefetch.py  the order of backward;  pace.py: tunes the lead
                                 ├──────► arena.py     host memory
                                 └──────► link.py      copies and events: cuda.py, or emulated.py on any machine
"""

from smpkit.torch.offload.public import activations

__all__ = ["activations"]
