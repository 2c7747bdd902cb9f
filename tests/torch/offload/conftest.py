"""Every test of offloading also tests that storages go from state to state as `saved_storage.py` draws it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest

from smpkit.torch.offload import saved_storage
from smpkit.torch.offload.saved_storage import BACK, COPYING, DEAD, HOST, LIVE, LOADING, SavedStorage

_EARLIER: Final = {
    COPYING: LIVE,
    HOST: COPYING | LOADING | BACK,
    LOADING: HOST,
    BACK: LOADING,
    DEAD: LIVE | COPYING | HOST | LOADING | BACK,
}
_NAMES: Final = {value: name for name, value in vars(saved_storage).items() if name.isupper()}


@pytest.fixture(autouse=True)
def _states_follow_the_diagram(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    slot: Any = vars(SavedStorage)["state"]
    refused = list[str]()  # not raised: Python swallows what destructors raise

    def enter(saved: SavedStorage, state: int) -> None:
        before = getattr(saved, "state", None)
        if not (state == LIVE if before is None else _EARLIER.get(state, 0) & before):
            refused.append(f"from {'nothing' if before is None else _NAMES[before]} to {_NAMES[state]}")
        slot.__set__(saved, state)

    monkeypatch.setattr(SavedStorage, "state", property(slot.__get__, enter))
    yield
    assert not refused
