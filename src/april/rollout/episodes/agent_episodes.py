"""Episodes that programs drive: a program requests turns, several at a time if it wants, until it ends.

Invariants:
- each turn that a program requests is a turn of a sample: it takes a slot, is interrupted and resumed like any other,
  and its program notices nothing of that;
- a program has an effect only by events, in their order;
- after a crash, a program is started again and gets the turns that it requests again from the journal; a program that
  outlived april continues with the same key;
- a failure affects its own episode only.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from secrets import token_hex
from typing import Any

from april.rollout.buffer import Buffer
from april.rollout.episodes.agent_episode import AgentEpisode, first_id
from april.rollout.episodes.environment import Message
from april.rollout.episodes.episodes import Answer, prompt_row
from april.rollout.episodes.known_episodes import KnownEpisodes
from april.rollout.episodes.turns import Agents, EpisodeOver, Renderer, Stopping, TurnReply, TurnRequest
from april.rollout.events import Branched, Stepped
from april.rollout.params import EpisodeLimits
from april.rollout.stop_strings import Decode
from april.rollout.trajectory.features import PromptImages
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.sample import Sample
from april.rollout.user_code.user_code import end_tasks


class AgentEpisodes:
    """Open episodes of programs; the gateway's requests to the policy come here.

    Args:
        agents: runs the programs.
        renderer: converts messages and tokens.
        context_length: tokens of prompt and response together.
        limits: time limits and retries.
        row: the argument of a program that a prompt gives.
        keep_thinking: see `ConversationTree`.
        images: images of messages; None if the policy takes none.
    """

    def __init__(
        self,
        agents: Agents,
        renderer: Renderer,
        context_length: int,
        limits: EpisodeLimits | None = None,
        row: Callable[[Prompt], Mapping[str, Any]] | None = None,
        keep_thinking: bool = False,
        images: PromptImages | None = None,
    ) -> None:
        self.agents = agents
        self.renderer = renderer
        self.context_length = context_length
        self.limits = limits or EpisodeLimits()
        self.row = row or prompt_row
        self.keep_thinking = keep_thinking
        self.images = images
        self.free = asyncio.Semaphore(self.limits.concurrency)
        self.key_prefix = ""
        self._open: dict[str, AgentEpisode] = {}
        """By the id of their first sample."""
        self._open_in: Counter[int] = Counter()
        """Number of open episodes, by group."""
        self._known = KnownEpisodes()
        self._is_part = False
        """Whether these are the episodes of other samples than the run's, such as an evaluation's."""
        self._answers: list[Answer] = []
        self._arrived = asyncio.Event()
        self._ending: set[asyncio.Task[None]] = set()
        self._indices: dict[int, int] = {}
        """Index of the next sample that branches off, by group."""

    def __len__(self) -> int:
        return len(self._open) + len(self._answers)

    @property
    def live(self) -> int:
        return sum(episode.running for episode in self._open.values())

    @property
    def decode(self) -> Decode | None:
        return self.renderer.decode

    def apart(self) -> AgentEpisodes:
        """See `Episodes.apart`. Requests for the other episodes may be sent here or there."""
        other = AgentEpisodes(
            self.agents, self.renderer, self.context_length, self.limits, self.row, self.keep_thinking, self.images
        )
        other._known, other._is_part = self._known, True
        # Evaluations name their samples alike: a late request for an earlier evaluation finds no other one.
        other.key_prefix = f"{token_hex(4)}-"
        return other

    # For a gateway

    async def reply(self, episode_key: str, request: TurnRequest) -> Sequence[TurnReply]:
        return await (await self._known.episode(episode_key)).reply(request)

    def undelivered(self, episode_key: str, node_ids: Sequence[str]) -> None:
        if (episode := self._known.open.get(episode_key)) is not None:
            episode.undelivered(node_ids)

    def conversations(self, episode_key: str) -> list[list[Message]]:
        """Return each conversation of an open episode, from its beginning to the last turn of a branch."""
        episode = self._known.open.get(episode_key)
        return [] if episode is None else episode.conversation.whole

    # For the rollouts

    def connect(self, buffer: Callable[[], Buffer]) -> None:
        """See `Episodes.connect`. An evaluation ends without a resume, so its buffer is of no use here."""
        if not self._is_part:
            self._known.buffer = buffer

    def begin(self, sample: Sample, group: Group, durable: Callable[[], Any] | None = None) -> None:
        first = group.samples[sample.episode]
        episode = self._open.get(first.id)
        if episode is None:
            if any(a.sample is first and not isinstance(a.event, Branched | Stepped) for a in self._answers):
                return  # its end is not applied yet
            episode = self._open[first.id] = AgentEpisode(self, first, group, durable)
            self._open_in[group.id] += 1
            self._known.add(episode)
            episode.start()
        if sample.turn_ended and first.id in self._open:  # it is not if the conversation cannot be restored
            episode.turn_ended(sample)

    def take(self) -> list[Answer]:
        answers, self._answers = self._answers, []
        self._arrived.clear()
        return answers

    async def wait(self) -> None:
        await self._arrived.wait()

    def drop(self, samples: Iterable[Sample]) -> None:
        dropped = {first_id(sample) for sample in samples}
        if not dropped:  # at almost every poll of the engine, whatever the number of open episodes
            return
        for id in dropped:
            if (episode := self._open.get(id)) is not None:
                self.closed(episode)
                episode.abandon(EpisodeOver("the episode is left out"))
        self._answers = [answer for answer in self._answers if answer.sample.id not in dropped]

    async def close(self) -> None:
        if not self._is_part:
            self._known.stop()
        for episode in [*self._open.values()]:
            self.closed(episode)
            episode.abandon(Stopping("the run stops"))
        self._answers.clear()
        await end_tasks(list(self._ending))

    # For an episode

    def answer(self, answer: Answer) -> None:
        self._answers.append(answer)
        self._arrived.set()

    def closed(self, episode: AgentEpisode) -> None:
        """An episode has ended, or is abandoned."""
        self._known.remove(episode)
        if self._open.pop(episode.first.id, None) is not None:
            group_id = episode.group.id
            self._open_in[group_id] -= 1
            if not self._open_in[group_id]:
                del self._open_in[group_id]
                self._indices.pop(group_id, None)

    def ending(self, program: asyncio.Task[None]) -> None:
        """A program is stopping."""
        self._ending.add(program)
        program.add_done_callback(self._ending.discard)

    def next_index(self, group: Group) -> int:
        """Return the index of a sample that branches off; the events of earlier ones may not be applied yet."""
        index = max(self._indices.get(group.id, 0), group.next_index)
        self._indices[group.id] = index + 1
        return index
