"""Display of a run's engines by node, with their load.

Invariant: however many there are, they take at most `ROWS` lines below their heading, those that are lost first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rich.text import Text

ROWS = 8


class EngineLoad(Protocol):
    """An engine of several. `running` of its `slots` are taken; `reason` is why it is not ready."""

    @property
    def name(self) -> str: ...
    @property
    def place(self) -> str: ...
    @property
    def ready(self) -> bool: ...
    @property
    def running(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def reason(self) -> str: ...


def fleet_lines(engines: Sequence[EngineLoad], width: int) -> list[Text]:
    """A line for the engines together, one for each that is lost, and one for each place where others work."""
    places: dict[str, list[EngineLoad]] = {}
    for engine in engines:
        if engine.ready:
            places.setdefault(engine.place, []).append(engine)
    lost = [engine for engine in engines if not engine.ready]
    nodes = f" on {len(places)} node{'s' * (len(places) != 1)}" if any(places) else ""
    head = Text("engines   ", style="dim").append(f"{len(engines) - len(lost)} of {len(engines)} ready{nodes}")
    rows = [_lost(engine, width) for engine in lost] + [_place(*each, width) for each in sorted(places.items())]
    if len(rows) > ROWS:
        more = len(rows) - ROWS + 1
        rows = [*rows[: ROWS - 1], Text(f"          and {more} more", style="dim")]
    return [head, *rows]


def _lost(engine: EngineLoad, width: int) -> Text:
    place = f" at {engine.place}" if engine.place else ""
    line = Text(f"  {engine.name}{place}: ", style="red").append(engine.reason or "lost", style="dim")
    line.truncate(width, overflow="ellipsis")
    return line


def _place(place: str, engines: Sequence[EngineLoad], width: int) -> Text:
    running, slots = sum(e.running for e in engines), sum(e.slots for e in engines)
    name = place or engines[0].name
    count = f"{len(engines)} engine{'s' * (len(engines) != 1)}"
    line = Text(f"  {name[:24]:<24} {count:>10}  ", style="dim")
    bar = max(6, min(30, width - 56))
    full = round(bar * min(1.0, running / slots)) if slots else 0
    line.append("━" * full, style="magenta").append("━" * (bar - full), style="bright_black")
    return line.append(f"  {running:>4}/{slots} slots", style="default")
