"""The start of a requested turn: its sample, and the tokens before it.

Invariants:
- a request continues the tokens as they were drawn: in the same sequence if its turn is the last there, else in one
  that branches off, and with a prompt of its own only where the template cannot extend the drawn tokens. Such a prompt
  is stored from the first token on in which it differs from a recent sequence of the episode;
- a request that sends back the message of a turn that ended at a stop string continues the drawn tokens, with the end
  of the turn that the template writes behind them;
- the context has room for a token of the answer, and so has the budget of a sample that is continued;
- images are expanded in new messages only: those before them keep their placeholders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from april.rollout.episodes.conversation_tree import ConversationTree, Match
from april.rollout.episodes.environment import Message
from april.rollout.episodes.turn_places import TurnPlaces
from april.rollout.episodes.turns import BadTurn, PromptTooLong, Renderer, TurnError
from april.rollout.trajectory.features import Feature, PromptImages, expanded
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.sample import Sample
from april.rollout.user_code.user_code import in_one_line


class TurnStart(NamedTuple):
    """Start of a turn."""

    sample: int
    """Index of the turn's sample in its group."""
    turn: int
    """Number of the turn in the sample; 0: the sample begins with it."""
    parent: int | None
    """Index of the sample whose first tokens a new sample shares; None if it shares none."""
    shared: int
    """Number of these tokens."""
    token_ids: Sequence[int]
    """Tokens behind the shared ones or, in a sample that is continued, behind its last turn."""
    features: Sequence[Feature] = ()
    """Images among `token_ids`."""


@dataclass(frozen=True, slots=True)
class TurnStarts:
    """Starts of the turns of one episode.

    Args:
        renderer: renders the messages of requests.
        context_length: tokens that a sample may have.
        conversation: the episode's turns as messages.
        places: the episode's turns as tokens.
        group: the group with the samples.
        first: the episode's first sample.
        next_index: returns the index of a new sample in the group.
        images: images of messages; None if the policy takes none.
    """

    renderer: Renderer
    context_length: int
    conversation: ConversationTree
    places: TurnPlaces
    group: Group
    first: Sample
    next_index: Callable[[Group], int]
    images: PromptImages | None = None

    def of(self, match: Match) -> TurnStart:
        """Return the start of a requested turn.

        Raises:
            BadTurn: the messages cannot be rendered, or an image cannot be read.
            PromptTooLong: there is no room for a token of the answer.
        """
        after = match.after
        if after is not None:
            index, turn = self.places.of(after.id)
            before, turn_ids = self.places.tokens(after.id)
            suffix = self._rendered(self.renderer.extend, before, turn_ids, match.messages, match.tools)
            if suffix is not None:
                whole = len(before) + len(turn_ids)
                suffix, features = self._expanded(suffix, match.messages, whole)
                self._check_room(whole + len(suffix))
                if turn == self.places.last_turn(index):
                    if self.group.sample(index).whole_budget_left < 1:
                        raise PromptTooLong(whole + len(suffix), whole)
                    return TurnStart(index, turn + 1, None, 0, suffix, features)
                return TurnStart(self.next_index(self.group), 0, index, whole, suffix, features)
        messages = [*(self.conversation.messages(after) if after is not None else ()), *match.messages]
        prompt, features = self._expanded(self._rendered(self.renderer.render, messages, match.tools), messages, 0)
        self._check_room(len(prompt))
        if self.places.last_turn(self.first.index) is None:
            return TurnStart(self.first.index, 0, None, 0, prompt, features)
        parent, shared = self.places.longest_shared(prompt, features)
        own = tuple(feature for feature in features if feature.offset >= shared)
        return TurnStart(self.next_index(self.group), 0, parent, shared, prompt[shared:], own)

    def _expanded(
        self, token_ids: Sequence[int], messages: Sequence[Message], offset: int
    ) -> tuple[Sequence[int], tuple[Feature, ...]]:
        try:
            return expanded(token_ids, messages, self.images, offset)
        except ValueError as error:
            raise BadTurn(f"the messages cannot be encoded: {' '.join(str(error).split())}") from None

    def _rendered(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except TurnError:
            raise
        except Exception as error:  # whatever a template raises about messages
            raise BadTurn(f"the messages cannot be rendered: {in_one_line(error)}") from None

    def _check_room(self, tokens: int) -> None:
        most = self.context_length - 1  # the answer has a token at least
        if tokens > most:
            raise PromptTooLong(tokens, most)
