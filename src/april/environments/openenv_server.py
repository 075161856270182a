"""Environments of OpenEnv behind a server, by its URL; april needs no package of OpenEnv for them.

    [environment]
    path = "openenv:http://127.0.0.1:8000"

Invariants:
- an episode has a session of its own: a WebSocket, as OpenEnv's clients have it;
- a turn that is no action, and an action that the server refuses, are answered by an observation that names the error;
- a server that is gone, or has no place for another session, is an environment that is lost.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import aiohttp

from april.loading import load_object
from april.rollout.episodes.environment import EnvironmentLost, EnvStep, Message, Observation, ObservationError, Turn

CHECK_SECONDS = 60.0
"""Time limit of the request that reads the server's schema."""
OWN = ("metadata", "done", "reward")
"""Fields of OpenEnv's actions and observations that are none of the environment's."""
REFUSED = ("VALIDATION_ERROR",)
"""Codes of errors that the policy's action causes."""
TEXTS = ("text", "message", "content", "output", "result", "prompt")
"""Fields of an observation that are its text, if there is no other."""


class OpenEnvServer:
    """A session of an OpenEnv server.

    Args:
        url: the server's address.
        action: a function of yours, `FILE.py:NAME`, that converts a turn's text to the fields of an action; it raises
            ValueError with a message to the policy. Unset: the text is the action's only field of text, or the JSON
            object of the action.
        observation: a function that converts the fields of an observation to text or messages. Unset: its field of text
            if it has one, else the observation as JSON.
        params: further arguments of the server's reset.

    Raises:
        ValueError: the server does not answer, or is no OpenEnv server.
    """

    def __init__(self, url: str, action: str | None = None, observation: str | None = None, **params: Any) -> None:
        self._url = url.rstrip("/")
        self._params = params
        self._fields = _action_fields(self._url) if action is None else {}
        self._action: Callable[[str], Any] = load_object("params.action", action) if action else self._usual_action
        self._observation: Callable[[Any], Observation] = (
            load_object("params.observation", observation) if observation else _usual_observation
        )
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def reset(self, prompt: Mapping[str, Any], seed: int) -> Observation:
        await self.close()
        self._session = aiohttp.ClientSession()
        try:
            self._socket = await self._session.ws_connect(f"{self._url}/ws", max_msg_size=0, heartbeat=60.0)
        except (aiohttp.ClientError, OSError) as error:
            raise EnvironmentLost(f"{self._url} is lost: {type(error).__name__}: {error}") from None
        # OpenEnv's environments draw from their seed; an id that is equal in a replay names the episode.
        data = {"seed": seed % 2**31, "episode_id": str(prompt["id"]), **self._params}
        begun = await self._asked({"type": "reset", "data": data})
        return self._observation(begun.get("observation", {}))

    async def step(self, turn: Turn) -> EnvStep:
        try:
            action = self._action(turn.text)
            answer = await self._asked({"type": "step", "data": action})
        except ObservationError:
            raise
        except ValueError as error:
            return EnvStep(f"Error: {error}")
        observation = self._observation(answer.get("observation", {}))
        return EnvStep(observation, float(answer.get("reward") or 0.0), bool(answer.get("done")))

    async def close(self) -> None:
        socket, self._socket = self._socket, None
        session, self._session = self._session, None
        if socket is not None and not socket.closed:
            await socket.close()
        if session is not None:
            await session.close()

    async def _asked(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the data of the server's answer.

        Raises:
            ValueError: the server refuses the action; the message is for the policy.
            ObservationError: the environment failed, or the answer is none of OpenEnv's.
            EnvironmentLost: the server is gone, or has no place.
        """
        if self._socket is None:
            raise ObservationError("step was called before reset")
        try:
            await self._socket.send_json(message)
            answer = await self._socket.receive()
        except (aiohttp.ClientError, OSError) as error:
            raise EnvironmentLost(f"{self._url} is lost: {type(error).__name__}: {error}") from None
        if answer.type is not aiohttp.WSMsgType.TEXT:
            raise EnvironmentLost(f"{self._url} closed the session ({answer.extra or answer.data or answer.type.name})")
        try:
            given = json.loads(answer.data)
            kind, data = given["type"], given["data"]
        except (ValueError, KeyError, TypeError):
            raise ObservationError(f"{self._url} answered {answer.data[:200]!r}: no message of OpenEnv") from None
        if kind == "error":
            self._refuse(data)
        if kind != "observation" or not isinstance(data, dict):
            raise ObservationError(f"{self._url} answered a message of type {kind!r}, and no observation")
        return data

    def _refuse(self, data: Mapping[str, Any]) -> None:
        code, message = data.get("code"), " ".join(str(data.get("message", data)).split())
        if code == "CAPACITY_REACHED":
            raise EnvironmentLost(f"{self._url} has no place for another session: {message}")
        if code in REFUSED:
            raise ValueError(message)
        raise ObservationError(f"{self._url}: {code}: {message}")

    def _usual_action(self, text: str) -> Any:
        texts = [name for name, field in self._fields.items() if field.get("type") == "string"]
        if len(self._fields) == 1 and texts:
            return {texts[0]: text}
        found = text[text.find("{") : text.rfind("}") + 1]
        try:
            action = json.loads(found)
        except ValueError:
            action = None
        if not isinstance(action, dict):
            raise ValueError(f"answer with a JSON object with the fields {', '.join(self._fields)}")
        return action


@cache
def _action_fields(url: str) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of an action's own fields, by name."""
    try:
        with urllib.request.urlopen(f"{url}/schema", timeout=CHECK_SECONDS) as answer:
            action = json.load(answer)["action"]
        return {name: field for name, field in action["properties"].items() if name not in OWN}
    except (OSError, ValueError) as error:
        raise ValueError(f"{url} does not answer: {getattr(error, 'reason', error)}") from None
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"{url}/schema describes no action: this is no OpenEnv server") from None


def _usual_observation(observation: Any) -> Observation:
    if not isinstance(observation, Mapping):
        return str(observation)
    messages = observation.get("messages")
    if isinstance(messages, list) and messages and all(isinstance(m, Mapping) and "role" in m for m in messages):
        said: list[Message] = messages
        return said
    own = {name: value for name, value in observation.items() if name not in OWN and value is not None}
    texts = [name for name, value in own.items() if isinstance(value, str)]
    if len(own) == 1 and texts:
        return str(own[texts[0]])
    if named := [name for name in TEXTS if name in texts]:
        return str(own[named[0]])
    return json.dumps(own, sort_keys=True, default=str)
