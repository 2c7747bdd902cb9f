"""Tensor parallelism: one module's weights over several ranks that each bring their own samples (or share them)."""
