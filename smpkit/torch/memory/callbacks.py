"""`fit` for the trainers of Hugging Face and Lightning, from the beginning of training to its end."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from smpkit.errors import UsageError
from smpkit.torch.memory.fitted import Fitted, fit

__all__ = ["lightning_callback", "trainer_callback"]


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


def lightning_callback(**options: Any) -> Any:
    """Return a callback for Lightning's `Trainer` that fits the module when training begins.

    ::

        from smpkit.torch.memory import lightning_callback

        fits = lightning_callback(device_gib=24)
        lightning.Trainer(callbacks=[fits]).fit(module, loader)

    Its attribute `fitted` has the report. A step is a call of `training_step`, which Lightning may make without the
    module's `forward`. A checkpoint of the trainer holds the choices, so that a resumed run takes them at once.

    Args:
        options: those of `fit`.

    Raises:
        UsageError: neither `lightning` nor `pytorch_lightning` is installed.
    """

    class FitCallback(_lightning_callback_type()):  # type: ignore[misc]  # known only when it runs
        fitted: Fitted | None = None
        saved: dict[str, str] | None = None

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002 - Lightning's signature
            self.fitted = fit(pl_module, **options)
            if self.saved:
                self.fitted.load_state_dict(self.saved)
            pl_module.training_step = self.fitted.as_forward(pl_module.training_step)

        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002 - Lightning's signature
            if self.fitted is not None:
                del pl_module.training_step  # the method of the class shows again
                self.fitted.remove()

        def state_dict(self) -> dict[str, Any]:
            return {} if self.fitted is None or not self.fitted.has_chosen else self.fitted.state_dict()

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.saved = state_dict
            if self.fitted is not None and state_dict:
                self.fitted.load_state_dict(state_dict)

    return FitCallback()


def _lightning_callback_type() -> Any:
    for package in ("lightning.pytorch", "pytorch_lightning"):
        if importlib.util.find_spec(package.partition(".")[0]) is not None:
            return importlib.import_module(package).Callback
    raise UsageError("lightning_callback needs Lightning", hint="pip install lightning")
