"""Names that libraries had when SMP v1's scripts were written, and have no longer.

Each is added to its module, once that has been imported, if it is missing there. Nothing here imports torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final

from smpkit.errors import UnsupportedError, UsageError

__all__ = ["ADDED", "add_to_datasets", "add_to_transformers", "load_metric"]

ADDED: Final = frozenset(
    {
        "datasets.load_metric",
        "transformers.file_utils.is_torch_tpu_available",
        "transformers.is_torch_tpu_available",
        "transformers.utils.is_torch_tpu_available",
    }
)
"""The names, with their modules."""


def add_to_transformers(module: ModuleType) -> None:
    """Add `is_torch_tpu_available` to transformers, or to one of its modules."""
    if not hasattr(module, "is_torch_tpu_available"):
        setattr(module, "is_torch_tpu_available", _is_torch_tpu_available)  # noqa: B010  modules do not declare it


def add_to_datasets(module: ModuleType) -> None:
    """Add `load_metric` to datasets."""
    if not hasattr(module, "load_metric"):
        setattr(module, "load_metric", load_metric)  # noqa: B010  modules do not declare it


def _is_torch_tpu_available(check_device: bool = True) -> bool:
    utils: Any = importlib.import_module("transformers.utils")
    return bool(utils.is_torch_xla_available(check_is_tpu=check_device))


def load_metric(path: str, config_name: str | None = None, *args: Any, **options: Any) -> Any:
    """Return `evaluate.load(...)` if that is installed; else a metric of ours, for `accuracy` and `glue`.

    Args:
        path: name of the metric.
        config_name: the task of GLUE.
        args, options: for `evaluate.load`; the metrics here need none.

    Raises:
        UnsupportedError: another metric, without `evaluate`.
        UsageError: no such task.
    """
    if importlib.util.find_spec("evaluate") is not None:
        return importlib.import_module("evaluate").load(path, config_name, *args, **options)
    if path == "accuracy":
        return _Metric("accuracy", _accuracy)
    if path != "glue":
        hint = "pip install evaluate"
        raise UnsupportedError(f"datasets.load_metric is gone, and `{path}` is none of accuracy and glue", hint=hint)
    if config_name not in _GLUE:
        raise UsageError(f"the task of glue must be one of {', '.join(sorted(_GLUE))}, got {config_name!r}")
    return _Metric(f"glue/{config_name}", _GLUE[config_name])


class _Metric:
    """Collects predictions and references, and computes.

    Args:
        name: for messages.
        function: of predictions and references.
    """

    def __init__(self, name: str, function: Callable[..., dict[str, float]]) -> None:
        self.name = name
        self._function = function
        self._predictions: list[float] = []
        self._references: list[float] = []

    def add(self, *, prediction: Any, reference: Any) -> None:
        """Add one prediction."""
        self.add_batch(predictions=[prediction], references=[reference])

    def add_batch(self, *, predictions: Any, references: Any) -> None:
        """Add a batch of predictions.

        Raises:
            UsageError: not as many references as predictions.
        """
        new, wanted = _numbers(predictions), _numbers(references)
        if len(new) != len(wanted):
            raise UsageError(f"{self.name} got {len(new)} predictions and {len(wanted)} references")
        self._predictions += new
        self._references += wanted

    def compute(self, *, predictions: Any = None, references: Any = None, **options: Any) -> dict[str, float]:
        """Return the values for all that was added and given, and forget it.

        Raises:
            UsageError: nothing was added, or options, which only `evaluate` knows.
        """
        if options:
            raise UsageError(f"{self.name} takes no {', '.join(options)} here", hint="pip install evaluate")
        if predictions is not None or references is not None:
            self.add_batch(predictions=predictions, references=references)
        if not self._predictions:
            raise UsageError(f"{self.name} got no predictions")
        result = self._function(self._predictions, self._references)
        self._predictions, self._references = [], []
        return result


def _numbers(values: Any) -> list[float]:
    """Return a list of numbers from a list, an array or a tensor."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
    listed: list[Any] = values.tolist() if hasattr(values, "tolist") else list(values)
    return [each.item() if hasattr(each, "item") else each for each in listed]


Numbers = Sequence[float]


def _accuracy(predictions: Numbers, references: Numbers) -> dict[str, float]:
    equal = sum(found == wanted for found, wanted in zip(predictions, references, strict=True))
    return {"accuracy": equal / len(references)}


def _accuracy_and_f1(predictions: Numbers, references: Numbers) -> dict[str, float]:
    both = sum(found == wanted == 1 for found, wanted in zip(predictions, references, strict=True))
    either = sum(found == 1 for found in predictions) + sum(wanted == 1 for wanted in references)
    return {**_accuracy(predictions, references), "f1": 2.0 * both / either if either else 0.0}


def _matthews(predictions: Numbers, references: Numbers) -> dict[str, float]:
    kinds = sorted({*predictions, *references})
    # The correlation of indicators, summed over the classes: for two classes, that of the numbers.
    covered = [
        _covariances([float(each == kind) for each in predictions], [float(each == kind) for each in references])
        for kind in kinds
    ]
    both, ours, theirs = (sum(each) for each in zip(*covered, strict=True))
    return {"matthews_correlation": both / (ours * theirs) ** 0.5 if ours and theirs else 0.0}


def _correlations(predictions: Numbers, references: Numbers) -> dict[str, float]:
    return {
        "pearson": _pearson(predictions, references),
        "spearmanr": _pearson(_ranks(predictions), _ranks(references)),
    }


def _pearson(first: Numbers, second: Numbers) -> float:
    both, ours, theirs = _covariances(first, second)
    return both / (ours * theirs) ** 0.5 if ours and theirs else float("nan")


def _covariances(first: Numbers, second: Numbers) -> tuple[float, float, float]:
    """Return the covariance and both variances, each times the number."""
    a, b = sum(first) / len(first), sum(second) / len(second)
    both = sum((x - a) * (y - b) for x, y in zip(first, second, strict=True))
    return both, sum((x - a) ** 2 for x in first), sum((y - b) ** 2 for y in second)


def _ranks(values: Numbers) -> list[float]:
    """Return each value's rank, equal values all with the mean of theirs."""
    first: dict[float, int] = {}
    last: dict[float, int] = {}
    for rank, value in enumerate(sorted(values)):
        first.setdefault(value, rank)
        last[value] = rank
    return [(first[value] + last[value]) / 2.0 for value in values]


_GLUE: Final = {
    **dict.fromkeys(("hans", "mnli", "mnli_matched", "mnli_mismatched", "qnli", "rte", "sst2", "wnli"), _accuracy),
    "cola": _matthews,
    "mrpc": _accuracy_and_f1,
    "qqp": _accuracy_and_f1,
    "stsb": _correlations,
}
