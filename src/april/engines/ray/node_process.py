"""A program on a node, seen from here much as `subprocess.Popen` shows one that runs here.

Invariant: it has a return code as soon as it has ended, and within `SILENCE + BEAT` seconds of the last answer of its
actor.
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


class NodeProcess:
    """Started at once. `kill` gives its place back.

    Args:
        placement: where; it hosts a process, and has been opened.
        environment, told, log: as of `ProcessActor.start`.

    Attributes:
        line: the descriptor from which what it reports is read.
        returncode: as of `Popen`; that of SIGKILL, too, if it was lost.
        lost: how it was lost, if its actor or its node was.
    """

    def __init__(self, placement: ActorPlacement, environment: Mapping[str, str], told: str, log: Path) -> None:
        self.returncode: int | None = None
        self.lost = ""
        self.line, self._theirs = os.pipe()
        self._placement = placement
        self._starting = placement.actor.start.remote(environment, told, log)
        self._watching = threading.Thread(target=self._watch, daemon=True)
        self._watching.start()

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        """End it, and give its place back. Nothing is heard of it any more."""
        if self.returncode is None:
            with suppress(RayError):
                ray.get(self._placement.actor.kill.remote(), timeout=SILENCE)
            if self.returncode is None:
                self.returncode = -signal.SIGKILL
        asyncio.run(release(self._placement.end))
        self._watching.join()

    def wait(self) -> int:
        """The return code of one that was killed."""
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
        self.returncode = status if self.returncode is None else self.returncode
        os.close(self._theirs)

    def _lose(self, reason: str) -> None:
        if self.returncode is None:
            self.lost = f"on the node at {self._placement.node.address}: {reason}"

    def _get(self, answer: ray.ObjectRef[Any]) -> Any:
        """An answer of the actor, however long that takes, as long as its heart beats."""
        while not ray.wait([answer], timeout=BEAT)[0]:
            ray.get(self._placement.actor.ping.options(concurrency_group=PINGS).remote(), timeout=SILENCE)
        return ray.get(answer)
