"""A browser for the tests that look at pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.observe.report.browser import DRIVER, Browser


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One window for all tests that look at pages; where there is no Chromium they are skipped."""
    if DRIVER is None:
        pytest.skip("no chromedriver: apt-get install chromium chromium-driver")
    with Browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened
