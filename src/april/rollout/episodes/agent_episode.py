"""One episode that a program drives: its requests become events, and its turns become replies.

Invariants:
- a turn is asked for by one event, `Branched` or `Stepped`, which holds the request; the conversation is restored from
  those events alone;
- a turn that ends at a stop string keeps its tokens as they were drawn: the string, and what the last token contains
  behind it. Its message, and so the reply, ends before the string;
- the episode ends, or begins again, only while no turn is being drawn;
- the program's clock stands still while it waits for the policy;
- reward 0 follows from a limit or from an error of the program alone. An episode whose program is lost, or has ended
  without a reward that can be used, is left out with its group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from april.rollout.batch import Failure
from april.rollout.episodes.conversation_tree import ConversationTree, Match, Node, saved, shared_with
from april.rollout.episodes.environment import (
    EnvironmentLost,
    ObservationError,
    TokenIds,
    Unrewarded,
    environment_error,
    fingerprint,
    turn_name,
)
from april.rollout.episodes.environment import saved as as_saved
from april.rollout.episodes.episodes import Answer
from april.rollout.episodes.program_clock import ProgramClock
from april.rollout.episodes.turn_places import TurnPlaces
from april.rollout.episodes.turn_start import TurnStarts
from april.rollout.episodes.turns import (
    AgentOutcome,
    Agents,
    AgentStart,
    BadTurn,
    EpisodeOver,
    Renderer,
    TurnError,
    TurnReply,
    TurnRequest,
)
from april.rollout.events import Branched, Ended, Restarted, Stepped
from april.rollout.json_types import finite_number, shown
from april.rollout.params import EpisodeLimits
from april.rollout.sampling import FinishReason
from april.rollout.stop_strings import stop_of
from april.rollout.trajectory.features import PromptImages
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.sample import Sample
from april.rollout.trajectory.transition import Transition
from april.rollout.user_code.user_code import UserCode, in_one_line

Due = Ended | Restarted | None


class Home(Protocol):
    """The episodes that an episode belongs to."""

    agents: Agents
    renderer: Renderer
    images: PromptImages | None
    context_length: int
    limits: EpisodeLimits
    row: Callable[[Prompt], Mapping[str, Any]]
    keep_thinking: bool
    key_prefix: str
    """Beginning of the keys of episodes."""
    free: asyncio.Semaphore
    """Places for programs that run."""

    def answer(self, answer: Answer) -> None:
        """The program has done something."""
        ...

    def closed(self, episode: AgentEpisode) -> None:
        """An episode has ended, or is abandoned."""
        ...

    def ending(self, program: asyncio.Task[None]) -> None:
        """A program is stopping."""
        ...

    def next_index(self, group: Group) -> int:
        """Return the index of a sample that branches off; the events of earlier ones may not be applied yet."""
        ...


class AgentEpisode:
    """An open episode.

    Args:
        home: the episodes that it belongs to.
        first: its first sample.
        durable: awaited before a turn is delivered, so that it is on disk before the program acts on it.
    """

    def __init__(self, home: Home, first: Sample, group: Group, durable: Callable[[], Awaitable[Any]] | None) -> None:
        self.home = home
        self.first = first
        self.group = group
        self.key = home.key_prefix + key_of(first)
        self.conversation = ConversationTree(home.keep_thinking)
        self._durable = durable
        self._places = TurnPlaces(group)
        self._starts = TurnStarts(
            home.renderer,
            home.context_length,
            self.conversation,
            self._places,
            group,
            first,
            home.next_index,
            home.images,
        )
        self._drawing: dict[str, asyncio.Future[None]] = {}
        """Nodes that the policy has not ended."""
        self._slots = asyncio.Semaphore(home.limits.parallel_turns)
        self._last: Node | None = None
        """The turn that the program received last."""
        self._over: TurnError | None = None
        self._due: Due = None
        self._is_due = False
        self._failures: list[Failure] = []
        self._clock = ProgramClock(home.limits.deadline, self._out_of_time)
        self._program: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """Whether the program runs."""
        return self._clock.running

    def start(self) -> None:
        """Start the program, or begin the episode again if the program cannot be brought to where it was."""
        again = self.first.origin is not None
        try:
            if again:
                self._restore()
        except Exception as error:
            self._end_drawing()  # turns that end later have no node
            self._fail(f"april failed to restore the conversation: {in_one_line(error)}")
            return
        if again and self.home.limits.recovery == "restart":
            self._begin_again("april has resumed, and recovery is restart")
        else:
            self._program = asyncio.create_task(self._run(again), name=f"program of {self.key}")

    def _restore(self) -> None:
        """Restore the conversation from the samples."""
        samples = sorted(self.group.episode(self.first.episode), key=lambda sample: sample.index)
        for sample in samples:
            for turn, transition in enumerate(sample.transitions):
                assert transition.request is not None, "a transition of an open episode holds a request"
                node = self.conversation.again(turn_name(sample.id, self.first.attempt, turn), transition.request)
                self._clock.used += transition.seconds
                self._asked(node, sample.index, turn)
                if turn + 1 < len(sample.transitions) or sample.turn_ended:
                    self._drawn(sample, turn, node)
        self._slots = asyncio.Semaphore(max(self.home.limits.parallel_turns - len(self._drawing), 0))

    def _asked(self, node: Node, index: int, turn: int) -> None:
        self._places.add(node.id, index, turn)
        self._drawing[node.id] = asyncio.get_running_loop().create_future()

    def _drawn(self, sample: Sample, turn: int, node: Node) -> None:
        try:
            turn_ids, renderer = sample.turn_ids(turn), self.home.renderer
            stops = (*sample.sampling.stop, *node.settings.get("stop", ()))
            stop = None
            if stops and renderer.decode is not None:
                stop = stop_of(renderer.decode, turn_ids, stops, renderer.stop_token_ids)
            message = renderer.parse(turn_ids, node.tools, node.id, stop)
            self.conversation.said(node, message, None if stop is None else stop.string)
        finally:
            self._drawing.pop(node.id).set_result(None)

    # Requests of the program

    async def reply(self, request: TurnRequest) -> Sequence[TurnReply]:
        """See `Policy.reply`."""
        if self._over is not None:
            raise self._over
        nodes: list[Node] = []
        try:
            with self._clock.waiting():
                await self._find_or_ask(request, nodes)
                for node in nodes:
                    if (drawing := self._drawing.get(node.id)) is not None:
                        await asyncio.shield(drawing)
                if self._durable is not None:
                    await self._durable()
            if self._over is not None:
                raise self._over
            replies = [self._places.reply(node, self.home.renderer.stop_token_ids) for node in nodes]
            for node in nodes:
                node.delivered = True
            self._last = nodes[-1]
            return replies
        finally:
            for node in nodes:
                node.waiting -= 1

    def undelivered(self, node_ids: Sequence[str]) -> None:
        """See `Policy.undelivered`."""
        for id in node_ids:
            if (node := self.conversation.nodes.get(id)) is not None:
                node.delivered = False

    async def _find_or_ask(self, request: TurnRequest, nodes: list[Node]) -> None:
        """Append the `n` turns of a request to `nodes`."""

        def claim(node: Node) -> None:
            node.waiting += 1
            nodes.append(node)
            self.conversation.ask(node, request.key)
            self.conversation.name(node, request.alias)

        match = self.conversation.find(request)
        for node in match.same:
            claim(node)
        while len(nodes) < request.n:
            waits = self._slots.locked()
            await self._slots.acquire()
            try:
                if self._over is not None:
                    raise self._over
                if waits:  # other requests may have been placed during the wait, this one under its key among them
                    match = self.conversation.find(request)
                    if same := [node for node in match.same if node not in nodes]:
                        self._slots.release()
                        claim(same[0])
                        continue
                claim(self._ask(match, request))
            except BaseException:
                self._slots.release()
                raise

    def _ask(self, match: Match, request: TurnRequest) -> Node:
        """Put a new turn into the tree, and answer with its event."""
        # A program that may have outlived april is compared at its end.
        if not self.home.agents.outlive and self.conversation.diverges(match):
            reason = "the program asked for something else than before"
            self._begin_again(reason)
            raise self._over or EpisodeOver(reason)
        number = len(self.conversation)
        if number >= self.first.sampling.max_turns:
            self._end(FinishReason.TURNS, AgentOutcome())
            raise self._over or EpisodeOver("the episode has reached its limit of turns")
        index, turn, parent, shared, token_ids, features = self._starts.of(match)
        sample_id = f"{self.first.id.rpartition('.')[0]}.{index}"
        try:
            beginning = self.conversation.beginning(match)
            asked = as_saved(saved(match, request, beginning), "a request")
        except ObservationError as error:
            raise BadTurn(str(error)) from None
        name = turn_name(sample_id, self.first.attempt, turn)
        node = self.conversation.add(name, shared_with(match, beginning), request.key, request.settings)
        seconds = self._clock.lap()
        if turn:
            sample = self.group.sample(index)
            transition = Transition(sample.length, len(token_ids), seconds=seconds, number=number, request=asked)
            action = fingerprint(TokenIds(sample.turn_ids(turn - 1)))
            self._answer(Stepped(sample_id, turn - 1, action, tuple(token_ids), transition, features=features))
        else:
            transition = Transition(0, 0, seconds=seconds, number=number, request=asked)
            place = self.group.id, index, self.first.episode, parent, shared
            self._answer(Branched(*place, tuple(token_ids), transition, features))
        self._asked(node, index, turn)
        return node

    # Turns of the policy

    def turn_ended(self, sample: Sample) -> None:
        """The policy has ended the last turn of a sample."""
        turn = len(sample.transitions) - 1
        node = self.conversation.nodes.get(turn_name(sample.id, self.first.attempt, turn))
        if node is None or node.id not in self._drawing:
            return  # the conversation could not be restored, or the program has the turn already
        try:
            self._drawn(sample, turn, node)
        except Exception as error:
            self._fail(f"april failed to read a turn: {in_one_line(error)}")
        self._slots.release()
        self._answer_if_due()

    # The program

    async def _run(self, again: bool) -> None:
        try:
            async with self.home.free:
                await self._attempts(again)
        except Exception as error:
            self._fail(f"april failed: {in_one_line(error)}")

    async def _attempts(self, again: bool) -> None:
        """Run the program until it ends, or `limits` allows no further attempt."""
        limits, attempt = self.home.limits, 0
        row, seed = self.home.row(self.group.prompt), self.group.environment_seed
        info: Mapping[str, Any] = {}
        while self._over is None:
            self._clock.start()
            try:
                with UserCode():
                    start = AgentStart(self.key, row, seed, again, self.first.index, self.group.id)
                    outcome = await self.home.agents.run(start)
                    self._clock.stop()
                    outcome = await self.home.agents.rewarded(start, outcome)
                self._finished(outcome)
                return
            except EnvironmentLost as error:
                lost, rewardless, reason = True, True, str(error)
            except Exception as error:
                lost, rewardless, reason = False, isinstance(error, Unrewarded), environment_error(error)
                info = error.info if isinstance(error, ObservationError) else {}
            finally:
                self._clock.stop()
            if self._over is not None:
                return
            self._failed("environment lost" if lost else "environment", reason)
            begun = bool(self.conversation.nodes)
            if lost and begun and limits.recovery == "restart":
                self._begin_again(reason)
            # A program that failed in the middle would likely fail again.
            elif attempt >= limits.max_retries or (begun and not lost):
                self._give_up(reason, info, rewardless)
            else:
                await asyncio.sleep(limits.retry_delay * 2**attempt)
                attempt, again = attempt + 1, begun
                self.conversation.forget_clients()

    def _finished(self, outcome: AgentOutcome) -> None:
        """The program has ended by itself."""
        if self._over is not None:
            return
        if not self.conversation.nodes:
            raise ObservationError("the program ended before it asked for a turn")
        if finite_number(outcome.reward or 0.0) is None:
            raise Unrewarded(f"the program's reward is {shown(outcome.reward)}, which is no finite number")
        try:
            outcome = replace(outcome, info=as_saved(dict(outcome.info), "info"))
        except ObservationError as error:
            raise Unrewarded(str(error)) from None
        if self.conversation.unrequested and not outcome.continued:
            self._begin_again("the program ended without asking again for all that it had asked for before")
        else:
            self._end(FinishReason.DONE, outcome)

    def _failed(self, kind: Any, reason: str) -> None:
        self._failures.append(Failure(kind, self.first.id, self.group.prompt.id, reason))

    def _give_up(self, reason: str, info: Mapping[str, Any], rewardless: bool) -> None:
        """The program has failed: end the episode, or leave its group out.

        Args:
            reason: the reason in one line.
            info: values to keep with the episode.
            rewardless: whether the failure says nothing about the policy, so that 0 would be a wrong reward.
        """
        if self._over is None:
            if self.home.limits.on_error == "reject" or rewardless or not self.conversation.nodes:
                self._settle(None, EpisodeOver(reason))
            else:
                self._end(FinishReason.FAILED, AgentOutcome(0.0, as_saved(dict(info), "info")))

    def _fail(self, reason: str) -> None:
        self._failed("environment", reason)
        self._settle(None, EpisodeOver(reason))

    def _end(self, finish: FinishReason, outcome: AgentOutcome) -> None:
        last = self._last or next(iter(self.conversation))
        info = {**outcome.info, "turns": len(self.conversation)}
        failed = finish is FinishReason.FAILED
        end = Transition(0, 0, outcome.reward or 0.0, True, seconds=self._clock.lap(), failed=failed, info=info)
        event = Ended(self.group.id, self.first.episode, self._places.of(last.id)[0], finish, end)
        self._settle(event, EpisodeOver(f"the episode has ended: {finish}"))

    def _begin_again(self, reason: str) -> None:
        """Restart the episode, unless that has happened too often."""
        if self._over is None:
            self._failed("environment restart", reason)
            often = self.first.attempt >= self.home.limits.max_restarts
            self._settle(None if often else Restarted(self.first.id, reason), EpisodeOver(reason))

    def _settle(self, due: Due, over: TurnError) -> None:
        """Close the episode to requests; its event follows once no turn is being drawn."""
        if self._over is None:
            self._over, self._due, self._is_due = over, due, True
            self._stop_program()
            self._slots.release()  # a request that waits for its turn raises `_over`, and lets the next one do so
            self._answer_if_due()

    def _answer_if_due(self) -> None:
        if self._is_due and not self._drawing:
            self._is_due = False
            self.home.closed(self)
            self._answer(self._due)

    def _answer(self, event: Stepped | Branched | Ended | Restarted | None) -> None:
        failures, self._failures = self._failures, []
        self.home.answer(Answer(self.first, self.group, event, failures))

    def _stop_program(self) -> None:
        self._clock.stop()
        if self._program is not None and self._program is not asyncio.current_task():
            self._program.cancel()
            self.home.ending(self._program)

    def abandon(self, over: TurnError) -> None:
        """End without an event: the group is left out, or the run stops."""
        self._over, self._is_due = self._over or over, False
        self._stop_program()
        self._slots.release()
        self._end_drawing()

    def _end_drawing(self) -> None:
        """No turn is waited for any longer: the requests that wait raise `_over`."""
        while self._drawing:
            _, drawing = self._drawing.popitem()
            if not drawing.done():
                drawing.set_result(None)

    def _out_of_time(self) -> None:
        if self.conversation.nodes:
            self._end(FinishReason.DEADLINE, AgentOutcome())
        else:
            self._failed("environment timeout", "the program asked for nothing in time")
            self._settle(None, EpisodeOver("the program asked for nothing in time"))


def first_id(sample: Sample) -> str:
    """Return the id of the first sample of a sample's episode."""
    return sample.id if sample.index == sample.episode else f"{sample.id.rpartition('.')[0]}.{sample.episode}"


def key_of(first: Sample) -> str:
    """Return the name of an episode: the same after a crash, another one after a restart of the episode."""
    name = first.id.replace(" ", "-")  # keys are parts of addresses
    return f"{name}~{first.attempt}" if first.attempt else name
