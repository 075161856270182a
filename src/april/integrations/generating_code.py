"""A framework's own generating code as programs that drive april's episodes.

A framework lets its users write code that requests responses from an engine: an agent executor, a workflow, a generate
function. Each run of such code is an episode. april interrupts the requested responses anywhere and resumes them under
the next weights; the code waits.

Invariants:
- a request continues the turn with the most tokens that the request's tokens begin with, token for token; a request
  that changes earlier tokens begins a sequence of its own in the same episode;
- a response is as it was drawn: tokens, log-probabilities and versions;
- after a restart the code runs again and gets the recorded responses; code that then requests something else is
  restarted, which is counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from april.rollout.episodes.agent_episodes import AgentEpisodes
from april.rollout.episodes.environment import Message, ObservationError, saved
from april.rollout.episodes.turn_places import common_prefix
from april.rollout.episodes.turns import (
    AgentOutcome,
    AgentStart,
    BadTurn,
    EpisodeOver,
    Policy,
    Stopping,
    TurnEnd,
    TurnRequest,
)
from april.rollout.params import EpisodeLimits
from april.rollout.stop_strings import Decode, Stop, checked_stop_strings
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.routes import Routes
from april.rollout.trajectory.sample import Sample
from april.rollout.user_code.user_code import end_tasks

T = TypeVar("T")

UNLIMITED = 1 << 30
"""Effectively no limit: the framework's own settings limit turns and concurrency."""


def as_message(token_ids: Sequence[int], role: str = "tokens") -> Message:
    """Return tokens as a message: their ids as text, which the comparison of messages leaves unchanged."""
    return {"role": role, "content": " ".join(map(str, token_ids))}


def tokens_of(messages: Sequence[Message]) -> list[int]:
    """Return the tokens of messages that `as_message` made."""
    return [int(word) for message in messages for word in message["content"].split()]


class TokenRenderer:
    """Renderer for code that exchanges tokens: a message holds token ids.

    Args:
        stop_token_ids: tokens that end a response.
        decode: text of tokens, for stop strings; None: there are none.
    """

    def __init__(self, stop_token_ids: Sequence[int], decode: Decode | None = None) -> None:
        self.stop_token_ids = stop_token_ids
        self.decode = decode

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Sequence[int]:
        return tokens_of(messages)

    def extend(
        self,
        prompt_ids: Sequence[int],
        turn_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Sequence[int] | None:
        return tokens_of(messages)

    def parse(
        self,
        turn_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
        node_id: str = "",
        stop: Stop | None = None,
    ) -> Message:
        return as_message(turn_ids, "assistant")  # the code gets all tokens, including a stop string's


class LeftOutError(ObservationError):
    """The code cannot use an episode: its group is left out, and the run continues."""


@dataclass
class DrawnTurn:
    """A response that the policy has drawn.

    Attributes:
        node_id: name of the turn, which a continuation names as its parent.
        token_ids: prompt and response.
        drawn: whether the policy drew each of them.
        response: tokens of the response.
        logprobs: log-probability of each token of the response, in nats.
        versions: policy version of each token of the response.
        end: reason for the end of the response.
        stop: the stop string that ended it; None: none did.
        routes: experts of prompt and response tokens, with router replay.
        text: prompt and response as text, in code that exchanges text: as far as tokens stand for it exactly.
        text_tokens: number of tokens that stand for `text`.
    """

    node_id: str
    token_ids: list[int]
    drawn: list[bool]
    response: list[int]
    logprobs: list[float]
    versions: list[int]
    end: TurnEnd
    stop: str | None = None
    routes: Routes | None = None
    text: str | None = None
    text_tokens: int = 0


class DrawnToken(NamedTuple):
    """A token of a response.

    Attributes:
        logprob: log-probability that it was drawn with, in nats.
        version: policy version that drew it.
    """

    logprob: float
    version: int


class CodeEpisode:
    """The requests of one run of the code.

    Args:
        policy: draws the responses.
        start: of the episode.
    """

    def __init__(self, policy: Policy, start: AgentStart) -> None:
        self.row = start.row
        """Metadata of the prompt."""
        self.index = start.episode
        """Index of the episode in its group."""
        self.group_id = start.group
        self.turns: list[DrawnTurn] = []
        self._policy = policy
        self._key = start.key

    async def respond(
        self, token_ids: Sequence[int], max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> DrawnTurn:
        """Return the policy's response to a prompt.

        Args:
            token_ids: the whole prompt, with earlier responses.
            max_tokens: tokens that the response may have; None: the sample's own budget.
            stop: texts that end the response.

        Raises:
            BadTurn: the prompt leaves no room for a response.
        """
        asked = list(token_ids)
        if max_tokens is not None and max_tokens < 1:
            raise BadTurn(f"a response of {max_tokens} tokens was requested: it needs at least one")
        before = self.continued(asked)
        parent, drawn = (None, []) if before is None else (before.node_id, before.drawn)
        request = TurnRequest([as_message(asked[len(drawn) :])], max_tokens=max_tokens, parent=parent, stop=stop)
        (reply,) = await self._policy.reply(self._key, request)
        response = list(reply.token_ids)
        mask = [*drawn, *[False] * (len(asked) - len(drawn)), *[True] * len(response)]
        whole = [*asked, *response]
        logprobs, versions = [*reply.logprobs], [*reply.versions]
        turn = DrawnTurn(reply.node_id, whole, mask, response, logprobs, versions, reply.end, reply.stop, reply.routes)
        self.turns.append(turn)
        return turn

    def continued(self, token_ids: Sequence[int]) -> DrawnTurn | None:
        """Return the turn with the most tokens that `token_ids` begins with; None if there is none."""
        known = [turn for turn in self.turns if token_ids[: len(turn.token_ids)] == turn.token_ids]
        return max(known, key=lambda turn: len(turn.token_ids), default=None)

    def tokens_of_text(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Return the tokens of a prompt in text. Text of earlier turns keeps the tokens that were drawn:
        those that the text shows, because the code has no others in its trajectory.

        Args:
            encode: tokenizes new text.
        """
        known = [turn for turn in self.turns if turn.text is not None and text.startswith(turn.text)]
        before = max(known, key=lambda turn: len(turn.text or ""), default=None)
        if before is None or before.text is None:
            return encode(text)
        return [*before.token_ids[: before.text_tokens], *encode(text[len(before.text) :])]

    def check(self, token_ids: Sequence[int], trained: Sequence[bool]) -> dict[int, DrawnToken]:
        """Check that a trajectory trains on drawn tokens only, and return those that were drawn, as `drawn_in` does.

        Args:
            token_ids: prompt, responses and everything between them.
            trained: whether the loss counts each of them.

        Raises:
            ObservationError: the loss counts a token that the policy did not draw there.
        """
        drawn = self.drawn_in(token_ids)
        wrong = next((index for index, counts in enumerate(trained) if counts and index not in drawn), None)
        if wrong is not None:
            raise ObservationError(
                f"token {wrong} of the trajectory that the code returned counts in the loss, but the policy did not "
                "draw it there"
            )
        return drawn

    def drawn_in(self, token_ids: Sequence[int]) -> dict[int, DrawnToken]:
        """Return the tokens of a trajectory that the policy drew there, by their index.

        Responses to the same prompt may begin alike: tokens are those of the response that agrees for longer.
        """
        drawn: dict[int, DrawnToken] = {}
        agreeing = [(common_prefix(token_ids, turn.token_ids), turn) for turn in self.turns]
        for agree, turn in sorted(agreeing, key=lambda pair: pair[0]):
            # A trajectory may end within a response: the code may leave out its end, or cut it at a limit of its own.
            begin = len(turn.token_ids) - len(turn.response)
            for place, token in enumerate(map(DrawnToken, turn.logprobs, turn.versions)):
                if begin + place < agree:
                    drawn[begin + place] = token
        return drawn


class GeneratingCode:
    """Runs the code for each episode, as april's `Agents`.

    Args:
        run: runs the code for one episode, and returns the values to keep with the episode, as JSON types.
        stop_token_ids: tokens that end a response.
        context_length: tokens of prompt and responses together.
        decode: text of tokens, if responses end at stop strings.
    """

    outlive = False

    def __init__(
        self,
        run: Callable[[CodeEpisode], Awaitable[Mapping[str, Any]]],
        stop_token_ids: Sequence[int],
        context_length: int,
        decode: Decode | None = None,
    ) -> None:
        self._run = run
        self._failure: Exception | None = None
        self._failed = asyncio.Event()
        limits = EpisodeLimits(
            recovery="replay", on_error="reject", concurrency=UNLIMITED, parallel_turns=UNLIMITED, max_retries=0
        )
        self.episodes = AgentEpisodes(self, TokenRenderer(stop_token_ids, decode), context_length, limits, row_of)

    async def run(self, start: AgentStart) -> AgentOutcome:
        try:
            info = await self._run(CodeEpisode(self.episodes, start))
            return AgentOutcome(info=saved(dict(info), "the result of the code"))
        except (EpisodeOver, Stopping, LeftOutError):
            raise
        except Exception as error:
            self._failure = self._failure or error
            self._failed.set()
            raise

    async def rewarded(self, start: AgentStart, outcome: AgentOutcome) -> AgentOutcome:
        return outcome

    async def watch(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. If the code fails in an episode, stop `work` and raise the code's error, as the
        framework does."""
        working = asyncio.ensure_future(work)
        failed = asyncio.ensure_future(self._failed.wait())
        try:
            await asyncio.wait({working, failed}, return_when=asyncio.FIRST_COMPLETED)
            if self._failure is None:
                return await working
        finally:
            await end_tasks([failed, working])
        error, self._failure = self._failure, None
        self._failed.clear()
        raise error


def stop_strings(stop: str | Sequence[str] | None, name: str = "stop") -> tuple[str, ...]:
    """Return the stop strings of a request or a setting, which may have one, several or none.

    Args:
        name: of the setting, for error messages.

    Raises:
        ValueError: one is empty, or contains U+FFFD.
    """
    try:
        return checked_stop_strings((stop,) if isinstance(stop, str) else tuple(stop or ()))
    except ValueError as error:
        raise ValueError(f"{name} = {error}") from None


def leading_text(ids: Sequence[int], shown: str, decode: Decode, hidden: Collection[int]) -> tuple[str, int]:
    """Return how far tokens stand for a text exactly: its beginning, and the number of tokens that it is the text of.

    Args:
        ids: tokens of a response.
        shown: the response's text as the code gets it, maybe without the end token or a stop string.
        decode: text of tokens as the code gets it.
        hidden: tokens that `decode` leaves out. The code cannot know of them, so the tokens end before the first one.
    """
    count = next((index for index, id in enumerate(ids) if id in hidden), len(ids))
    while not shown.startswith(text := decode(ids[:count])):
        count -= 1
    return text, count


def row_of(prompt: Prompt) -> Mapping[str, Any]:
    """Return the metadata of a prompt: the argument of the code."""
    return prompt.metadata


def result_of(sample: Sample) -> Mapping[str, Any]:
    """Return the values that the code returned for a finished sample."""
    return sample.transitions[-1].info
