"""The report of a run, or of two: one HTML file that needs no network (`smpkit report`), or a cell of a notebook.

::

    from smpkit.observe.report import open_report

    open_report()                              # of the last run here; a notebook shows it
    open_report("gpt-text", "gpt-text-20261125-191502").html
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from smpkit.observe.report.data import content_of
from smpkit.observe.report.view import page
from smpkit.observe.runs import open_run

__all__ = ["Report", "open_report"]


@dataclass(frozen=True)
class Report:
    """A page."""

    html: str
    """All of it: what `smpkit report` writes into a file."""

    def _repr_html_(self) -> str:
        """Show it in a notebook, in a frame of its own: neither gets at the other."""
        size = 'width="100%" height="720" frameborder="0"'
        return f'<iframe sandbox="allow-scripts" title="report of a run" {size} srcdoc="{escape(self.html)}"></iframe>'


def open_report(name: str | None = None, other: str | None = None) -> Report:
    """Return the report of a run, or of two beside each other.

    Args:
        name: a run's name or folder, a job's name for the last one of it, or a folder with events; None: the last run.
        other: the second run.

    Raises:
        SmpkitError: there is no such run, or nothing is in its folder.
    """
    names = (name,) if other is None else (name, other)
    return Report(page([content_of(open_run(name)) for name in names]))
