"""Activations leave the device after forward and are back before backward needs them.

::

    public.py ─► engine.py ─► hooks.py          saved-tensor hooks: pack to a handle, unpack to the tensor
                     ├──────► saved_storage.py  one saved storage: where its bytes are
                     ├──────► prefetch.py       the order of backward, and how far ahead loads are issued
                     ├──────► arena.py          host memory
                     ├──────► report.py         what was moved, held and waited for
                     └──────► link.py           copies and events: accelerator.py, or emulated.py on any machine
"""

from smpkit.torch.offload.public import activations

__all__ = ["activations"]
