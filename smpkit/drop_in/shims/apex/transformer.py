"""Apex's parts of Megatron, which are not here."""

raise ImportError("apex.transformer is not here: use smp's tensor and pipeline parallelism, or install Apex")
