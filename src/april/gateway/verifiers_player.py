"""Plays episodes of a verifiers environment; runs in a worker process.

Invariants:
- all episodes of a process share its event loop, its interception server and its tool servers, as in verifiers' own
  environment server;
- a model request of an episode reaches that episode's address at the gateway, and no other: the trace that sent it
  determines the address, and a trace that has ended has none;
- an episode that is stopped has ended, with its processes, before `stop` returns.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

import httpx
from verifiers.v1.clients import Client, EvalClientConfig, ModelContext, resolve_client
from verifiers.v1.clients.client import SESSION_ID_HEADER
from verifiers.v1.clients.eval import EvalClient
from verifiers.v1.configs.client import BaseClientConfig
from verifiers.v1.dialects import Dialect
from verifiers.v1.episode import Episode
from verifiers.v1.errors import model_error
from verifiers.v1.interception import server
from verifiers.v1.trace import Trace
from verifiers.v1.utils.loaders import load_environment

from april.gateway.verifiers_config import environment_config
from april.rollout.json_types import json_types

POLICY = "http://april.invalid"
"""Base URL of the policy: requests go to the address of their episode instead."""
LOST = ("SandboxError", "InterceptionError", "TunnelError")
"""Errors of verifiers' own infrastructure: another attempt may succeed."""
PROGRAM = ("HarnessError", "ProviderError")
"""Errors of the harness's program, which the policy may have caused; all others are the environment's."""
ADDRESSES: dict[str, str] = {}
"""Base URL of the gateway for each trace in progress, with the episode's secret."""


class PolicyClient(EvalClient):
    """The policy, for all episodes of a process: verifiers keeps a client for each endpoint until its server ends."""

    async def _request(
        self, url: str, body: dict[str, Any], headers: httpx.Headers, *, stream: bool = False
    ) -> httpx.Response:
        trace = headers.get(SESSION_ID_HEADER)
        # Requests without a session count tokens, for which the address of any episode serves.
        address = ADDRESSES.get(trace) if trace is not None else next(iter(ADDRESSES.values()), None)
        if address is None:
            raise model_error("the episode has ended", status_code=410)
        response: httpx.Response = await super()._request(
            address + url.removeprefix(POLICY), body, headers, stream=stream
        )
        return response

    async def relay_aux(
        self, dialect: Dialect, route: str, body: dict[str, Any], headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        kept = httpx.Headers(headers)
        kept.pop(SESSION_ID_HEADER, None)  # a program's own session is none of verifiers'
        answer: dict[str, Any] = await super().relay_aux(dialect, route, body, kept)
        return answer


def _resolved(config: BaseClientConfig) -> Client:
    return PolicyClient(config) if config.base_url == POLICY else resolve_client(config)


class VerifiersPlayer:
    """`player(method, *args)` calls a method; the process of a `Worker` calls it from several threads.

    Args:
        path: see `environment_config`.
        params: see `environment_config`.
        max_turns: see `environment_config`.
    """

    def __init__(self, path: str, params: Mapping[str, Any], max_turns: int) -> None:
        # Tool servers are processes that import the environment's module by its name.
        folders = (os.path.dirname(path.removeprefix("verifiers:")), os.getcwd(), os.environ.get("PYTHONPATH", ""))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
        self._environment = load_environment(environment_config(path, params, max_turns))
        self._serving: asyncio.Task[AsyncExitStack] | None = None
        self._episodes: dict[int, asyncio.Task[Any]] = {}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        server.resolve_client = _resolved

    def __call__(self, method: str, *args: Any) -> Any:
        methods: dict[str, Callable[..., Coroutine[Any, Any, Any]]] = {
            "play": self._play,
            "stop": self._stop,
            "close": self._close,
        }
        return asyncio.run_coroutine_threadsafe(methods[method](*args), self._loop).result()

    async def _play(
        self, number: int, data: Mapping[str, Any], address: str, model: str, variables: Mapping[str, str]
    ) -> dict[str, Any] | None:
        """Play an episode.

        Args:
            number: number of the episode.
            data: the task's data.
            address: base URL of the gateway, with the episode's secret.
            model: name of the policy.
            variables: environment variables with which this process reaches the gateway.

        Returns:
            `reward`, `info` and `error` (see `_error`), or None if the episode was stopped.
        """
        os.environ.update(variables)
        playing = self._episodes[number] = asyncio.create_task(self._episode(data, address, model))
        try:
            return await asyncio.shield(playing)
        except asyncio.CancelledError:
            return None
        finally:
            del self._episodes[number]

    async def _stop(self, number: int) -> None:
        """Cancel an episode, and wait until it has ended."""
        if (playing := self._episodes.get(number)) is not None:
            playing.cancel()
            await asyncio.wait({playing})

    async def _close(self) -> None:
        for number in [*self._episodes]:
            await self._stop(number)
        if self._serving is not None:
            await (await self._serving).aclose()

    async def _episode(self, data: Mapping[str, Any], address: str, model: str) -> dict[str, Any]:
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve())
        await asyncio.shield(self._serving)
        task_class = type(self._environment.taskset).task_type()
        task = task_class(task_class.data_type().model_validate(data), self._environment.config.taskset.task)
        [slot] = self._environment.slots(task)
        traces: list[Trace] = []

        def begun(trace: Trace) -> None:
            traces.append(trace)
            ADDRESSES[trace.id] = address

        context = ModelContext(model, EvalClientConfig(base_url=POLICY, api_key_var="APRIL_NO_KEY"))
        try:
            return _outcome(await self._environment.run_slot(slot, context, on_trace=begun))
        finally:
            for trace in traces:
                ADDRESSES.pop(trace.id, None)

    async def _serve(self) -> AsyncExitStack:
        stack = AsyncExitStack()
        await stack.enter_async_context(self._environment.serving())
        return stack


def _outcome(episode: Episode) -> dict[str, Any]:
    """Return the reward of an episode, the values to keep with it, and its error. Several runs of the agent count as
    their mean."""
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    rewards = [trace.reward for trace in traces]
    info: dict[str, Any] = {
        name: value for trace in traces for name, value in trace.metrics.items() if value is not None
    }
    info |= {
        f"reward/{name}": reward.value
        for trace in traces
        for name, reward in trace.rewards.items()
        if reward is not None
    }
    if stops := [trace.stop_condition for trace in traces if trace.stop_condition]:
        info["stop_condition"] = stops[-1]
    more = {name: value for trace in traces for name, value in trace.info.items()}
    with suppress(ValueError):  # a task's notes may hold any Python value
        info |= json_types(more, "info")
    mean = sum(rewards) / len(rewards) if rewards else None
    return {"reward": mean, "info": info, "error": _error(episode, traces)}


def _error(episode: Episode, trained: Sequence[Trace]) -> tuple[str, str] | None:
    """Return why an episode has no reward: the kind, and one line. Kinds are `lost` (another attempt may succeed),
    `program` (the harness's program failed) and `environment`."""
    if not episode.ok:
        errors = [error for trace in episode.traces for error in trace.errors if not trace.ok] + episode.errors
        if not errors:
            return "environment", "the environment failed without an error"
        last = errors[-1]
        kinds = {error.type for error in errors}
        kind = "lost" if last.type in LOST else "program" if kinds <= {*PROGRAM} else "environment"
        return kind, f"{last.type}: {' '.join(last.message.split())}"
    # verifiers lists a reward as None until it is computed, also if the time limit of the scoring ends that.
    if missing := [name for trace in trained for name, reward in trace.rewards.items() if reward is None]:
        return "environment", f"the reward {missing[0]} was not computed: {trained[-1].stop_condition}"
    return None
