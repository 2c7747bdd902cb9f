"""`trainer_callback(device_gib=...)`: `fit` for Hugging Face's Trainer, from the beginning of training to its end."""

from __future__ import annotations

from typing import Any

from smpkit.errors import UsageError
from smpkit.torch.memory.fitted import Fitted, fit

__all__ = ["trainer_callback"]


def trainer_callback(**options: Any) -> Any:
    """Return a callback for `transformers.Trainer` that fits the model when training begins.

    ::

        from smpkit.torch.memory import trainer_callback

        fits = trainer_callback(device_gib=24)
        Trainer(model, args, train_dataset=data, callbacks=[fits]).train()

    Its attribute `fitted` has the report. `TrainingArguments(gradient_checkpointing=...)` must be off.

    Args:
        options: those of `fit`.

    Raises:
        UsageError: transformers is not installed.
    """
    try:
        from transformers import TrainerCallback
    except ImportError:
        raise UsageError("trainer_callback needs transformers", hint="pip install transformers") from None

    class FitCallback(TrainerCallback):
        fitted: Fitted | None = None

        def on_train_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
            self.fitted = fit(model, **options)

        def on_train_end(self, *_: Any, **__: Any) -> None:
            if self.fitted is not None:
                self.fitted.remove()

    return FitCallback()
