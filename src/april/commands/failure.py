"""How a command that cannot go on says so."""

from __future__ import annotations

import sys


def fail(message: str, status: int = 2) -> int:
    """Print the message on stderr, each line as april's, and return the exit status."""
    for line in message.splitlines():
        print(f"april: {line}", file=sys.stderr)
    return status
