"""`april report DIR`: a run's page, written anew."""

from __future__ import annotations

from pathlib import Path

from april.commands.arguments import help_asked_for
from april.config.error import ConfigError
from april.reporting.report import write_report

USAGE = "usage: april report DIR\n\nWrite report.html of the run in DIR anew, from its metrics and traces."


def run(args: list[str]) -> int:
    """`april report DIR`."""
    if help_asked_for(args):
        print(USAGE)
        return 0
    if len(args) != 1:
        raise ConfigError("name the directory of one run: april report DIR")
    directory = Path(args[0])
    if not (directory / "metrics.jsonl").is_file():
        raise ConfigError(f"{directory}: no metrics.jsonl there; name the directory of a run")
    print(write_report(directory))
    return 0
