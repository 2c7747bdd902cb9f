"""`fit(model, device_gib=...)`: choose for each layer whether its activations stay, leave, or are recomputed.

::

    callbacks.py ─► fitted.py ─► measure.py  what a layer takes and holds
                             └─► graphs.py   which forwards still have a backward to come

The choice is `smpkit.plan.tune.chain`'s, recomputation `smpkit.torch.recompute`'s, and the copies are those of
`smpkit.torch.offload`.
"""

from smpkit.torch.memory.callbacks import trainer_callback
from smpkit.torch.memory.fitted import FitReport, Fitted, LayerFit, fit

__all__ = ["FitReport", "Fitted", "LayerFit", "fit", "trainer_callback"]
