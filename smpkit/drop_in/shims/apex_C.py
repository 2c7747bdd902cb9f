"""Apex's functions that make one tensor of many, and back: torch's."""

from torch._utils import _flatten_dense_tensors as flatten
from torch._utils import _unflatten_dense_tensors as unflatten

from smpkit.drop_in.removed_names import announce

__all__ = ["flatten", "unflatten"]

announce("apex_C")
