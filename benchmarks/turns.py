"""Processes that take turns, so that whatever else the machine does slows all of them alike."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Any

TURN = 0.1
"""Seconds for which one works and the others are stopped."""


def take_turns(commands: Sequence[dict[str, Any]]) -> list[float]:
    """Run all to their ends, one at a time; each is what `subprocess.Popen` takes.

    Returns:
        processor seconds of each.

    Raises:
        SystemExit: one of them fails. The others are killed then.
    """
    processes: list[subprocess.Popen[bytes]] = []
    seconds = [0.0] * len(commands)
    try:
        for command in commands:
            processes.append(subprocess.Popen(**command))
            os.kill(processes[-1].pid, signal.SIGSTOP)
        while working := [place for place, process in enumerate(processes) if process.returncode is None]:
            for place in working:
                seconds[place] = _turn(processes[place])
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
                process.wait()
    return seconds


def _turn(process: subprocess.Popen[bytes]) -> float:
    """Let it work for a while; its processor seconds if it has come to its end."""
    os.kill(process.pid, signal.SIGCONT)
    until = time.monotonic() + TURN
    while time.monotonic() < until:
        ended, status, usage = os.wait4(process.pid, os.WNOHANG)
        if ended:
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode:
                raise SystemExit(f"{process.args}: exit status {process.returncode}")
            return usage.ru_utime + usage.ru_stime
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGSTOP)
    return 0.0
