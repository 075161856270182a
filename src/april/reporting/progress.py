"""Progress of a run: one plain line per step, and in a terminal a status line below them.

Invariants:
- the caller never waits for the status line: `rollout` only stores a few numbers, a thread draws them four times a
  second;
- a log gets no control codes, and of april's own nothing but ASCII.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from april.reporting.formats import clock, compact
from april.reporting.metrics import busy_seconds, counted, failures_in, metric, show

REFRESH_PER_SECOND = 4
HEADER_EVERY = 25
RATE_OVER = 20
"""Number of latest steps from which the remaining time is estimated."""
SHOWN = 1000
"""Maximum numbers of characters of a prompt and of a completion."""


class EngineLoad(Protocol):
    """One of several engines."""

    @property
    def ready(self) -> bool: ...


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
    """Shows a run's progress on `file`, with a status line if that is a terminal.

    Use as a context manager; leaving it, also by an exception, removes the status line.

    Args:
        total_steps: the run's last step.
        clock: monotonic clock in seconds, for the elapsed time where metrics do not contain it.
    """

    def __init__(
        self,
        total_steps: int,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        file = sys.stdout if file is None else file
        self.total_steps = total_steps
        self._clock = clock
        self._started = clock()
        self._before = 0.0
        self._latest: dict[str, Any] = {}
        self._rollout: Rollout | None = None
        self._phase = ""
        self._lines = 0
        self._ends: deque[tuple[int, float]] = deque(maxlen=RATE_OVER + 1)
        self._engines: Sequence[EngineLoad] = ()
        terminal = file.isatty()
        self._console = Console(file=file, force_terminal=terminal, highlight=False)
        self._live = (
            Live(
                console=self._console,
                get_renderable=lambda: Text(self.status, style="dim", no_wrap=True, overflow="crop"),
                refresh_per_second=REFRESH_PER_SECOND,
                transient=True,
            )
            if terminal and not self._console.is_dumb_terminal
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
        if self._live:
            self._live.stop()

    def step(self, record: Mapping[str, Any]) -> None:
        """Show the metrics of a step, named as in `metrics.jsonl`; a missing value keeps its latest."""
        if not self._ends:
            # The beginning of the first step, so that one step is enough for a pace.
            self._ends.append((record["step"] - 1, record["seconds"] - busy_seconds(record)))
        self._take(record)
        self._ends.append((record["step"], record["seconds"]))
        self._print_row()
        if failures := failures_in(record):
            self.note(f"step {self._step}: {counted(failures)}")

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Show the results of an evaluation."""
        self._take(record)
        results = {name: record[name] for name in ("eval_reward", "accuracy") if record.get(name) is not None}
        shown = ", ".join(f"{metric(name).label} {show(name, value)}" for name, value in results.items())
        self.note(f"after step {self._step}: {shown}")

    def _take(self, record: Mapping[str, Any]) -> None:
        if not self._latest:
            # A resumed run begins with the seconds that went before it.
            self._before = float(record["seconds"]) - self.elapsed
        self._latest |= {name: value for name, value in record.items() if value is not None}
        self._rollout, self._phase = None, ""

    def rollout(
        self, done_groups: int, total_groups: int, running: int, slots: int, tokens: int, awaiting: int = 0
    ) -> None:
        """Store the state of the current step's rollout; cheap enough to call at every chunk.

        Args:
            done_groups: complete groups, of the `total_groups` the step needs.
            running: samples decoding, of the engine's `slots`.
            tokens: sampled in this step so far.
            awaiting: samples whose environment is at work; they hold no slot.
        """
        self._rollout = Rollout(done_groups, total_groups, running, slots, tokens, awaiting)

    def engines(self, engines: Sequence[EngineLoad]) -> None:
        """Count these engines in the status line; the list may grow and is read at every redraw."""
        self._engines = engines

    def phase(self, name: str) -> None:
        """Show the activity outside the rollout: "training", "evaluating"."""
        self._rollout, self._phase = None, name

    def note(self, text: str) -> None:
        """Print a line, above the status line."""
        if self._live:
            # As `Text`, because rich would interpret brackets in a string as markup.
            self._console.print(Text(text), soft_wrap=True)
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
            self.note("  ".join(column.title.rjust(column.width) for column in self._columns))
        self._lines += 1
        self.note("  ".join(column.text(self._latest).rjust(column.width) for column in self._columns))

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

    @property
    def status(self) -> str:
        """The status line: step, state of the rollout, engines that are lost, remaining time."""
        parts = [f"step {self._step}/{self.total_steps}", *self._activity]
        lost = sum(not engine.ready for engine in self._engines)
        if lost:
            parts.append(f"{lost} of {len(self._engines)} engines lost")
        if self.time_left is not None:
            parts.append(f"{clock(self.time_left)} left")
        return "  ".join(parts)

    @property
    def _activity(self) -> list[str]:
        now = self._rollout
        if now is None or now.done_groups >= now.total_groups:
            return [self._phase or ("rollout complete" if now else "between steps" if self._latest else "starting")]
        parts = [f"{now.done_groups}/{now.total_groups} groups", f"{now.running}/{now.slots} slots"]
        if now.awaiting:
            parts.append(f"{now.awaiting} at environments")
        return [*parts, f"{compact(now.tokens)} tokens"]


def shortened(text: str, limit: int) -> str:
    """The beginning and the end of a text of more than `limit` characters: a response's answer is at its end."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n… {len(text) - 2 * half:,} characters …\n{text[-half:]}"


def printable(text: str) -> str:
    """Return untrusted text without terminal control sequences."""
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)


def _shown(record: Mapping[str, Any], *names: str) -> str:
    return " / ".join(show(name, record.get(name), "-") for name in names)
