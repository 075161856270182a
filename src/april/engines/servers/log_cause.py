"""Extract from a server's log, in one line, why it died.

A server's log has hundreds of lines, and its last line may be "see root cause above". The cause is the last exception
that does not merely report another one.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

LONGEST = 300
"""Characters of a cause that are shown."""
PREFIX = r"(?:\([\w.-]+(?: [\w.-]+)? pid=\d+\)\s+)?(?:(?:ERROR|CRITICAL)\s[^\[]*\[[^\]]*\]\s+)?(?:\[[^\]]*\]\s+)?"
"""What servers put before a line: the process, the level with time and source, or the time alone."""
NAME = r"(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Exit|Failure|Timeout)"
RAISED = re.compile(rf"{PREFIX}({NAME}: \S.*)")
REFUSED = re.compile(r"\S+: error: (.+)")
"""A command line that the server rejects."""
CRASHED = re.compile(rf"{PREFIX}((?:Fatal Python error|Segmentation fault|terminate called|Bus error).*)")
ECHOES = re.compile(
    r"[Ss]ee (?:root cause|stack trace)|[Ee]ngine core initialization failed|EngineDeadError|ConnectionResetError|"
    r"BrokenPipeError|EOFError|RequestValidationError|CancelledError|SystemExit|failed core proc|"
    r"[Ww]orker failed with error"
)
"""Exceptions that only report another failure or an invalid request."""
COUNTED = re.compile(r"ValidationError: \d+ validation errors? for ")
"""Pydantic reports a count of errors; the lines below contain the field and, indented, the error."""


def cause(log: str) -> str | None:
    """Return the line with the cause of a server's death; None if there is none."""
    lines = log.splitlines()
    found = [match[1] + _detail(lines, i) for i, line in enumerate(lines) if (match := _cause_in(line))]
    causes = [line for line in found if not ECHOES.search(line)] or found
    return _short(causes[-1]) if causes else None


def _cause_in(line: str) -> re.Match[str] | None:
    return RAISED.match(line) or REFUSED.match(line) or CRASHED.match(line)


def _detail(lines: Sequence[str], number: int) -> str:
    """Return the details that follow a line with only a count."""
    if not COUNTED.search(lines[number]):
        return ""
    below = [re.sub(rf"^{PREFIX}", "", line) for line in lines[number + 1 : number + 3]]
    return ": " + ": ".join(line.strip() for line in (below[:1] if below and below[0].startswith("  ") else below))


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def last_line(log: str) -> str | None:
    """Return the last line that is not blank."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return _short(lines[-1]) if lines else None


def exit_of(returncode: int) -> str:
    """Describe how a process ended."""
    if returncode >= 0:
        return f"exit status {returncode}"
    name = signal.Signals(-returncode).name
    by = ", by someone or for lack of memory" if name == "SIGKILL" else ""
    return f"killed by {name}{by}"
