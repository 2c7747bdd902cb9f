"""Back ends are found by name."""

from __future__ import annotations

import pytest

from smpkit.errors import UsageError
from smpkit_estimator.backend import OWN, open_backend


@pytest.mark.parametrize(
    ("name", "hint"), [("sagemkaer", "did you mean `sagemaker`?"), ("xyz", f"those are {', '.join(OWN)}")]
)
def test_an_unknown_name_is_refused_with_the_known_ones(name: str, hint: str) -> None:
    with pytest.raises(UsageError, match=f"`{name}` is no back end") as caught:
        open_backend(name)
    assert caught.value.hint == hint
