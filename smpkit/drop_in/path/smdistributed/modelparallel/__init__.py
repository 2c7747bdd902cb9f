"""SMP v1's package: `import smdistributed.modelparallel.torch as smp` gives the API of `smpkit.torch`."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "1.15.0"
"""The last release of SMP v1, whose API this is: scripts compare it, and some join its digits. Not smpkit's own."""
