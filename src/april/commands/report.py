"""`april report DIR [--watch]`: write a run's HTML report, once or repeatedly during the run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from april.commands.help import help_asked_for, wrapped
from april.config.error import ConfigError
from april.reporting.report import follow, write_report

USAGE = """usage: april report DIR [--watch]

Write report.html of the run in DIR from its metrics and traces. With --watch, rewrite it every 15 seconds until the
run ends; an open page reloads itself."""
INTERVAL = 15
"""Seconds."""


def run(args: list[str]) -> int:
    """`april report DIR [--watch]`."""
    if help_asked_for(args):
        print(wrapped(USAGE))
        return 0
    watch, named = "--watch" in args, [arg for arg in args if arg != "--watch"]
    if len(named) != 1:
        raise ConfigError("name the directory of one run: april report DIR")
    directory = Path(named[0])
    if not (directory / "metrics.jsonl").is_file():
        raise ConfigError(f"{directory}: no metrics.jsonl there; name the directory of a run")
    print(write_report(directory, INTERVAL * watch), flush=True)
    if watch:
        with suppress(KeyboardInterrupt):
            follow(directory, INTERVAL)
    return 0
