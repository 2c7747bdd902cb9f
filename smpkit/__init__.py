"""smpkit: SageMaker model-parallel v1, open and on today's PyTorch.

Public names are loaded when first used, so `import smpkit` costs nothing: it imports neither torch nor boto3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smpkit.config.distribution import Distribution
    from smpkit.config.job import JobConfig
    from smpkit.config.modelparallel import ModelParallelConfig

__version__ = "0.1.0"

__all__ = ["Distribution", "JobConfig", "ModelParallelConfig", "__version__"]

_HOMES = {
    "Distribution": "smpkit.config.distribution",
    "JobConfig": "smpkit.config.job",
    "ModelParallelConfig": "smpkit.config.modelparallel",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'smpkit' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
