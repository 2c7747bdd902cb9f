"""Apex's helpers from before apex.amp, which are not here."""

raise ImportError('apex.fp16_utils is not here: use `"fp16": true` in the model-parallel parameters, or torch.autocast')
