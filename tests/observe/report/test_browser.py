"""The report in a real browser: every chart is drawn, zoom and hover work, and nothing is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smpkit.observe.report.data import content_of
from smpkit.observe.report.view import page
from tests.observe.report.browser import Browser
from tests.observe.report.folders import write_run

BLANK = """
return [...document.querySelectorAll("canvas")].filter((canvas) => {
  if (!canvas.width || !canvas.height) return true;
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  let coloured = 0;
  for (let at = 0; at < pixels.length; at += 4) {
    const [red, green, blue, alpha] = pixels.slice(at, at + 4);
    if (alpha > 128 && Math.max(red, green, blue) - Math.min(red, green, blue) > 40) coloured += 1;
  }
  return coloured < 100;
}).map((canvas) => canvas.getAttribute("aria-label"));
"""
SCHEDULE = '[data-chart="schedule"] canvas'


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    one = content_of(write_run(folder, "20260102-030405"))
    other = content_of(write_run(folder, "20260102-040506", offloads=False))
    found = {"one": folder / "one.html", "two": folder / "two.html"}
    found["one"].write_text(page([one]), encoding="utf-8")
    found["two"].write_text(page([one, other]), encoding="utf-8")
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("name", ["one", "two"])
def test_charts_are_drawn_offline(browser: Browser, pages: dict[str, Path], name: str, width: int, scheme: str) -> None:
    browser.requests()
    browser.show(pages[name], width, scheme)
    assert browser.log("browser") == []
    assert browser.run(BLANK) == []
    charts = browser.run("return document.querySelectorAll('canvas').length")
    # Two values, a rate, a schedule, and for each of two ranks memory and, in the first run, the link.
    assert charts == {"one": 2 + 1 + 1 + 2 + 2, "two": 2 + 1 + 2 + 4 + 2}[name]
    assert browser.run("return document.documentElement.scrollWidth") <= width
    assert browser.requests() == [pages[name].absolute().as_uri()]
    assert browser.run("return document.title").endswith("smpkit")  # no name of the job ran as a script


def _schedule(browser: Browser) -> Any:
    script = f"const it = document.querySelector('{SCHEDULE}'); it.scrollIntoView({{block: 'center'}}); "
    return browser.run(script + "const box = it.getBoundingClientRect(); return [box.x, box.y, box.width, box.height]")


def test_hover_tells_the_action(browser: Browser, pages: dict[str, Path]) -> None:
    browser.show(pages["one"], 1280)
    x, y, *_ = _schedule(browser)
    # Rank 0 as planned: F0 is the first of 15 equal parts of the time.
    browser.mouse({"type": "pointerMove", "x": round(x + 80), "y": round(y + 34), "origin": "viewport"})
    tip = browser.run(_TIP)
    assert "F0: forward of microbatch 0, segment 0" in tip
    assert "0 s to 1.0 ms: 1.0 ms" in tip
    assert "rank 0, stage 0, planned" in tip


def test_dragging_zooms_the_schedule_and_memory_with_it(browser: Browser, pages: dict[str, Path]) -> None:
    browser.show(pages["one"], 1280)
    before = browser.run(_PIXELS)
    label = browser.run(_AXIS)
    x, y, width, _ = _schedule(browser)
    places = [(round(x + width * share), round(y + 40)) for share in (0.3, 0.4, 0.5)]
    moves: list[dict[str, Any]] = [
        {"type": "pointerMove", "x": across, "y": down, "origin": "viewport"} for across, down in places
    ]
    browser.mouse(moves[0], {"type": "pointerDown", "button": 0}, *moves[1:], {"type": "pointerUp", "button": 0})
    browser.wait_until("true")
    assert browser.run(_PIXELS) != before
    assert browser.run(_AXIS) != label
    browser.run(f"document.querySelector('{SCHEDULE}').dispatchEvent(new MouseEvent('dblclick'))")
    browser.wait_until("true")
    assert browser.run(_AXIS) == label


def test_a_finger_selects_a_time_and_asks_on_a_screen_for_them(browser: Browser, pages: dict[str, Path]) -> None:
    browser.show(pages["one"], 400, touches=True)
    x, y, width, _ = _schedule(browser)
    whole, axis = browser.run(_PIXELS), browser.run(_AXIS)
    browser.touch(*((x + width * share, y + 40) for share in (0.5, 0.6, 0.8)))
    browser.wait_until("true")
    assert browser.run(_PIXELS) != whole
    assert browser.run(_AXIS) != axis
    for _ in range(2):
        browser.touch((x + width / 2, y + 40))
    browser.wait_until("true")
    assert browser.run(_AXIS) == axis
    # A tap asks what is there, and the answer stays until the next one.
    browser.touch((x + 60, y + 34))
    assert "forward of microbatch 0, segment 0" in browser.run(_TIP)
    browser.touch((x + 2, y - 30))
    assert browser.run(_TIP) == ""


_TIP = "const tip = document.querySelector('.tip'); return tip.hidden ? '' : tip.innerText"
_PIXELS = f"return document.querySelector('{SCHEDULE}').toDataURL()"
_AXIS = "return document.querySelector('[data-chart=\"memory\"] canvas').toDataURL()"


def test_the_keyboard_zooms_the_schedule_and_moves_in_it(browser: Browser, pages: dict[str, Path]) -> None:
    browser.show(pages["one"], 1280)
    browser.run(f"document.querySelector('{SCHEDULE}').focus()")
    seen = [browser.run(_PIXELS)]
    for key in ("+", "\ue014", "0"):
        browser.press(key)
        seen.append(browser.run(_PIXELS))
    assert seen[0] == seen[3]
    assert len(set(seen)) == 3


def test_the_keyboard_reads_the_values_of_a_curve_and_zooms(browser: Browser, pages: dict[str, Path]) -> None:
    browser.show(pages["one"], 1280)
    chart = '[data-name="loss"] .chart'
    browser.run(f"document.querySelector('{chart}').focus()")
    browser.press("\ue014", "\ue014")
    said = browser.run(f"return document.querySelector('{chart} .u-legend').innerText")
    assert "".join(said.split()) == "step1loss2"
    before = browser.run(f"return document.querySelector('{chart} canvas').toDataURL()")
    browser.press("+")
    browser.wait_until("true")
    assert browser.run(f"return document.querySelector('{chart} canvas').toDataURL()") != before


def test_another_step_is_shown_when_it_is_chosen(browser: Browser, pages: dict[str, Path]) -> None:
    browser.show(pages["one"], 1280)
    label = f"return document.querySelector('{SCHEDULE}').getAttribute('aria-label')"
    before = browser.run(label)
    choose = "const it = document.querySelector('[data-choice]'); it.value = it.options.length - 1;"
    browser.run(choose + "it.dispatchEvent(new Event('change'))")
    browser.wait_until("true")
    assert browser.run(label) != before
    assert browser.run(BLANK) == []


def test_a_kind_of_memory_can_be_left_out(browser: Browser, pages: dict[str, Path]) -> None:
    browser.show(pages["one"], 1280)
    shown = "return document.querySelectorAll('[data-chart=\"memory\"] .u-series.u-off').length"
    before = browser.run(shown)
    browser.run("document.querySelector('[data-chart=\"memory\"] .u-series:nth-child(3) th').click()")
    browser.wait_until(f"(() => {{ {shown} }})() === {before + 2}")
    assert browser.log("browser") == []


def test_another_colour_scheme_is_followed_at_once(browser: Browser, pages: dict[str, Path]) -> None:
    browser.show(pages["one"], 1280, "light")
    before = browser.run(_PIXELS)
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.devtools("Emulation.setEmulatedMedia", {"features": features})
    browser.wait_until("matchMedia('(prefers-color-scheme: dark)').matches")
    assert browser.run(_PIXELS) != before
    assert browser.run(BLANK) == []
