"""Programs that ask for trees of turns, a policy whose tokens follow from what it sees, and a template of their own."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from april import Sample
from april.rollout.episodes.agent_episodes import AgentEpisodes
from april.rollout.episodes.environment import Message
from april.rollout.episodes.turns import AgentOutcome, AgentStart, TurnReply, TurnRequest
from april.rollout.stop_strings import Stop
from tests.talking import STOP, TalkingEngine

USER, DRAWN, TOOLS, WORD, TURN = 200, 201, 202, 300, 203


class TreeEngine(TalkingEngine):
    """Draws tokens that follow from the seed and everything before them, and keeps what each request began with."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.seen: dict[tuple[str, int], tuple[int, ...]] = {}
        """Prompt and response at the first submission of each turn, by sample and turn."""
        self.drawn = 0

    def submit(self, sample: Sample) -> None:
        super().submit(sample)
        context = [*sample.prompt_ids, *sample.response_ids]
        self.flight[sample.id] = (context, sample.seed, sample.room(self.capacity.context_length))
        if not sample.transitions:
            return  # a control request
        begins = sample.turn_span(len(sample.transitions) - 1)[0]
        turn = (f"{sample.id}~{sample.attempt}", len(sample.transitions))
        self.seen.setdefault(turn, tuple(context[: len(sample.prompt_ids) + begins]))
        assert self.seen[turn] == tuple(context[: len(sample.prompt_ids) + begins]), "the beginning changed"

    def serve(self, id: str, count: int) -> Any:
        chunk = super().serve(id, count)
        self.drawn += 0 if id.startswith("control") else len(chunk.token_ids)
        return chunk


class WordRenderer:
    """A template: role, one token for each word, and the beginning of the policy's turn. Rendered again, a turn of the
    policy has other tokens than those it drew."""

    stop_token_ids = (STOP,)

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        tokens = [TOOLS] * len(tools)
        for message in messages:
            tokens += self._message(message)
        return [*tokens, TURN]

    def extend(
        self,
        prompt_ids: Sequence[int],
        turn_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int] | None:
        if any(message["role"] == "assistant" for message in messages):
            return None
        cut = not turn_ids or turn_ids[-1] != STOP
        return [STOP] * cut + [token for message in messages for token in self._message(message)] + [TURN]

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))

    def parse(
        self,
        turn_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
        node_id: str = "",
        stop: Stop | None = None,
    ) -> Message:
        text = self.decode(turn_ids)
        return {"role": "assistant", "content": text if stop is None else text[: stop.at], "refusal": None}

    def _message(self, message: Message) -> list[int]:
        content = message["content"]
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        return [DRAWN if message["role"] == "assistant" else USER, *(WORD + int(word) for word in text.split())]


Script = Callable[["Client"], Awaitable[float | AgentOutcome]]


class Client:
    """What a program knows of its episode, and how it asks.

    Attributes:
        replies: every reply, with the messages up to its turn.
    """

    def __init__(self, world: Programs, start: AgentStart) -> None:
        self.world = world
        self.start = start
        self.rng = random.Random(f"{start.seed} {start.key.partition('~')[0]}")
        self.replies: list[tuple[list[Message], TurnReply]] = []
        self.tools: dict[str, Sequence[Any]] = {}

    def user(self) -> Message:
        return {"role": "user", "content": str(self.rng.randrange(50))}

    async def ask(self, messages: Sequence[Message], **more: Any) -> list[TurnReply]:
        """Ask for turns behind `messages`, as a client would write them; check what the policy saw."""
        request = TurnRequest([self._rewritten(message) for message in messages], **more)
        replies = list(await self.world.episodes.reply(self.start.key, request))
        self._note(list(messages), replies, more)
        return replies

    async def lose(self, messages: Sequence[Message], **more: Any) -> None:
        """Ask, and leave before an answer has come."""
        request = TurnRequest(list(messages), **more)
        task = asyncio.create_task(self.world.episodes.reply(self.start.key, request))  # type: ignore[arg-type]
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # also if this program is stopped
        for _ in range(self.rng.randrange(4)):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if not task.cancelled() and task.exception() is None:
            self.world.episodes.undelivered(self.start.key, [reply.node_id for reply in task.result()])

    def _note(self, messages: list[Message], replies: list[TurnReply], more: Mapping[str, Any]) -> None:
        tools = more.get("tools") or self.tools.get(more.get("parent", ""), ())
        for reply in replies:
            self._check_end(reply, more)
            self.tools[reply.node_id] = tools
            if (parent := more.get("parent")) is not None:
                before, past = next((b, p) for b, p in self.replies if p.node_id == parent)
                messages = [*before, past.message, *messages]
            # A turn whose messages are the beginning of these is continued by its tokens.
            allowed = [WordRenderer().render(messages, tools)]
            for before, past in self.replies:
                rest = messages[len(before) + 1 :]
                if (
                    stripped(messages[: len(before) + 1]) == stripped([*before, past.message])
                    and self.tools[past.node_id] == tools
                ):
                    suffix = WordRenderer().extend(past.prompt_ids, past.token_ids, rest)
                    allowed += [] if suffix is None else [[*past.prompt_ids, *past.token_ids, *suffix]]
            assert list(reply.prompt_ids) in allowed[1:] or (len(allowed) == 1 and list(reply.prompt_ids) == allowed[0])
            self.world.noted.setdefault(reply.node_id, reply)
            first = self.world.noted[reply.node_id]
            assert (first.prompt_ids, first.token_ids, first.logprobs) == (
                reply.prompt_ids,
                reply.token_ids,
                reply.logprobs,
            ), "a turn changed"
            self.replies.append((messages, reply))

    @staticmethod
    def _check_end(reply: TurnReply, more: Mapping[str, Any]) -> None:
        """A turn ends with the first token with which its text contains a stop string, and its message before it."""
        renderer, stops = WordRenderer(), more.get("stop", ())
        ended = reply.token_ids[-1] == STOP
        texts = [renderer.decode(reply.token_ids[:end]) for end in range(1, len(reply.token_ids) + 1 - ended)]
        found = [any(stop in text for stop in stops) for text in texts]
        assert not any(found[:-1]), "drawn on behind a stop string"
        assert (reply.stop is not None) == (bool(found) and found[-1])
        if reply.stop is not None:
            assert not ended
            assert reply.end == "stop"
            assert reply.message["content"] == texts[-1][: min(texts[-1].find(s) for s in stops if s in texts[-1])]
        elif reply.end == "length":
            assert not ended

    def _rewritten(self, message: Message) -> Message:
        text = f" {message['content']}\n" if self.rng.random() < 0.3 else message["content"]
        content = [{"type": "text", "text": text}] if self.rng.random() < 0.3 else text
        return {"content": content, "role": message["role"]}


def stripped(messages: Sequence[Message]) -> list[tuple[str, str]]:
    return [(str(message["role"]), str(message["content"]).strip()) for message in messages]


class Programs:
    """Runs a script for each episode, in this process.

    Args:
        outlive: see `Agents`.

    Attributes:
        noted: the replies by node.
        wrong: failed assertions of scripts, which would otherwise count as programs that failed.
    """

    def __init__(self, script: Script, outlive: bool = False) -> None:
        self.script = script
        self.outlive = outlive
        self.episodes: AgentEpisodes
        self.noted: dict[str, TurnReply] = {}
        self.runs: Counter[str] = Counter()
        self.alive = 0
        self.wrong: list[AssertionError] = []

    async def run(self, start: AgentStart) -> AgentOutcome:
        self.runs[start.key] += 1
        self.alive += 1
        try:
            given = await self.script(Client(self, start))
            return given if isinstance(given, AgentOutcome) else AgentOutcome(given)
        except AssertionError as error:
            self.wrong.append(error)
            raise
        finally:
            self.alive -= 1

    async def rewarded(self, start: AgentStart, outcome: AgentOutcome) -> AgentOutcome:
        return outcome


async def one_after_the_other(client: Client) -> float:
    """A conversation of one to five turns."""
    messages: list[Message] = [client.user()]
    for _ in range(client.rng.randint(1, 5)):
        [reply] = await client.ask(messages)
        messages += [reply.message, client.user()]
    return client.rng.random()


async def tree(client: Client) -> float:
    """A random tree: continued, tried again, side by side, summarised, repeated, lost, with tools, with limits."""
    rng, paths = client.rng, [[client.user()]]

    async def step(path: list[Message]) -> None:
        kind = rng.randrange(8)
        if kind == 0:
            await client.lose(path)
        if kind == 1:
            key = f"{client.start.key} {len(path)} {path[-1]['content']} {rng.random()}"
            first = await client.ask(path, key=key)
            second = await client.ask(path, key=key)
            assert [reply.node_id for reply in first] == [reply.node_id for reply in second]
            replies = second
        elif kind == 2:
            replies = await client.ask(path, n=2)
            assert len({reply.node_id for reply in replies}) == 2
        elif kind == 3:
            replies = await client.ask(path, max_tokens=rng.randint(1, 3))
        elif kind == 4 and client.replies:
            before, past = rng.choice(client.replies)
            more = [client.user()]
            replies = await client.ask(more, parent=past.node_id)
            path = [*before, past.message, *more]
        elif kind == 5:
            replies = await client.ask(path[-1:], tools=[{"type": "function", "function": {"name": "probe"}}])
            path = path[-1:]
        elif kind == 7:
            stops = rng.sample(["1", "2 2", "9 ", " 3", "45"], rng.randint(1, 2))
            replies = await client.ask(path, stop=stops, temperature=rng.choice([None, 0.0, 0.5]))
        else:
            replies = await client.ask(path)
            if kind == 6:
                again = await client.ask(path, retry=True)
                assert again[0].node_id in {reply.node_id for _, reply in client.replies}
        paths.extend([*path, reply.message, client.user()] for reply in replies)

    for _ in range(rng.randint(1, 3)):
        chosen = [rng.choice(paths) for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.5:
            await asyncio.gather(*map(step, chosen))
        else:
            for path in chosen:
                await step(path)
    return rng.random()
