"""Why a server died, in one line, from what it logged.

A server's log is hundreds of lines, and its last one says "see root cause above". The cause is the last exception that
does not merely report another one.
"""

from __future__ import annotations

import re
import signal

LONGEST = 300
"""Characters of a cause that are shown."""
PREFIX = r"(?:\([\w.-]+(?: [\w.-]+)? pid=\d+\)\s+)?(?:(?:ERROR|CRITICAL)\s[^\[]*\[[^\]]*\]\s+)?(?:\[[^\]]*\]\s+)?"
"""What servers put before a line: the process, the level with time and source, or the time alone."""
NAME = r"(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Exit|Failure|Timeout)"
RAISED = re.compile(rf"{PREFIX}({NAME}: \S.*)")
REFUSED = re.compile(r"\S+: error: (.+)")
"""A command line that the server does not take."""
CRASHED = re.compile(rf"{PREFIX}((?:Fatal Python error|Segmentation fault|terminate called|Bus error).*)")
ECHOES = re.compile(
    r"[Ss]ee (?:root cause|stack trace)|[Ee]ngine core initialization failed|EngineDeadError|ConnectionResetError|"
    r"BrokenPipeError|EOFError|RequestValidationError|CancelledError|SystemExit|failed core proc|"
    r"[Ww]orker failed with error"
)
"""Exceptions that say only that something else has failed, or that somebody asked for nonsense."""


def cause(log: str) -> str | None:
    """The line that says why a server died; None if no line does."""
    found = [match[1] for line in log.splitlines() if (match := _cause_in(line))]
    told = [line for line in found if not ECHOES.search(line)] or found
    return _short(told[-1]) if told else None


def _cause_in(line: str) -> re.Match[str] | None:
    return RAISED.match(line) or REFUSED.match(line) or CRASHED.match(line)


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def last_line(log: str) -> str | None:
    """The last line that says anything."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return _short(lines[-1]) if lines else None


def exit_of(returncode: int) -> str:
    """How a process ended, in words."""
    if returncode >= 0:
        return f"exit status {returncode}"
    name = signal.Signals(-returncode).name
    by = ", by someone or for lack of memory" if name == "SIGKILL" else ""
    return f"killed by {name}{by}"
