"""Output collectors: what Hugging Face models collect by hooks (hidden states, attentions, router logits).

Their layers do not return it: hooks put it into lists that the model's forward has opened. Over a pipeline they run
where the layer runs, so the lists would fill on its rank alone, and a loss made of them (of router logits, say) would
miss what other ranks hold. So a placed call returns, beside its result, what it has added to the lists, and every rank
adds that to its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

__all__ = ["Collectors", "active_collectors", "add_collected", "collector_key", "returning_collected"]

_MODULE: Final = "transformers.utils.output_capturing"

Collectors = dict[str, Any]
"""By kind of output, a list; beside them settings, under names that begin with an underscore."""


def active_collectors() -> Callable[[], Collectors | None]:
    """Return a function that returns the active collectors; None: there are none."""
    active: Any = getattr(sys.modules.get(_MODULE), "_active_collector", None)
    return _never if active is None else active.get


def _never() -> None:
    return None


def collector_key(collectors: Collectors) -> tuple[Any, ...]:
    """Return what decides which outputs a call adds: the kinds wanted, how many there are, which ones are kept."""
    return tuple(
        (key, len(kept) if isinstance(kept, list) else tuple(sorted(kept))) for key, kept in collectors.items()
    )


def returning_collected(collectors: Collectors, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes what `function` adds to the lists off them, and returns it with the result."""

    def called(*args: Any, **kwargs: Any) -> tuple[Any, dict[str, tuple[Any, ...]]]:
        counts = {key: len(kept) for key, kept in collectors.items() if isinstance(kept, list)}
        output = function(*args, **kwargs)
        collected = {key: tuple(collectors[key][count:]) for key, count in counts.items()}
        for key, count in counts.items():
            del collectors[key][count:]
        return output, collected

    return called


def add_collected(collectors: Collectors, returned: tuple[Any, dict[str, tuple[Any, ...]]]) -> Any:
    """Add to the lists what `returning_collected` took off them; return the result."""
    output, collected = returned
    for key, parts in collected.items():
        collectors[key].extend(parts)
    return output
