"""The browser that the tests of reports have, for the pages of the site."""

from tests.observe.report.conftest import browser

__all__ = ["browser"]
