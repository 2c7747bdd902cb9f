"""Choose for each layer whether its activations stay, leave, or are recomputed: `fit(model, device_gib=...)`.

::

    fitted.py, one process ─────┐
                                ├─► chooser.py, what each step is for, and the best choice ─► measure.py, one step
    automatic.py, all ranks ────┘

The choice is that of `smpkit.plan.tune`, recomputation `smpkit.torch.recompute`'s, and the copies are those of
`smpkit.torch.offload`.
"""

from smpkit.torch.memory.fitted import FitReport, Fitted, LayerFit, fit

__all__ = ["FitReport", "Fitted", "LayerFit", "fit"]
