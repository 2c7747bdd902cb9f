"""Errors of the API. AWS's launcher looks for these names in what a failed rank printed."""

from smpkit.errors import CheckpointError, ConfigError, SmpkitError, UnsupportedError, UsageError

__all__ = ["CheckpointError", "ConfigError", "SmpkitError", "UnsupportedError", "UsageError"]
