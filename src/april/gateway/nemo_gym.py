"""Episodes of a NeMo Gym resources server, by its URL.

april takes the place of NeMo Gym's agent and model servers: it requests turns through the gateway's Responses API,
sends the policy's tool calls to the resources server, and lets that server verify the result. Servers of both kinds are
played: those with `/seed_session`, tools and `/verify`, and those with `/reset` and `/step`.

    [environment]
    path = "nemo-gym:http://127.0.0.1:8000"
    [task]
    kind = "nemo_gym"
    path = "example.jsonl"

Invariants:
- a session of the server belongs to one episode: its cookies are kept for that episode alone;
- the policy reaches the tools of its record, and no other path of the server;
- an error of a tool is the policy's observation; an error of `/verify`, `/seed_session`, `/reset` or `/step` leaves the
  episode without a reward, and a server that is gone is an environment that is lost.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import aiohttp

from april.gateway.access import Access
from april.gateway.agent import Program, parsed, watched_session
from april.rollout.episodes.environment import EnvironmentLost, ObservationError, Unrewarded
from april.rollout.episodes.turns import AgentOutcome, AgentStart
from april.rollout.json_types import finite_number
from april.rollout.user_code.user_code import in_one_line

CHECK_SECONDS = 60.0
"""Time limit of the request that reads the server's interface before the run; the server makes it on demand."""
GONE = (502, 503, 504)
"""Statuses of a server that may be back later."""
SHOWN = 300
"""Characters of a server's error that a message contains."""
PARAMETERS = "responses_create_params"
"""Column of a record with the policy's first request."""


class NeMoGymProgram(Program):
    """A resources server.

    Args:
        path: `nemo-gym:` and the server's URL.
        headers: headers of each request to the server.
        reset_timeout: seconds of `/seed_session` or `/reset`; None: no limit.
        step_timeout: seconds of each other request to the server; None: no limit.
        max_turns: turns after which an episode ends and is rewarded; None: no limit.

    Raises:
        ValueError: there is no such server, or it is of another kind.
    """

    def __init__(
        self,
        path: str,
        headers: Mapping[str, str] | None = None,
        reset_timeout: float | None = None,
        step_timeout: float | None = None,
        max_turns: int | None = None,
    ) -> None:
        self._url = path.removeprefix("nemo-gym:").rstrip("/")
        self._headers = dict(headers or {})
        self._reset_timeout = reset_timeout
        self._step_timeout = step_timeout
        self.max_turns = max_turns
        paths = _paths(path, self._url, self._headers)
        self._steps = "/step" in paths
        if not self._steps and "/verify" not in paths:
            kind = "an agent server; name its resources server" if "/run" in paths else "no resources server"
            raise ValueError(f"environment.path = {path!r}: this is {kind} (it has neither /verify nor /step)")

    async def play(self, start: AgentStart, access: Access) -> AgentOutcome:
        if not isinstance(start.row.get(PARAMETERS), Mapping):
            raise ObservationError(f"the record has no {PARAMETERS}: task.path must be data of NeMo Gym")
        jar = aiohttp.CookieJar(unsafe=True)  # also for servers that are named by an IP address
        async with watched_session(jar) as session:
            episode = _Episode(self, session, start.row, access)
            try:
                return await (episode.steps() if self._steps else episode.verified())
            except (EnvironmentLost, ObservationError):
                raise
            except Exception as error:
                raise Unrewarded(f"{self._url} gave an answer that cannot be read: {in_one_line(error)}") from error

    async def post(self, session: aiohttp.ClientSession, path: str, body: Any, begin: bool = False) -> tuple[int, str]:
        """Return status and text of the server's answer.

        Args:
            begin: whether the request begins an episode, which decides its time limit.

        Raises:
            EnvironmentLost: the server does not answer.
        """
        seconds = self._reset_timeout if begin else self._step_timeout
        try:
            async with session.post(
                self._url + path, json=body, headers=self._headers, timeout=aiohttp.ClientTimeout(total=seconds)
            ) as response:
                status, text = response.status, await response.text(errors="replace")
        except TimeoutError:
            raise EnvironmentLost(f"{self._url}{path} did not answer within {seconds} s") from None
        except aiohttp.ClientError as error:
            raise EnvironmentLost(f"{self._url}{path} is lost: {type(error).__name__}: {error}") from None
        if status in GONE:
            raise EnvironmentLost(f"{self._url}{path} answered {status}: {text[:SHOWN]}")
        return status, text

    async def answer(self, session: aiohttp.ClientSession, path: str, body: Any, begin: bool = False) -> dict[str, Any]:
        """Return the server's answer as an object.

        Raises:
            Unrewarded: the server reports an error, or answers no object.
        """
        status, text = await self.post(session, path, body, begin)
        if status >= 400:
            raise Unrewarded(f"{self._url}{path} answered {status}: {' '.join(text[:SHOWN].split())}")
        given = parsed(text)
        if not isinstance(given, dict):
            raise Unrewarded(f"{self._url}{path} answered no JSON object: {text[:SHOWN]!r}")
        return given


class _Episode:
    """One episode, as NeMo Gym's `simple_agent` and `gymnasium_agent` play it."""

    def __init__(
        self, program: NeMoGymProgram, session: aiohttp.ClientSession, row: Mapping[str, Any], access: Access
    ) -> None:
        self._program = program
        self._session = session
        self._row = {name: value for name, value in row.items() if name not in ("id", "prompt", "answer", "seed")}
        self._access = access
        self._tools = {tool.get("name") for tool in row[PARAMETERS].get("tools") or ()}
        asked = row[PARAMETERS].get("input", [])
        self._input: list[Any] = [{"role": "user", "content": asked}] if isinstance(asked, str) else [*asked]
        self._output: list[Any] = []
        self._turns = 0

    @property
    def _last(self) -> bool:
        """Whether the policy has had its last turn."""
        return self._turns == self._program.max_turns

    async def verified(self) -> AgentOutcome:
        """Play an episode of a server with `/verify`."""
        begun = await self._program.answer(self._session, "/seed_session", self._row, begin=True)
        if begun.get("mcp"):
            raise ObservationError("the server offers its tools by MCP, which april does not support for NeMo Gym")
        while True:
            response = await self._turn()
            calls = [item for item in response["output"] if item.get("type") == "function_call"]
            if not calls or response.get("incomplete_details"):
                break
            for call in calls:
                self._observe(call, await self._called(call))
            if self._last:
                break
        response["output"] = self._output
        result = await self._program.answer(self._session, "/verify", {**self._row, "response": response})
        return AgentOutcome(_reward(result, "/verify"), _numbers(result))

    async def steps(self) -> AgentOutcome:
        """Play an episode of a server with `/step`."""
        begun = await self._program.answer(self._session, "/reset", self._row, begin=True)
        if begun.get("observation"):
            self._input.append({"role": "user", "content": begun["observation"]})
        total = 0.0
        while True:
            response = await self._turn()
            step = await self._program.answer(self._session, "/step", {**self._row, "response": response})
            total += _reward(step, "/step")
            if step.get("terminated") or step.get("truncated") or self._last:
                info = step.get("info")
                return AgentOutcome(total, _numbers(info if isinstance(info, Mapping) else {}))
            for output in (step.get("info") or {}).get("tool_outputs", []):
                self._observe(output, output.get("output", ""))
            if step.get("observation"):
                self._output.append({"role": "user", "content": step["observation"]})

    async def _turn(self) -> dict[str, Any]:
        """Return the policy's next turn as a response, with its items appended to the conversation."""
        body = {**self._row[PARAMETERS], "input": [*self._input, *self._output], "model": self._access.model}
        headers = {"Authorization": f"Bearer {self._access.secret}"}
        address = f"{self._access.address}/v1/responses"
        async with self._session.post(address, json=body, headers=headers) as response:
            text = await response.text()
        given = parsed(text)
        if response.status >= 400 or not isinstance(given, dict):
            raise ObservationError(f"the gateway answered {response.status}: {text[:SHOWN]}")
        self._output += given["output"]
        self._turns += 1
        return given

    async def _called(self, call: Mapping[str, Any]) -> str:
        """Return the output of a tool."""
        if call["name"] not in self._tools:  # it may be a path such as `verify`, which would reward the episode
            return json.dumps({"error": f"There is no tool {call['name']!r}"})
        arguments = parsed(call["arguments"])
        if not isinstance(arguments, dict):
            return json.dumps({"error": "Invalid tool call arguments: they must be a JSON object"})
        _, text = await self._program.post(self._session, "/" + quote(call["name"], safe=""), arguments)
        return text

    def _observe(self, call: Mapping[str, Any], output: str) -> None:
        self._output.append({"type": "function_call_output", "call_id": call["call_id"], "output": output})


def _paths(path: str, url: str, headers: Mapping[str, str]) -> Sequence[str]:
    """Return the paths of a server's interface."""
    request = urllib.request.Request(f"{url}/openapi.json", headers=dict(headers))
    try:
        with urllib.request.urlopen(request, timeout=CHECK_SECONDS) as answer:
            return list(json.load(answer)["paths"])
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ValueError(f"environment.path = {path!r}: the server does not answer: {reason}") from None
    except (KeyError, TypeError):
        raise ValueError(f"environment.path = {path!r}: {url}/openapi.json describes no interface") from None


def _reward(result: Mapping[str, Any], path: str) -> float:
    reward = finite_number(result.get("reward"))
    if reward is None:
        raise Unrewarded(f"{path} answered no reward that is a finite number")
    return reward


def _numbers(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers and short texts of a result, to keep with the episode."""
    return {
        name: value
        for name, value in result.items()
        if name != "reward" and isinstance(value, bool | int | float | str) and len(str(value)) <= SHOWN
    }
