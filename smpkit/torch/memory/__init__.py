"""Choose for each layer whether its activations stay, leave, or are recomputed: `fit(model, device_gib=...)`.

::

    callbacks.py ─► fitted.py ────┐                  one process, any trainer
                                  ├─► chooser.py     what each step is for
                    automatic.py ─┘      │           a DistributedModel: all ranks of a job
                                         ├─► measure.py, graphs.py, updates.py
                                         └─► facts.py    what was measured, and its best choice

The choice is that of `smpkit.plan.tune`, recomputation `smpkit.torch.recompute`'s, and the copies are those of
`smpkit.torch.offload`.
"""

from smpkit.torch.memory.callbacks import lightning_callback, trainer_callback
from smpkit.torch.memory.fitted import FitReport, Fitted, LayerFit, fit

__all__ = ["FitReport", "Fitted", "LayerFit", "fit", "lightning_callback", "trainer_callback"]
