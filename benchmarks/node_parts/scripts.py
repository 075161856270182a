"""The user's own training script, run three ways; its output is kept without secrets."""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import threading
import time

from node_parts.given import Given
from parts import TAIL, Figures

from april.secrets import redact

GRACE_SECONDS = 10.0
"""Between the wish and the order to end."""


def synchronous(given: Given) -> Figures:
    yield from run(given, "synchronous")


def own_partial(given: Given) -> Figures:
    yield from run(given, "own-partial")


def with_april(given: Given) -> Figures:
    yield from run(given, "april")


def run(given: Given, name: str) -> Figures:
    """Run a command until it ends, or for `run_seconds`: which of both is no failure."""
    command, pattern = given.commands[name], re.compile(given.metric) if given.metric else None
    yield "command", redact(command)
    began = time.perf_counter()
    process = subprocess.Popen(
        command, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    orders = [
        threading.Timer(given.run_seconds, os.killpg, (process.pid, signal.SIGTERM)),
        threading.Timer(given.run_seconds + GRACE_SECONDS, os.killpg, (process.pid, signal.SIGKILL)),
    ]
    for order in orders:
        order.start()
    values: list[float] = []
    tail: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        tail = [*tail, redact(line.rstrip())][-TAIL:]
        for found in pattern.findall(line) if pattern else ():
            values.append(float(found))
            yield "values", values
    status, seconds = process.wait(), time.perf_counter() - began
    for order in orders:
        order.cancel()
    ended = seconds >= given.run_seconds
    yield "wall_seconds", seconds
    yield "ended_by", "the time limit" if ended else f"itself, with exit status {status}"
    if values:
        yield "median", statistics.median(values)
    yield "tail", tail
    yield "failures", [] if ended or status == 0 else [f"exit status {status}", *tail[-3:]]
