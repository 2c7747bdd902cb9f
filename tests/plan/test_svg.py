"""SVG pictures of schedules: every action is a box at its time, and the text is that of the drawing."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from smpkit.plan.schedule.simulate import Timeline, simulate
from smpkit.plan.svg import svg
from tests.observe.logs import COSTS, chain

_SVG = "{http://www.w3.org/2000/svg}"
_KINDS = ("f", "b", "w")


def boxes(picture: str) -> list[tuple[str, float, float, float]]:
    """Return action, x, y and width of each box."""
    found = [each for each in ET.fromstring(picture).iter(f"{_SVG}rect") if each.get("class") in _KINDS]
    named = [(title, each) for each in found if (title := each.findtext(f"{_SVG}title")) is not None]
    return [
        (title, float(each.attrib["x"]), float(each.attrib["y"]), float(each.attrib["width"])) for title, each in named
    ]


@pytest.fixture
def timeline() -> Timeline:
    return simulate(chain(2, 4), COSTS)


def test_every_action_is_a_box_at_its_time(timeline: Timeline) -> None:
    drawn = boxes(svg({"planned": timeline}))
    spans = [span for row in timeline.spans for span in row]
    assert [name for name, *_ in drawn] == [str(span.action) for span in spans]
    scale = (400 - 56 - 8) / timeline.makespan_seconds
    for (_, x, _, width), span in zip(drawn, spans, strict=True):
        assert x == pytest.approx(56 + span.start_seconds * scale, abs=0.01)
        assert width == pytest.approx((span.end_seconds - span.start_seconds) * scale - 0.7, abs=0.01)


def test_stages_are_below_each_other_and_nothing_leaves_the_picture(timeline: Timeline) -> None:
    picture = svg({"planned": timeline, "executed": timeline})
    rows = list(dict.fromkeys(y for _, _, y, _ in boxes(picture)))
    assert rows == sorted(rows)
    assert len(rows) == 4
    _, _, width, height = map(float, ET.fromstring(picture).attrib["viewBox"].split())
    assert all(x + size <= width for _, x, _, size in boxes(picture))
    assert rows[-1] + 20 < height


def test_several_are_drawn_to_one_scale(timeline: Timeline) -> None:
    slower = simulate(chain(2, 8), COSTS)
    drawn = boxes(svg({"planned": timeline, "executed": slower}))
    widths = {width for name, _, _, width in drawn if name == "F0"}
    assert len(widths) == 1


def test_a_narrow_box_has_the_microbatch_only_or_nothing() -> None:
    texts = {
        count: [each.text for each in ET.fromstring(svg({"x": simulate(chain(2, count), COSTS)})).iter(f"{_SVG}text")]
        for count in (4, 16, 64)
    }
    assert "F0" in texts[4]
    assert "F0" not in texts[16]
    assert "0" in texts[16]
    assert "0" not in texts[64]


def test_a_title_is_text(timeline: Timeline) -> None:
    picture = ET.fromstring(svg({"a < b & c": timeline}))
    assert picture.findtext(f"{_SVG}text") == "a < b & c"
    assert picture.findtext(f"{_SVG}title") == "a < b & c"


def test_light_and_dark_have_their_colours(timeline: Timeline) -> None:
    assert "@media (prefers-color-scheme:dark)" in svg({"x": timeline})
