"""Photograph a report for the documentation: `python -m scripts.report_picture REPORT.html OUT.png`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.observe.report.browser import Browser

_WIDTH: Final = 1000
_SECTIONS: Final = ("summary", "schedule", "memory")
"""What is in the picture: the rest is left out, or it would be too long for a page."""


def main(report: Path, picture: Path) -> None:
    """Write the picture."""
    with tempfile.TemporaryDirectory() as folder, Browser(Path(folder)) as browser:
        browser.show(report, _WIDTH)
        browser.run(
            "for (const part of document.querySelectorAll('section, nav, footer'))"
            " if (!arguments[0].includes(part.id)) part.remove()",
            _SECTIONS,
        )
        browser.wait_until("true")
        browser.picture(picture)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
