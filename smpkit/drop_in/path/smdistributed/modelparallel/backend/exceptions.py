"""Errors of smpkit, also as `torch.exceptions`. AWS's launcher looks for these names in what a failed rank printed."""

from smpkit.errors import (
    CheckpointError,
    ConfigError,
    DeadlineError,
    LaunchError,
    RemoteError,
    SmpkitError,
    UnsupportedError,
    UsageError,
)

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DeadlineError",
    "LaunchError",
    "RemoteError",
    "SmpkitError",
    "UnsupportedError",
    "UsageError",
]
