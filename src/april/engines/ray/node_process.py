"""A program on a node, with the interface of `subprocess.Popen`.

Invariant: the return code is set as soon as the program has ended, or `SILENCE + BEAT` seconds after the last answer of
its actor.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from april.engines.ray.actor_channel import BEAT, PINGS, SILENCE, reason_of
from april.engines.ray.actor_placement import ActorPlacement
from april.engines.ray.head import release
from april.rollout.patience import TICKS


class NodeProcess:
    """A program that is started at once. `kill` releases its resources.

    Args:
        placement: where; it hosts a process, and has been opened.
        environment, stdin, log: as of `ProcessActor.start`.

    Attributes:
        line: descriptor from which the program's reports are read.
        returncode: as of `Popen`; -SIGKILL if the program was lost.
        lost: reason, if its actor or its node was lost.
    """

    def __init__(self, placement: ActorPlacement, environment: Mapping[str, str], stdin: str, log: Path) -> None:
        self.returncode: int | None = None
        self.lost = ""
        self.line, self._theirs = os.pipe()
        self._placement = placement
        self._starting = placement.actor.start.remote(environment, stdin, log)
        self._watching = threading.Thread(target=self._watch, daemon=True)
        self._watching.start()

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        """Kill the program and release its resources. No more reports are read."""
        if self.returncode is None:
            with suppress(RayError):
                ray.get(self._placement.actor.kill.remote(), timeout=SILENCE)
            if self.returncode is None:
                self.returncode = -signal.SIGKILL
        asyncio.run(release(self._placement.end))
        self._watching.join()

    def wait(self) -> int:
        """Return the return code of a program that was killed."""
        assert self.returncode is not None
        return self.returncode

    def _watch(self) -> None:
        status, actor = -signal.SIGKILL.value, self._placement.actor
        try:
            self._get(self._starting)
            while True:
                data, ended = self._get(actor.read.remote())
                os.write(self._theirs, data)
                if ended is not None:
                    status = ended
                    break
        except GetTimeoutError:
            self._lose(f"no answer to a heartbeat in {SILENCE:g} s")
        except RayError as error:
            self._lose(reason_of(error))
        # Set before the pipe closes: a reader that finds the end may query the return code at once.
        self.returncode = status if self.returncode is None else self.returncode
        os.close(self._theirs)

    def _lose(self, reason: str) -> None:
        if self.returncode is None:
            self.lost = f"on the node at {self._placement.node.address}: {reason}"

    def _get(self, answer: ray.ObjectRef[Any]) -> Any:
        """Wait for an answer of the actor for as long as it answers heartbeats."""
        while not ray.wait([answer], timeout=BEAT)[0]:
            ping = self._placement.actor.ping.options(concurrency_group=PINGS).remote()
            # In parts: while this process is not scheduled, the answer cannot be read.
            if not any(ray.wait([ping], timeout=SILENCE / TICKS)[0] for _ in range(TICKS)):
                raise GetTimeoutError
            ray.get(ping)
        return ray.get(answer)
