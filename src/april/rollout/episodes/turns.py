"""Turns of programs: what a gateway asks the policy for, and what the policy answers.

A gateway translates between an API and these types; the rollouts stand behind `Policy`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from april.rollout.episodes.environment import Message
from april.rollout.stop_strings import Decode, Stop
from april.rollout.trajectory.routes import Routes

TurnEnd = Literal["stop", "length"]
"""Reason for the end of a turn: the policy drew a stop token or a stop string, or a limit on tokens or the context cut
the turn."""


SETTINGS = ("max_tokens", "stop", "temperature")
"""Settings that a request may have for its turn."""


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A request for the policy's next turn.

    Args:
        messages: the whole conversation so far or, with `parent`, the messages after that turn.
        tools: JSON schemas of the tools that are offered, as in the Chat Completions API.
        max_tokens: tokens that the turn may have; None: as many as the recipe allows.
        parent: id of the turn that this one continues (`previous_response_id`); None: it is found by the messages.
        key: idempotency key; a request with the same key gets the same turns.
        retry: the client sends the request again, after it received no answer.
        n: turns to draw, each a branch of its own.
        system: with `parent`, the system prompt that the request names; None: it names none, and the conversation's own
            stays. With another one the whole conversation is another.
        stop: stop strings of the turn, beside the recipe's. They are no part of its text.
        temperature: temperature of the turn, 0 for greedy; None: the recipe's.
        alias: another name of the turn, which `parent` of later requests may give: the client learns it before the turn
            is drawn.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    max_tokens: int | None = None
    parent: str | None = None
    key: str | None = None
    retry: bool = False
    n: int = 1
    system: str | None = None
    stop: Sequence[str] = ()
    temperature: float | None = None
    alias: str | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the turn, as JSON types, under the names in `SETTINGS`."""
        given = {"max_tokens": self.max_tokens, "stop": list(self.stop) or None, "temperature": self.temperature}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True)
class TurnReply:
    """A turn that the policy has drawn.

    Attributes:
        node_id: name of the turn in its episode, the same after a crash; a later request may give it as `parent`.
        message: the turn as an assistant's message (`Renderer.parse`). Ids of its tool calls are made from `node_id`.
        prompt_ids: all tokens before the turn, as the engine saw them.
        token_ids: the drawn tokens, including the token that ended the turn, or those of the stop string.
        logprobs: log-probability of each drawn token, in nats.
        end: reason for the end of the turn.
        versions: policy version of each drawn token.
        stop: the stop string that ended the turn; None: none did.
        routes: experts of the tokens before the turn and of its own, with router replay.
    """

    node_id: str
    message: Message
    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    end: TurnEnd
    versions: Sequence[int] = ()
    stop: str | None = None
    routes: Routes | None = None


class TurnError(Exception):
    """A request that gets no turn."""


class BadTurn(TurnError):
    """The request is wrong, or a limit refuses it; the episode continues. The message is for the client.

    Attributes:
        code: short name of the reason, as the API of OpenAI has them (`context_length_exceeded`, for example).
    """

    def __init__(self, message: str, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.code = code


class PromptTooLong(BadTurn):
    """The conversation leaves no room for a turn.

    Args:
        tokens: tokens of the conversation.
        most: tokens that it may have.
    """

    def __init__(self, tokens: int, most: int) -> None:
        super().__init__(
            f"This model's maximum context length is {most} tokens. However, your messages resulted in {tokens} "
            "tokens. Please reduce the length of the messages.",
            "context_length_exceeded",
        )
        self.tokens = tokens
        self.most = most


class EpisodeOver(TurnError):
    """The episode is unknown, has ended, or was abandoned."""


class Stopping(TurnError):
    """The run stops: a program that outlives it may send the request again after it has resumed."""


class Policy(Protocol):
    """Draws turns for the episodes in progress."""

    async def reply(self, episode_key: str, request: TurnRequest) -> Sequence[TurnReply]:
        """Return the `n` turns of a request once they are complete, however long that takes.

        Cancel the call if the client has left before an answer was sent: the turns are kept, and the same request gets
        them later.

        Raises:
            BadTurn: the request is refused.
            EpisodeOver: there is no such episode.
            Stopping: the run stops.
        """
        ...

    def undelivered(self, episode_key: str, node_ids: Sequence[str]) -> None:
        """The answer with these turns could not be sent: the same request gets them again."""
        ...


class Renderer(Protocol):
    """Conversion between messages and tokens for one model family."""

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """Tokens that end a turn."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Sequence[int]:
        """Return a conversation as tokens, up to the policy's turn.

        Raises:
            BadTurn: the messages cannot be rendered.
        """
        ...

    def extend(
        self,
        prompt_ids: Sequence[int],
        turn_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Sequence[int] | None:
        """Return the tokens from a drawn turn to the next turn of the policy: the rest of the turn's end if it was cut,
        `messages`, and the tokens around them. None: that is not possible without a change of earlier tokens.

        Args:
            prompt_ids: all tokens before the turn.
            turn_ids: the drawn tokens of the turn.
            messages: the messages after it.

        Raises:
            BadTurn: the messages cannot be rendered.
        """
        ...

    @property
    def decode(self) -> Decode | None:
        """Text of tokens, special tokens included; None: no turn has stop strings."""
        ...

    def parse(
        self,
        turn_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
        node_id: str = "",
        stop: Stop | None = None,
    ) -> Message:
        """Return a drawn turn as an assistant's message in the form of the Chat Completions API: `content`, and where
        there are any `reasoning_content` and `tool_calls`, whose ids are made from `node_id`.

        Args:
            stop: the stop string that ended the turn: the message has the text before it.
        """
        ...


@dataclass(frozen=True, slots=True)
class AgentOutcome:
    """End of a program.

    Args:
        reward: of the whole episode; None: the task's reward function gives it.
        info: other values to keep with the episode, as JSON types.
        continued: the program outlived april, so it has not asked again for turns that it had received before.
    """

    reward: float | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    continued: bool = False


class AgentStart(NamedTuple):
    """Start of a program for one episode.

    Attributes:
        key: name of the episode for `Policy.reply`: equal after a crash of april, other after the episode was
            restarted. A gateway derives the client's secret from it.
        row: the prompt's record, as `Environment.reset` gets it.
        seed: equal for all episodes of a group.
        again: the episode had begun before: april has resumed, or the program was lost. A program that still runs
            continues.
        episode: index of the episode in its group.
        group: id of the group.
    """

    key: str
    row: Mapping[str, Any]
    seed: int
    again: bool = False
    episode: int = 0
    group: int = 0


class Agents(Protocol):
    """Runs programs that drive episodes."""

    @property
    def outlive(self) -> bool:
        """Whether a program may outlive april, and then continues where it was."""
        ...

    async def run(self, start: AgentStart) -> AgentOutcome:
        """Run a program to its end. Cancelling the call stops the program.

        Raises:
            ObservationError: the program failed.
            EnvironmentLost: it is gone without an error of its own.
        """
        ...

    async def rewarded(self, start: AgentStart, outcome: AgentOutcome) -> AgentOutcome:
        """Return the outcome of a program that has ended, with its reward. The program's deadline does not count here.

        Raises:
            Unrewarded: the reward could not be obtained.
        """
        ...
