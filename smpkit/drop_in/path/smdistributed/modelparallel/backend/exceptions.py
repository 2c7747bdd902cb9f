"""Errors of the ranks' life together. AWS's launcher looks for these names in what a failed rank printed."""

from smpkit.errors import DeadlineError, LaunchError, RemoteError

__all__ = ["DeadlineError", "LaunchError", "RemoteError"]
