"""Phases of an exchange of shared devices, as SVG."""

from __future__ import annotations

from xml.etree import ElementTree

from april.reporting.turn_strip import turn_strip


def test_every_phase_is_a_bar_in_its_place() -> None:
    turn = [("engine asleep", 0.0, 1.0), ("training", 1.0, 9.0), ("parameters to host", 9.0, 9.0)]
    drawing = ElementTree.fromstring(turn_strip(turn))
    bars = [bar for bar in drawing if bar.tag == "rect"]
    assert [bar[0].text for bar in bars] == [
        "engine asleep, 0.00 to 1.00 s",
        "training, 1.00 to 9.00 s",
        "parameters to host, 9.00 to 9.00 s",
    ]
    assert [bar.get("class") for bar in bars] == ["c-blue", "c-grey", "c-amber"]
    left = [float(bar.get("x", "")) for bar in bars]
    assert left == sorted(left)
    assert abs(float(bars[0].get("width", "")) * 8 - float(bars[1].get("width", ""))) < 1
    height = float(drawing.get("viewBox", "").split()[-1])
    assert all(float(bar.get("y", "")) + float(bar.get("height", "")) < height for bar in bars)
