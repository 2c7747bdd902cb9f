"""Activations leave the device after forward and are back before backward needs them.

::

    public.py ─► build.py ─► engine.py ─► scope.py     hooks: what is saved becomes a handle, and the tensor again
                                 ├──────► departures.py  the way out;  arrivals.py: the way back
                                 ├──────► record.py    one storage: where its bytes are
                                 ├──────► prefetch.py  what backward needs next;  pace.py: how early to load it
                                 ├──────► arena.py     host memory
                                 └──────► link.py      copies and events: cuda.py, or emulated.py on any machine
"""

from smpkit.torch.offload.public import activations

__all__ = ["activations"]
