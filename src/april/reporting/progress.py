"""Progress of a run: a live display in a terminal, one plain line per step in a log.

Invariants:
- the caller never waits for the display: `rollout` only stores a few numbers, a thread draws them four times a second;
- a log gets no control codes, and of april's own nothing but ASCII.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self, TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from april.reporting.fleet import EngineLoad, fleet_lines
from april.reporting.formats import clock, compact
from april.reporting.metrics import busy_seconds, counted, failures_in, metric, show

REFRESH_PER_SECOND = 4
HEADER_EVERY = 25
WIDTH = 100
"""Maximum width of the live display, in columns."""
HISTORY = 512
RATE_OVER = 20
"""Number of latest steps from which the remaining time is estimated."""
SHOWN = 1000
"""Maximum numbers of characters of a prompt and of a completion."""
BLOCKS = "▁▂▃▄▅▆▇█"


class Rollout(NamedTuple):
    """State of the current step's rollout."""

    done_groups: int
    total_groups: int
    running: int
    slots: int
    tokens: int
    awaiting: int = 0
    """Samples that wait for their environment."""


class Column(NamedTuple):
    """A column of the plain lines."""

    title: str
    width: int
    text: Callable[[Mapping[str, Any]], str]


class Progress:
    """Shows a run's progress on `file`: live if that is a terminal, else as plain lines.

    Use as a context manager; leaving it, also by an exception, leaves the last state on the screen.

    Args:
        total_steps: the run's last step.
        title: shown on the live display.
        clock: monotonic clock in seconds, for the elapsed time where metrics do not contain it.
    """

    def __init__(
        self,
        total_steps: int,
        file: TextIO | None = None,
        title: str = "april",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        file = sys.stdout if file is None else file
        self.total_steps = total_steps
        self._title = title
        self._clock = clock
        self._started = clock()
        self._before = 0.0
        self._first: dict[str, float] = {}
        self._latest: dict[str, Any] = {}
        self._rollout: Rollout | None = None
        self._phase = ""
        self._lines = 0
        self._rewards: deque[float] = deque(maxlen=HISTORY)
        self._held_out: deque[float] = deque(maxlen=HISTORY)
        self._ends: deque[tuple[int, float]] = deque(maxlen=RATE_OVER + 1)
        self._failures: dict[str, int] = {}
        self._engines: Sequence[EngineLoad] = ()
        terminal = file.isatty()
        self._console = Console(file=file, force_terminal=terminal, highlight=False)
        # A terminal that cannot redraw, or lacks the characters of the bars, gets plain lines.
        capable = not self._console.is_dumb_terminal and self._console.encoding.startswith("utf")
        self._live = (
            Live(
                console=self._console,
                get_renderable=self.render,
                refresh_per_second=REFRESH_PER_SECOND,
                vertical_overflow="crop",
            )
            if terminal and capable
            else None
        )
        self._file = file

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rollout, self._phase = None, "done" if self._step >= self.total_steps else "stopped"
        if self._live:
            self._live.stop()

    def step(self, record: Mapping[str, Any], failures: Mapping[str, int] | None = None) -> None:
        """Show a step.

        Args:
            record: its metrics, named as in `metrics.jsonl`; a value that is missing keeps its latest.
            failures: counts of the run's faults so far.
        """
        if not self._ends:
            # The beginning of the first step, so that one step is enough for a pace.
            self._ends.append((record["step"] - 1, record["seconds"] - busy_seconds(record)))
        self._take(record)
        self._ends.append((record["step"], record["seconds"]))
        if record.get("reward") is not None:
            self._rewards.append(record["reward"])
        self._failures = dict(failures or {})
        if self._live:
            self._live.refresh()
        else:
            self._print_row()
            if fresh := failures_in(record):
                self._write(f"step {self._step}: {counted(fresh)}")

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Show what an evaluation found."""
        self._take(record)
        found = {name: record[name] for name in ("eval_reward", "accuracy") if record.get(name) is not None}
        self._first = {**found, **self._first}
        if "eval_reward" in found:
            self._held_out.append(found["eval_reward"])
        if self._live:
            self._live.refresh()
        else:
            said = ", ".join(f"{metric(name).label} {show(name, value)}" for name, value in found.items())
            self._write(f"after step {self._step}: {said}")

    def _take(self, record: Mapping[str, Any]) -> None:
        if not self._latest:
            # A resumed run begins with the seconds that went before it.
            self._before = float(record["seconds"]) - self.elapsed
        self._latest |= {name: value for name, value in record.items() if value is not None}
        self._rollout, self._phase = None, ""

    def rollout(
        self, done_groups: int, total_groups: int, running: int, slots: int, tokens: int, awaiting: int = 0
    ) -> None:
        """Where the current step's rollout stands; cheap enough to call at every chunk.

        Args:
            done_groups: complete groups, of the `total_groups` the step needs.
            running: samples decoding, of the engine's `slots`.
            tokens: sampled in this step so far.
            awaiting: samples whose environment is at work; they hold no slot.
        """
        self._rollout = Rollout(done_groups, total_groups, running, slots, tokens, awaiting)

    def engines(self, engines: Sequence[EngineLoad]) -> None:
        """Show these lines in the live display; the list may grow and is read at every redraw."""
        self._engines = engines

    def phase(self, name: str) -> None:
        """Show the activity outside the rollout: "training", "evaluating"."""
        self._rollout, self._phase = None, name

    def note(self, text: str) -> None:
        """A line of its own, above the live display."""
        if self._live:
            # As `Text`, because rich would interpret brackets in a string as markup.
            self._console.print(Text(text))
        else:
            self._write(text)

    def completions(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show completions, see `april.reporting.completions`; may be called from any thread."""
        for row in rows:
            kind = "held out" if row["held_out"] else f"staleness {row['staleness']}"
            reward = show("reward", row["reward"], "-")
            self.note(f"--- step {row['step']}, {row['prompt_id']}: reward {reward}, {row['length']} tokens, {kind}")
            self.note(printable(row["prompt"][-SHOWN:]))
            self.note(">>> " + printable(shortened(row["completion"], SHOWN)))

    @property
    def elapsed(self) -> float:
        """Seconds since the run began, over all its resumptions."""
        return self._before + self._clock() - self._started

    @property
    def time_left(self) -> float | None:
        """Seconds to the last step at the pace of the latest ones; None before there is a pace.

        A step that takes longer than the others shortens the time of none that follow.
        """
        if not self._ends:
            return None
        (first, began), (last, ended) = self._ends[0], self._ends[-1]
        pace = (ended - began) / (last - first)
        remaining = max(0, self.total_steps - last)
        return max(pace * max(0, remaining - 1), pace * remaining - max(0.0, self.elapsed - ended))

    @property
    def _step(self) -> int:
        return int(self._latest.get("step", 0))

    def _print_row(self) -> None:
        if self._lines % HEADER_EVERY == 0:
            self._write("  ".join(column.title.rjust(column.width) for column in self._columns))
        self._lines += 1
        self._write("  ".join(column.text(self._latest).rjust(column.width) for column in self._columns))

    def _write(self, text: str) -> None:
        # Prompts and completions may have characters that the encoding of the log lacks.
        encoding = self._file.encoding or "utf-8"
        self._file.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        self._file.flush()

    @property
    def _columns(self) -> Sequence[Column]:
        left = self.time_left
        steps = len(str(self.total_steps))
        return (
            Column("step", 2 * steps + 1, lambda m: f"{m.get('step', 0):>{steps}}/{self.total_steps}"),
            Column("reward", 6, lambda m: _shown(m, "reward")),
            Column("len mean/p99", 12, lambda m: _shown(m, "response_length_mean", "response_length_p99")),
            Column("tokens/s", 8, lambda m: _shown(m, "consumed_tokens_per_second")),
            Column("engine", 6, lambda m: _shown(m, "engine_occupancy")),
            Column("staleness", 9, lambda m: _shown(m, "staleness_mean", "staleness_max")),
            Column("elapsed", 7, lambda m: clock(m.get("seconds", self.elapsed))),
            Column("left", 7, lambda m: "-" if left is None else clock(left)),
        )

    def render(self) -> RenderableType:
        """The live display as it stands."""
        width = min(self._console.width, WIDTH)
        return Panel(
            Group(
                self._overall(width - 6),
                Text(),
                self._figures(width - 6),
                *self._faults(),
                self._current(width - 6),
                *(fleet_lines(self._engines, width - 6) if len(self._engines) > 1 else ()),
            ),
            title=Text(f" {self._title} ", style="bold"),
            title_align="left",
            box=box.ROUNDED,
            border_style="dim",
            padding=(0, 2),
            width=width,
        )

    def _overall(self, width: int) -> RenderableType:
        left = self.time_left
        times = f"{clock(self.elapsed)} elapsed · {'–' if left is None else clock(left)} left"
        head = Text(f"step {self._step}/{self.total_steps}  ", style="bold")
        # A fixed field, so that the bar keeps its length while the clock gains digits.
        tail = max(28, len(times) + 2)
        head.append_text(_bar(self._step, self.total_steps, max(8, width - len(head) - tail), "cyan"))
        return head.append(times.rjust(tail), style="dim")

    def _figures(self, width: int) -> RenderableType:
        m = self._latest
        spark = max(6, width - 70)
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(style="dim", width=8, no_wrap=True)
        table.add_column(width=6, style="bold", justify="right", no_wrap=True)
        table.add_column(width=spark, no_wrap=True, overflow="crop")
        table.add_column(width=10, style="dim", no_wrap=True)
        table.add_column(width=10, style="dim", no_wrap=True)
        table.add_column(width=24, no_wrap=True, overflow="ellipsis")
        left = [
            ("reward", _shown(m, "reward"), _curve(self._rewards, spark, "green"), ""),
            (
                "held-out",
                _shown(m, "eval_reward"),
                _curve(self._held_out, spark, "yellow"),
                self._gained("eval_reward"),
            ),
        ]
        if "accuracy" in m:
            left.append(("accuracy", _shown(m, "accuracy"), Text(), self._gained("accuracy")))
        right = (
            ("length", _shown(m, "response_length_mean", "response_length_p99"), "mean / p99"),
            ("consumed", _shown(m, "consumed_tokens_per_second"), "tokens/s"),
            ("engine", _shown(m, "engine_occupancy"), "of slots"),
            ("staleness", _shown(m, "staleness_mean", "staleness_max"), "mean / max"),
            ("off-policy", _shown(m, "off_policy_token_share"), "of tokens"),
        )
        for index, (name, value, unit) in enumerate(right):
            table.add_row(*(left[index] if index < len(left) else ("", "", "", "")), name, _figure(value, unit))
        return table

    def _gained(self, name: str) -> str:
        return f"from {show(name, self._first[name])}" if len(self._held_out) > 1 and name in self._first else ""

    def _faults(self) -> Sequence[RenderableType]:
        if not self._failures:
            return (Text(),)
        return (Text(), Text(counted(self._failures), style="red"), Text())

    def _current(self, width: int) -> RenderableType:
        now = self._rollout
        if now is None or now.done_groups >= now.total_groups:
            phase = self._phase or ("rollout complete" if now else "between steps" if self._latest else "starting")
            return Text(phase, style="dim")
        line = Text("rollout   ", style="dim")
        away = f"   {now.awaiting} at environments" if now.awaiting else ""
        bars = max(4, (width - 43 - max(len(away), 15)) // 2)
        line.append_text(_bar(now.done_groups, now.total_groups, bars, "green"))
        line.append(f"  {now.done_groups:>3}/{now.total_groups} groups   ", style="default")
        line.append_text(_bar(now.running, now.slots, bars, "magenta"))
        line.append(f"  {now.running:>3}/{now.slots} slots", style="default")
        if away:
            return line.append(away, style="yellow")
        return line.append(f"   {compact(now.tokens)} tokens", style="dim")


def shortened(text: str, limit: int) -> str:
    """The beginning and the end of a text of more than `limit` characters: a response's answer is at its end."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n… {len(text) - 2 * half:,} characters …\n{text[-half:]}"


def printable(text: str) -> str:
    """Return untrusted text without terminal control sequences."""
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)


def sparkline(values: Sequence[float], width: int) -> str:
    """`values` as one character each from lowest to highest block, averaged down to at most `width` of them."""
    count = min(width, len(values))
    parts = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means, default=0.0), max(means, default=0.0)
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[round(top * (mean - low) / (high - low)) if high > low else top // 2] for mean in means)


def _bar(done: float, total: float, width: int, colour: str) -> Text:
    """A bar in half characters."""
    halves = round(2 * width * min(1.0, done / total)) if total else 0
    filled = "━" * (halves // 2) + "╸" * (halves % 2)
    return Text(filled, style=colour).append("━" * (width - len(filled)), style="bright_black")


def _shown(record: Mapping[str, Any], *names: str) -> str:
    return " / ".join(show(name, record.get(name), "-") for name in names)


def _curve(values: Sequence[float], width: int, colour: str) -> Text:
    return Text(sparkline(list(values), width), style=colour)


def _figure(value: str, unit: str) -> Text:
    return Text(value, style="bold").append(f"  {unit}", style="dim not bold")
