"""Episodes of a verifiers environment, in worker processes.

Invariants:
- the policy of an episode is its own address at the gateway;
- an episode that is cancelled ends alone: its process is killed only if it does not stop in time, and its other
  episodes are then lost without being the cause.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from april.gateway.access import Access, without_proxy
from april.gateway.agent import GRACE, Program
from april.gateway.verifiers_config import environment_config
from april.rollout.episodes.environment import EnvironmentLost, ObservationError, Unrewarded
from april.rollout.episodes.turns import AgentOutcome, AgentStart
from april.rollout.user_code.workers import Worker, WorkerDied, WorkerLimits


class VerifiersProgram(Program):
    """A verifiers environment; the episode's record holds the data of its task as `task`.

    Args:
        path: `verifiers:` and the name of an installed environment or a Python file.
        params: verifiers' own settings of the environment.
        max_turns: limit of turns of an agent that has none.
        workers: largest number of processes. One is started with the first episode, another when all are in use.
        share: episodes of a process at a time.
        keep_env: variables that the processes get although their names look like secrets.

    Raises:
        ValueError: see `environment_config`.
    """

    def __init__(
        self,
        path: str,
        params: Mapping[str, Any],
        max_turns: int,
        workers: int,
        share: int,
        keep_env: Sequence[str] = (),
    ) -> None:
        environment_config(path, params, max_turns)
        self._load = pickle.dumps(partial(_player, path, dict(params), max_turns))
        # `stop` and `close` must find a thread while every episode holds one.
        self._limits = WorkerLimits(2 * share + 1, keep_env=tuple(keep_env))
        self._most = workers
        self._workers: list[Worker] = []
        self._numbers = itertools.count()

    async def play(self, start: AgentStart, access: Access) -> AgentOutcome:
        if "task" not in start.row:
            raise ObservationError('the problem is no task of verifiers: set task.kind = "verifiers"')
        worker, number = self._place(), next(self._numbers)
        variables = without_proxy(access.address, os.environ)
        call = worker.call("play", number, start.row["task"], access.path_address, access.model, variables)
        playing = asyncio.ensure_future(call)
        try:
            outcome = await asyncio.shield(playing)
        except asyncio.CancelledError:
            await _stop(worker, number, playing)
            raise
        except WorkerDied as died:
            raise EnvironmentLost(str(died), died.own) from None
        if outcome is None:
            raise EnvironmentLost("its process was closed")
        if outcome["error"] is not None:
            kind, message = outcome["error"]
            if kind == "lost":
                raise EnvironmentLost(message)
            raise (ObservationError if kind == "program" else Unrewarded)(message, outcome["info"])
        return AgentOutcome(outcome["reward"], outcome["info"])

    async def close(self) -> None:
        workers = [worker for worker in self._workers if worker.alive]
        closing = [asyncio.create_task(worker.call("close")) for worker in workers]
        if closing:
            await asyncio.wait(closing, timeout=GRACE)
        for worker, closed in zip(workers, closing, strict=True):
            closed.cancel()
            worker.kill("the run has ended")

    def _place(self) -> Worker:
        """Return the process for a new episode."""
        self._workers = [worker for worker in self._workers if worker.alive]
        if len(self._workers) < self._most and all(worker.busy for worker in self._workers):
            self._workers.append(Worker(self._load, self._limits))
        return min(self._workers, key=lambda worker: worker.busy)


async def _stop(worker: Worker, number: int, playing: asyncio.Future[Any]) -> None:
    """End an episode; its process too, if the episode does not stop."""
    stopping = asyncio.ensure_future(worker.call("stop", number))
    try:
        await asyncio.wait({stopping, playing}, timeout=GRACE)
    finally:
        for call in (stopping, playing):  # a call that is cancelled ends its process
            call.cancel()
        await asyncio.gather(stopping, playing, return_exceptions=True)


def _player(path: str, params: Mapping[str, Any], max_turns: int) -> Any:
    """Return the function of a worker process; called there."""
    from april.gateway.verifiers_player import VerifiersPlayer

    return VerifiersPlayer(path, params, max_turns)
