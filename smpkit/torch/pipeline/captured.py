"""What Hugging Face models collect by hooks (hidden states, attentions, router logits) crosses ranks with the result.

Their layers do not return it: hooks put it into lists that the model's forward has opened. Over a pipeline they run
where the layer runs, so the lists would fill on its rank alone, and a loss made of them (of router logits, say) would
miss what other ranks hold. So a placed call returns, beside its result, what it has added to the lists, and every rank
adds that to its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

__all__ = ["Lists", "lists_that_fill", "mode_of", "parts_added", "with_added"]

_MODULE: Final = "transformers.utils.output_capturing"

Lists = dict[str, Any]
"""By kind of output, a list; beside them settings, under names that begin with an underscore."""


def lists_that_fill() -> Callable[[], Lists | None]:
    """Return a function that returns the lists which hooks fill now; None: nobody wants any."""
    active: Any = getattr(sys.modules.get(_MODULE), "_active_collector", None)
    return _never if active is None else active.get


def _never() -> None:
    return None


def mode_of(lists: Lists) -> tuple[Any, ...]:
    """Return what decides which parts a call adds: the kinds wanted, how many there are, which ones are kept."""
    return tuple((key, len(kept) if isinstance(kept, list) else tuple(sorted(kept))) for key, kept in lists.items())


def with_added(lists: Lists, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes what `function` adds to the lists off them, and returns it with the result."""

    def called(*args: Any, **kwargs: Any) -> tuple[Any, dict[str, tuple[Any, ...]]]:
        counts = {key: len(kept) for key, kept in lists.items() if isinstance(kept, list)}
        output = function(*args, **kwargs)
        added = {key: tuple(lists[key][count:]) for key, count in counts.items()}
        for key, count in counts.items():
            del lists[key][count:]
        return output, added

    return called


def parts_added(lists: Lists, returned: tuple[Any, dict[str, tuple[Any, ...]]]) -> Any:
    """Add to the lists what `with_added` took off them; return the result."""
    output, added = returned
    for key, parts in added.items():
        lists[key].extend(parts)
    return output
