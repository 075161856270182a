"""What an environment is, and the bridge that turns what it says into tokens.

Invariants:
- an environment is the user's object: it needs nothing of april but `EnvStep`, and sees turns as text;
- the core sees tokens: only a bridge reads a turn as text, and only a bridge puts tokens around an observation;
- a turn is never tokenised or rendered again: a bridge says which tokens come behind what is there, or that it cannot.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from april.rollout.json_types import encodable, finite_number, json_types, shown
from april.rollout.tokens import MOST_TOKEN_ID
from april.rollout.trajectory import Prompt, Sample
from april.rollout.user_code import in_one_line


class TokenIds(tuple[int, ...]):
    """An observation that is tokens already: put behind the turn as they are, with nothing around them."""


Message: TypeAlias = Mapping[str, Any]
"""A chat message: `role`, `content`, and what else the chat template knows."""
Observation: TypeAlias = str | Sequence[Message] | TokenIds
"""What an environment says: text (a message in the role that the bridge gives it), chat messages, or token ids."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What the policy said last, complete: the action that an environment answers."""

    sample_id: str
    index: int
    """0 for the first turn of the episode."""
    text: str
    token_ids: tuple[int, ...]
    """As they were sampled, the token that ended the turn included."""
    message: Message | None = None
    """The turn as a chat message with its tool calls, if the bridge reads such."""
    attempt: int = 0
    """How often the episode was begun again before."""

    @property
    def key(self) -> str:
        """Names this step of this episode; the same after a crash, so that a side effect is told from its repeat."""
        again = f"~{self.attempt}" if self.attempt else ""
        return f"{self.sample_id}{again}/{self.index}"


@dataclass(frozen=True, slots=True)
class EnvStep:
    """What an environment answers to a turn. (In april, a step is a step of training.)

    Args:
        observation: what the policy sees next; not needed once the episode is done.
        reward: of this turn.
        done: whether the episode is over.
        info: whatever else is worth keeping, as JSON types.
    """

    observation: Observation = ""
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """One episode's world. Every method may be sync or async.

    It may have `state() -> Any` (JSON types) and `restore(state)`, which the recovery `snapshot` needs.
    """

    def reset(self, prompt: Mapping[str, Any], seed: int) -> Observation | Awaitable[Observation]:
        """Begin. What it says comes behind the prompt; "" or no messages puts nothing there.

        Args:
            prompt: `id`, and what the prompt's record holds.
            seed: all randomness follows from it; equal for all samples of a group, so that they meet the same problem.
        """
        ...

    def step(self, turn: Turn) -> EnvStep | Awaitable[EnvStep]:
        """Answer a turn. After a crash the turns before are answered again (`replay`), and one whose answer was not on
        disk yet: `turn.key` names it."""
        ...

    def close(self) -> Awaitable[None] | None:
        """The episode is over, or given up."""
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
    """Text and tokens, exactly: what is there stays, only a suffix is ever made."""

    def begin(self, prompt: Prompt, observation: Observation) -> Sequence[int] | None:
        """The tokens that `reset`'s observation puts behind the prompt's, up to where the policy speaks; may be empty.
        None: it cannot be put there exactly, and the sample ends (`FinishReason.BRIDGE`)."""
        ...

    def read(self, token_ids: Sequence[int]) -> Said:
        """The tokens of one policy turn as text, and as a message if that is asked for."""
        ...

    def extend(self, sample: Sample, observation: Observation) -> Sequence[int] | None:
        """The tokens behind the sample's last turn up to where the policy speaks again: the rest of the turn's end, the
        observation, and what the chat template puts around it. None: as in `begin`."""
        ...


class CalledEnvironment(ABC):
    """Carries the calls of an environment to where it lives."""

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
        """What the environment's method of that name returns, or raises."""


class EnvironmentLost(Exception):
    """An environment is gone through no fault of the episode: its process died, its server does not answer. A new one
    is made and brought to where the old one was.

    Attributes:
        own: whether the episode may have lost it itself: it was at work then. Else another's fault took it along, and
            that is no attempt.
    """

    def __init__(self, message: str, own: bool = True) -> None:
        super().__init__(message)
        self.own = own


class ObservationError(ValueError):
    """An environment failed, or answered something that is no answer."""


def environment_error(error: Exception) -> str:
    """What an environment raised, in one line."""
    return str(error) if isinstance(error, ObservationError) else in_one_line(error)


def checked(step: Any) -> EnvStep:
    """`step` with its numbers as they are saved.

    Raises:
        ObservationError: names what is wrong.
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
    """The observation, its text encodable as UTF-8.

    Raises:
        ObservationError: it is neither text, chat messages nor token ids.
    """
    if isinstance(observation, str):
        return encodable(observation)
    if isinstance(observation, TokenIds):
        if all(isinstance(token, int) and 0 <= token <= MOST_TOKEN_ID for token in observation):
            return observation
        raise ObservationError("an observation of token ids holds something that is no token id")
    if isinstance(observation, Sequence) and all(isinstance(m, Mapping) and "role" in m for m in observation):
        messages: Sequence[Message] = saved(list(map(dict, observation)), "an observation")
        return messages
    raise ObservationError(
        f"an observation is {_short(observation)}: it must be text, a list of chat messages, or april.TokenIds"
    )


def fingerprint(observation: Observation) -> str:
    """The same for the same observation, in every process: 16 hex digits."""
    plain = observation if isinstance(observation, str) else [m if isinstance(m, int) else dict(m) for m in observation]
    text = json.dumps([type(observation) is TokenIds, plain], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def saved(value: Any, what: str) -> Any:
    """`value` as it comes back from disk.

    Raises:
        ObservationError: it does not survive JSON.
    """
    try:
        return json_types(value, what)
    except ValueError as error:
        raise ObservationError(f"{what} must be JSON types, to be saved with the sample: {error}") from None


def _short(value: Any) -> str:
    return f"a {type(value).__name__}, {shown(value)}"
