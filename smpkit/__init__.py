"""smpkit: SageMaker model-parallel v1, open and on today's PyTorch.

Public names are loaded when first used, so `import smpkit` costs nothing: it imports neither torch nor boto3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smpkit.on_demand import names_on_demand

if TYPE_CHECKING:
    from smpkit.config.distribution import Distribution
    from smpkit.config.job import JobConfig
    from smpkit.config.modelparallel import ModelParallelConfig
    from smpkit.torch.memory import fit
    from smpkit.torch.offload_model import OffloadModel, OffloadOptimizer
    from smpkit.torch.offloading import offload_activations
    from smpkit.version import __version__
    from smpkit_estimator.arguments import FileSystemInput, TrainingInput
    from smpkit_estimator.estimator import Estimator

__all__ = [
    "Distribution",
    "Estimator",
    "FileSystemInput",
    "JobConfig",
    "ModelParallelConfig",
    "OffloadModel",
    "OffloadOptimizer",
    "TrainingInput",
    "__version__",
    "fit",
    "offload_activations",
]

_MODULES = {
    "Distribution": "smpkit.config.distribution",
    "Estimator": "smpkit_estimator.estimator",
    "FileSystemInput": "smpkit_estimator.arguments",
    "JobConfig": "smpkit.config.job",
    "ModelParallelConfig": "smpkit.config.modelparallel",
    "OffloadModel": "smpkit.torch.offload_model",
    "OffloadOptimizer": "smpkit.torch.offload_model",
    "TrainingInput": "smpkit_estimator.arguments",
    "__version__": "smpkit.version",
    "fit": "smpkit.torch.memory",
    "offload_activations": "smpkit.torch.offloading",
}

__getattr__ = names_on_demand(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted(__all__)
