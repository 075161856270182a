"""`april ARGUMENTS` in processes of their own that need not import anything: they are forked from one that has.

A process that does not end within its limit is killed and reported, so a test can tell a hang from a failure.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

PRELOAD = ["april.commands.main", "april.commands.train", "april.commands.resume", "tests.tiny", "tests.forked"]


@dataclass(frozen=True)
class Outcome:
    """How a process ended.

    Args:
        status: its exit status; None if it did not end within its limit, negative for a signal.
        output: standard output and standard error.
    """

    status: int | None
    output: str

    @property
    def orderly(self) -> bool:
        """Whether it succeeded, or failed with a message of april's own and no traceback."""
        if "Traceback (most recent call last)" in self.output:
            return False
        named = any(line.startswith("april: ") for line in self.output.splitlines())
        return self.status == 0 or (self.status in (1, 2, 130) and named)


def _child(arguments: list[str], directory: str, output: str) -> None:
    os.chdir(directory)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    from april.commands.main import run

    try:
        status = run(arguments)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
        status = 70
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def april(*arguments: object, directory: Path, limit: float = 120) -> Outcome:
    """Run a command in `directory` for at most `limit` seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    output = directory / "output.txt"
    process = context.Process(target=_child, args=([*map(str, arguments)], str(directory), str(output)))
    process.start()
    process.join(limit)
    status = process.exitcode
    if status is None:
        process.kill()
        process.join()
    text = output.read_text(errors="replace") if output.exists() else ""
    return Outcome(status, text)
