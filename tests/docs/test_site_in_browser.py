"""The built site in a real browser: nothing overflows, every picture is drawn, and only this server is asked."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import site
from tests.docs.test_site import needs_zensical
from tests.observe.report.browser import Browser

pytestmark = [pytest.mark.slow, needs_zensical]

PAGES = (
    "index.html",
    "docs/tutorials/first-pipeline.html",
    "docs/how-to/cut-memory.html",
    "docs/explanation/coming-from.html",
    "docs/reference/environment.html",
    "examples/offload_model/index.html",
    "docs/reference/python/runtime.html",
    "docs/reference/cli.html",
)
UNDRAWN = "return [...document.images].filter((image) => !image.naturalWidth).map((image) => image.src)"
BROKEN = """
const range = document.createRange(), broken = [];
for (const code of document.querySelectorAll("table code")) {
  const texts = document.createTreeWalker(code, NodeFilter.SHOW_TEXT);
  for (let text; (text = texts.nextNode()); ) {
    for (const word of text.data.matchAll(/[^\\s-]+/g)) {
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map((box) => box.top)).size > 1) broken.push(word[0]);
    }
  }
}
return broken;
"""
"""Words of code in tables that are on two lines."""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in the base class
        pass


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("site")
    assert site.build(folder) == []
    handler = functools.partial(_Quiet, directory=str(folder / "site"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("page", PAGES)
def test_a_page_fits_the_window_and_is_whole(
    browser: Browser, address: str, page: str, width: int, scheme: str, tmp_path: Path
) -> None:
    browser.requests()
    browser.log("browser")
    browser.show(f"{address}/{page}", width, scheme, ready="document.readyState === 'complete'")
    browser.picture(tmp_path / "page.png")
    assert browser.run("return document.documentElement.scrollWidth") <= width
    assert browser.run(UNDRAWN) == []
    assert browser.run(BROKEN) == []
    assert [entry for entry in browser.log("browser") if entry["level"] == "SEVERE"] == []
    assert [asked for asked in browser.requests() if not asked.startswith((address, "data:", "blob:"))] == []
    dark = (
        "return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).every((part) => part < 90)"
    )
    assert browser.run(dark) == (scheme == "dark")
