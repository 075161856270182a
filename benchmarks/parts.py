"""A long check in parts, each in a process of its own under a limit of its own.

Invariants:
- a figure is in the results file as soon as it is measured, and the file is replaced as a whole, so that it is complete
  JSON at any moment;
- a part that fails, hangs or runs out of memory costs only the figures that it has not yielded;
- a part that is done is not run again unless that is asked for;
- the exit status is 0 only if every part that was asked for is done or skipped for a reason that the file names.

A part is a function, which yields names and values. The name "failures" is reserved: a list of
texts, one for each thing that is wrong; the part counts as failed unless the list is empty.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from record import machine

ROOT = Path(__file__).resolve().parents[1]
TAIL = 12
"""Lines of a failed part's output that are kept."""

Figures = Iterator[tuple[str, Any]]
"""What a part yields: names and values that JSON has."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a check.

    Args:
        function: as `module:function`, or a module whose function `measure` it is; imported only in the part's process.
        limit: seconds that it may take, the start of its process included.
        missing: returns why it cannot run here; None if it can.
    """

    function: str
    limit: float
    missing: Callable[[], str | None] = lambda: None


def needs(package: str) -> Callable[[], str | None]:
    """Return a condition of `Part`: a package that has to be importable."""
    return lambda: None if importlib.util.find_spec(package) else f"{package} is not installed"


def slowed(parts: Mapping[str, Part], factor: float) -> dict[str, Part]:
    """The parts with their limits multiplied."""
    return {name: replace(part, limit=factor * part.limit) for name, part in parts.items()}


class Results:
    """The results file.

    Args:
        path: it is read first, if it is there.
        about: what the figures were measured on; a file of anything else is refused.

    Raises:
        SystemExit: the file holds figures of another device or size.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        self._held: dict[str, Any] = {"about": dict(about), "parts": {}}
        if path.exists():
            found = json.loads(path.read_text())
            if found["about"] != self._held["about"]:
                sys.exit(f"{path} holds figures of {found['about']}: name another file with --output, or delete it")
            self._held = found

    def state(self, name: str) -> str | None:
        """done, failed or skipped; None of a part that was not run."""
        state: str | None = self._held["parts"].get(name, {}).get("state")
        return state

    def put(self, name: str, record: Mapping[str, Any]) -> None:
        self._held["parts"][name] = dict(record)
        write(self.path, self._held)


def write(path: Path, content: Any) -> None:
    """Replace a file of JSON as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(content, indent=2) + "\n")
    beside.replace(path)


def run_all(
    parts: Mapping[str, Part],
    chosen: Sequence[str],
    command: Callable[[str], Sequence[str]],
    results: Results,
    seconds: float,
    again: bool = False,
) -> int:
    """Run parts one after the other and return the exit status.

    Args:
        command: command of a part's process, which calls `run_here`.
        seconds: time for all parts; a part whose limit exceeds the remaining time is left for the next call.
        again: run parts that are done, too.
    """
    ends = time.monotonic() + seconds
    postponed = []
    for name in chosen:
        part = parts[name]
        if results.state(name) == "done" and not again:
            print(f"{name}: done before", flush=True)
            continue
        if reason := part.missing():
            results.put(name, {"state": "skipped", "reason": reason})
            print(f"{name}: skipped: {reason}", flush=True)
            continue
        if part.limit > ends - time.monotonic():
            postponed.append(name)
            continue
        record = run_apart(name, part, command(name), lambda record, name=name: results.put(name, record))
        print(json.dumps({name: record}, indent=2), flush=True)
    failed = [name for name in chosen if results.state(name) not in ("done", "skipped") and name not in postponed]
    for text, names in (("failed", failed), ("left for the next call, for lack of time", postponed)):
        if names:
            print(f"{text}: {', '.join(names)}", flush=True)
    print(f"figures: {results.path}", flush=True)
    return int(bool(failed or postponed))


def run_apart(
    name: str, part: Part, command: Sequence[str], record: Callable[[Mapping[str, Any]], None]
) -> dict[str, Any]:
    """Run a part in a process of its own, and record its figures whenever there are new ones."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out, said = Path(folder) / "figures.json", Path(folder) / "output"
        found: dict[str, Any] = {}
        with said.open("w") as output:
            process = subprocess.Popen(
                [*command, "--figures", str(out)], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                while not (late := time.monotonic() - began > part.limit) and process.poll() is None:
                    if (now := _read(out)) != found:
                        found = now
                        record({"state": "failed", "reason": "under way", "figures": found})
                    time.sleep(0.05)
            finally:
                _end(process)
        found = _read(out)
        tail = said.read_text(errors="replace").strip().splitlines()[-TAIL:]
    ended: dict[str, Any] = {"state": "done", "seconds": round(time.monotonic() - began, 1), "commit": commit()}
    if late:
        ended |= {"state": "failed", "reason": f"not done after {part.limit:g} s", "output": tail}
    elif process.returncode:
        ended |= {"state": "failed", "reason": f"exit status {process.returncode}", "output": tail}
    elif failures := found.get("failures"):
        ended |= {"state": "failed", "reason": failures}
    ended |= {"machine": machine(), "figures": found}
    record(ended)
    return ended


def run_here(part: Part, given: Any, figures: Path) -> None:
    """Run a part in this process and write its figures as they come."""
    sys.path.insert(0, str(ROOT))
    found = {}
    module, _, function = part.function.partition(":")
    try:
        for name, value in getattr(importlib.import_module(module), function or "measure")(given):
            found[name] = value
            write(figures, found)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # at once: what the part has started must not hold the process up


def commit() -> str | None:
    """The commit of this checkout; None if it is no checkout."""
    try:
        asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:  # no git
        return None
    return asked.stdout.strip() or None


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the part's process and all that it started and left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
