"""Error messages of commands."""

from __future__ import annotations

import sys
from contextlib import suppress

from april.secrets import redact


def fail(message: str, status: int = 2) -> int:
    """Print the message on stderr with the prefix `april: ` on each line, and return the exit status."""
    with suppress(OSError):  # the terminal may be gone
        for line in redact(message).splitlines():
            print(f"april: {line}", file=sys.stderr)
    return status
