"""Protocol of environments, and of the bridge between their text and tokens.

Invariants:
- an environment is the user's object: it needs nothing of april but `EnvStep`, and sees turns as text;
- the core sees tokens: only a bridge reads a turn as text, and only a bridge puts tokens around an observation;
- a turn is never tokenised or rendered again: a bridge returns the tokens to append, or None if there are none.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from april.rollout.json_types import encodable, finite_number, json_types, shown
from april.rollout.trajectory.features import parts_of
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.sample import Sample
from april.rollout.trajectory.tokens import MAX_TOKEN_ID
from april.rollout.user_code.user_code import in_one_line


class TokenIds(tuple[int, ...]):
    """An observation in tokens, which are appended to the turn unchanged, with nothing around them."""


Message: TypeAlias = Mapping[str, Any]
"""A chat message: `role`, `content`, and other fields of the chat template."""
Observation: TypeAlias = str | Sequence[Message] | TokenIds
"""Text (a message in the role that the bridge gives it), chat messages, or token ids. The content of a message is text,
or a list of parts: `{"type": "text", "text": ...}` and `{"type": "image", "image": ...}`."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The policy's latest turn, complete: the action that an environment answers."""

    sample_id: str
    index: int
    """0 for the first turn of the episode."""
    text: str
    token_ids: tuple[int, ...]
    """The sampled tokens, including the token that ended the turn."""
    message: Message | None = None
    """The turn as a chat message with its tool calls, if the bridge reads messages."""
    attempt: int = 0
    """Number of times that the episode was restarted before."""

    @property
    def key(self) -> str:
        """Name of this step of this episode: the same after a crash, so that a side effect is not repeated."""
        return turn_name(self.sample_id, self.attempt, self.index)


def turn_name(sample_id: str, attempt: int, turn: int) -> str:
    """Return the name of a turn: the same after a crash."""
    return f"{sample_id}~{attempt}/{turn}" if attempt else f"{sample_id}/{turn}"


@dataclass(frozen=True, slots=True)
class EnvStep:
    """Answer of an environment to a turn. (In april, a step is a training step.)

    Args:
        observation: next message to the policy; not needed once the episode is done.
        reward: reward of this turn.
        done: whether the episode is over.
        info: additional data to keep, as JSON types.
    """

    observation: Observation = ""
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """Environment of one episode. Every method may be sync or async.

    It may have `state() -> Any` (JSON types) and `restore(state)`, which the recovery `snapshot` needs.
    """

    def reset(self, prompt: Mapping[str, Any], seed: int) -> Observation | Awaitable[Observation]:
        """Begin. The observation follows the prompt; "" or no messages adds nothing.

        Args:
            prompt: `id`, and what the prompt's record holds.
            seed: all randomness follows from it; equal for all samples of a group, so that they meet the same problem.
        """
        ...

    def step(self, turn: Turn) -> EnvStep | Awaitable[EnvStep]:
        """Answer a turn.

        After a crash, earlier turns are answered again (`replay`), and so is a turn whose answer was not on disk yet;
        `turn.key` identifies it."""
        ...

    def close(self) -> Awaitable[None] | None:
        """Close the environment: the episode has ended, or was abandoned."""
        ...


@runtime_checkable
class Saves(Protocol):
    """An environment that can be saved and restored."""

    def state(self) -> Any: ...

    def restore(self, state: Any) -> Any: ...


class Said(NamedTuple):
    """A turn as its environment reads it."""

    text: str
    message: Message | None = None


class Bridge(Protocol):
    """Exact conversion between text and tokens: existing tokens stay, only a suffix is ever added."""

    def begin(self, prompt: Prompt, observation: Observation) -> Sequence[int] | None:
        """Return the tokens that `reset`'s observation adds to the prompt, up to the policy's turn; may be empty.

        None: the observation cannot be added exactly, and the sample ends (`FinishReason.BRIDGE`)."""
        ...

    def read(self, token_ids: Sequence[int]) -> Said:
        """Return the tokens of one policy turn as text, and as a message if the environment needs one."""
        ...

    def extend(self, sample: Sample, observation: Observation) -> Sequence[int] | None:
        """Return the tokens from the sample's last turn to the policy's next turn: the rest of the turn's end, the
        observation, and the chat template's tokens around it. None: as in `begin`."""
        ...


class CalledEnvironment(ABC):
    """An environment in another process, or on another machine, as an object that is called here."""

    async def reset(self, prompt: Mapping[str, Any], seed: int) -> Observation:
        observation: Observation = await self._call("reset", prompt, seed)
        return observation

    async def step(self, turn: Turn) -> EnvStep:
        step: EnvStep = await self._call("step", turn)
        return step

    async def state(self) -> Any:
        return await self._call("state")

    async def restore(self, state: Any) -> None:
        await self._call("restore", state)

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    async def _call(self, method: str, *args: Any) -> Any:
        """Return what the environment's method of that name returns, or raise its exception."""


class EnvironmentLost(Exception):
    """An environment is lost without an error of its own: its process died, or its server does not answer. A new one is
    made and brought to the same turn.

    Attributes:
        own: whether the episode may have lost it itself: it was at work then. Else another's fault took it along, and
            that is no attempt.
    """

    def __init__(self, message: str, own: bool = True) -> None:
        super().__init__(message)
        self.own = own


class ObservationError(ValueError):
    """An environment failed, or its answer is of the wrong type.

    Args:
        message: the reason.
        info: values to keep with the episode, as JSON types.
    """

    def __init__(self, message: str = "", info: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.info = dict(info or {})


class Unrewarded(ObservationError):
    """An episode was played, and its reward could not be obtained: no reward stands in for it, so its group is left
    out."""


def environment_error(error: Exception) -> str:
    """Return an environment's exception in one line."""
    return str(error) if isinstance(error, ObservationError) else in_one_line(error)


def checked(step: Any) -> EnvStep:
    """Return `step` with its numbers as they are saved.

    Raises:
        ObservationError: part of the step is wrong; the message names it.
    """
    if not isinstance(step, EnvStep):
        raise ObservationError(f"step returned {_short(step)}: it must return an EnvStep")
    reward = finite_number(step.reward)
    if reward is None:
        raise ObservationError(f"step returned the reward {shown(step.reward)}, which is no finite number")
    observation = checked_observation(step.observation)
    if not isinstance(step.info, Mapping):
        raise ObservationError(f"step returned the info {_short(step.info)}: it must be a dict")
    return EnvStep(observation, reward, bool(step.done), saved(step.info, "info"))


def checked_observation(observation: Any) -> Observation:
    """Return the observation, with its text encodable as UTF-8.

    Raises:
        ObservationError: it is neither text, chat messages nor token ids.
    """
    if isinstance(observation, str):
        return encodable(observation)
    # Before the check of messages: TokenIds is a sequence too, and an empty one would pass as no messages.
    if isinstance(observation, TokenIds):
        if all(isinstance(token, int) and 0 <= token <= MAX_TOKEN_ID for token in observation):
            return observation
        raise ObservationError("an observation of token ids holds something that is no token id")
    if isinstance(observation, Sequence) and all(isinstance(m, Mapping) and "role" in m for m in observation):
        messages: Sequence[Message] = saved(list(map(dict, observation)), "an observation")
        return messages
    raise ObservationError(
        f"an observation is {_short(observation)}: it must be text, a list of chat messages, or april.TokenIds"
    )


def holds_images(observation: Any) -> bool:
    """Whether an observation is a list of chat messages with images."""
    if isinstance(observation, str | TokenIds) or not isinstance(observation, Sequence):
        return False
    messages = [message for message in observation if isinstance(message, Mapping)]
    return any(part.get("type") in ("image", "image_url") for message in messages for part in parts_of(message))


def fingerprint(observation: Observation) -> str:
    """Return 16 hex digits that are equal for equal observations, in every process."""
    plain = observation if isinstance(observation, str) else [m if isinstance(m, int) else dict(m) for m in observation]
    text = json.dumps([type(observation) is TokenIds, plain], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def saved(value: Any, what: str) -> Any:
    """Return `value` as it will be read from disk.

    Raises:
        ObservationError: it does not survive JSON.
    """
    try:
        return json_types(value, what)
    except ValueError as error:
        raise ObservationError(f"{what} must be JSON types, to be saved with the sample: {error}") from None


def _short(value: Any) -> str:
    return f"a {type(value).__name__}, {shown(value)}"
