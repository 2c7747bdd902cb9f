"""What the property tests share: settings for a busy machine, and values of every shape."""

from __future__ import annotations

import datetime as dt
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

# No deadline per example: on a machine that runs other things a slow example says nothing about the code.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

texts = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["true", "4", "a.py", "s3://bucket/x", "s3://", "../x", "\x00", "{0}", "'", "x" * 300]),
)


def anything(*names: str) -> st.SearchStrategy[Any]:
    """Recursive values as JSON, YAML or a Python caller could give them; mappings like to use `names`."""
    odd = st.sampled_from([dt.date(2024, 1, 1), object()])
    scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts, st.binary(max_size=3), odd)
    keys = st.one_of(st.sampled_from(names), texts, st.integers(0, 2), st.none()) if names else texts
    return st.recursive(
        scalars,
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=5)),
        max_leaves=8,
    )
