"""Programs' conversations with images: each sequence has the images of its messages, at their placeholders."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april import Group, Prompt, SamplingParams
from april.rollout.episodes import turn_places
from april.rollout.episodes.agent_episodes import AgentEpisodes
from april.rollout.episodes.conversation_tree import meaning
from april.rollout.episodes.environment import Message
from april.rollout.episodes.turns import BadTurn, PromptTooLong, TurnReply, TurnRequest
from april.rollout.params import EpisodeLimits
from april.rollout.trajectory.features import Feature, alike, collapsed, expanded, ranges_of, sources_in
from tests.branching import Client, Programs, TreeEngine, WordRenderer
from tests.rollout.test_agent_episodes import SAMPLING, score
from tests.rollout.test_episodes import Prompts
from tests.scheduling import scheduler_of

IMAGE = 290
KINDS = 6


def size(source: str) -> int:
    """Several images have the same size, and so the same tokens."""
    return 1 + int(source) % 3


def digest(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()


class Images:
    placeholder = IMAGE

    def read_ahead(self, sources: Iterable[str]) -> None: ...

    def expand(self, token_ids: Sequence[int], sources: Sequence[str]) -> tuple[list[int], tuple[Feature, ...]]:
        if list(token_ids).count(IMAGE) != len(sources):
            raise ValueError("placeholders and images differ in number")
        ids: list[int] = []
        features: list[Feature] = []
        for token in token_ids:
            count = 1
            if token == IMAGE:
                source = sources[len(features)]
                count = size(source)
                features.append(Feature(source, digest(source), len(ids), count))
            ids += [token] * count
        return ids, tuple(features)


class PictureRenderer(WordRenderer):
    def _message(self, message: Message) -> list[int]:
        content = message["content"]
        if isinstance(content, str):
            return super()._message(message)
        parts = [[IMAGE, 301] if part["type"] == "image" else written(part["text"]) for part in content]
        return [200, *(token for part in parts for token in part)]


def written(text: str) -> list[int]:
    return [300 + int(word) for word in text.split()]


class Blind(WordRenderer):
    """A template that writes no placeholder."""

    def _message(self, message: Message) -> list[int]:
        return [200]


async def pictures(client: Client) -> float:
    """A random tree whose messages have images; a branch may differ from another in the pixels of an image alone."""
    rng, world = client.rng, client.world
    paths: list[list[Message]] = [[message(rng)]]
    for _ in range(rng.randint(2, 6)):
        path = rng.choice(paths)
        if rng.random() < 0.3:  # the beginning again, with an image of the same size in place of another
            path = [other_image(one, rng) for one in path]
        try:
            replies = await world.episodes.reply(client.start.key, TurnRequest(path))
        except PromptTooLong:
            continue
        for reply in replies:
            world.seen[reply.node_id] = (path, reply)
            paths.append([*path, reply.message, message(rng)])
    return rng.random()


def message(rng: Any) -> Message:
    parts: list[Mapping[str, Any]] = [{"type": "text", "text": str(rng.randrange(9))}]
    parts += [{"type": "image", "image": str(rng.randrange(KINDS))} for _ in range(rng.randrange(3))]
    return {"role": "user", "content": parts if len(parts) > 1 else parts[0]["text"]}


def other_image(one: Message, rng: Any) -> Message:
    if isinstance(one["content"], str) or one["role"] != "user" or rng.random() < 0.5:
        return one
    return {**one, "content": [changed(part) for part in one["content"]]}


def changed(part: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "image", "image": str((int(part["image"]) + 3) % KINDS)} if part["type"] == "image" else part


class World(Programs):
    def __init__(self, script: Any) -> None:
        super().__init__(script)
        self.seen: dict[str, tuple[list[Message], TurnReply]] = {}


def play(script: Any, renderer: Any, seed: int, target: int) -> tuple[World, list[Group]]:
    world = World(script)
    limits = EpisodeLimits(retry_delay=0.0, parallel_turns=3, on_error="end")
    world.episodes = AgentEpisodes(world, renderer, 400, limits, images=Images())
    engine = TreeEngine(6, seed, 0.0)
    engine.capacity = type(engine.capacity)(engine.capacity.slots, 400)
    rollouts = scheduler_of(
        engine,
        Prompts(),
        score,
        episodes=world.episodes,
        rollout_batch_size=2,
        over_sampling_batch_size=target,
        n_samples_per_prompt=2,
        max_staleness=3,
        sampling=SAMPLING,
        retry_delay=0.0,
        seed=seed,
    )

    async def run() -> list[Group]:
        groups = []
        async with rollouts:
            for _ in range(3):
                groups += (await rollouts.next_batch()).groups
                await rollouts.update_weights()
        return groups

    return world, asyncio.run(run())


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), target=st.integers(2, 6), shared=st.sampled_from([1, 4, 32]))
def test_a_sequence_has_the_images_of_its_messages(seed: int, target: int, shared: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turn_places, "LEAST_SHARED", shared)
        world, groups = play(pictures, PictureRenderer(), seed, target)
    assert not world.wrong, world.wrong[0]
    checked = 0
    for group in groups:
        samples = {sample.id: sample for sample in group.samples}
        for name, (messages, reply) in world.seen.items():
            sample_id, turn = name.rsplit("/", 1)
            if (sample := samples.get(sample_id)) is None:
                continue
            before = len(sample.prompt_ids) + sample.turn_span(int(turn))[0]
            found = sample.features_between(0, before)
            whole = [*sample.prompt_ids, *sample.response_ids]
            assert list(reply.prompt_ids) == whole[:before]
            assert [feature.digest for feature in found] == [digest(source) for source in sources_in(messages)]
            inside = [place for feature in found for place in range(feature.offset, feature.end)]
            assert inside == [place for place, token in enumerate(whole[:before]) if token == IMAGE]
            assert [feature.length for feature in found] == [size(source) for source in sources_in(messages)]
            checked += bool(found)
        again = Group.from_dict(json.loads(json.dumps(group.to_dict())))
        assert [s.features for s in again.samples] == [s.features for s in group.samples]
        assert [s.prompt_ids for s in again.samples] == [s.prompt_ids for s in group.samples]
    assert checked


@pytest.mark.parametrize(
    ("renderer", "part"),
    [
        pytest.param(Blind, {"type": "image", "image": "1"}, id="the template writes no placeholder"),
        # Tokens of a tool's result must not pass for an image.
        pytest.param(PictureRenderer, {"type": "text", "text": "-10"}, id="text that has a placeholder"),
    ],
)
def test_a_request_with_other_places_than_images_is_refused(renderer: type[WordRenderer], part: dict[str, str]) -> None:
    said = []

    async def once(client: Client) -> float:
        episodes, key = client.world.episodes, client.start.key
        with pytest.raises(BadTurn) as refused:
            await episodes.reply(key, TurnRequest([{"role": "user", "content": [part]}]))
        said.append(str(refused.value))
        await episodes.reply(key, TurnRequest([{"role": "user", "content": "1"}]))
        return 1.0

    play(once, renderer(), 0, 2)
    assert set(said) == {"the messages cannot be encoded: placeholders and images differ in number"}


FEATURES = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from("abc")), max_size=4)


def placed(parts: list[tuple[int, int, str]]) -> tuple[tuple[Feature, ...], list[Any]]:
    """Features, and what each token stands for."""
    features, tokens = [], list[Any]()
    for gap, length, name in parts:
        tokens += ["text"] * gap
        features.append(Feature(name, name, len(tokens), length))
        tokens += [(name, place) for place in range(length)]
    return tuple(features), [*tokens, *["text"] * 9]


@given(one=FEATURES, other=FEATURES)
def test_sequences_are_alike_up_to_the_first_other_image(
    one: list[tuple[int, int, str]], other: list[tuple[int, int, str]]
) -> None:
    (mine, left), (theirs, right) = placed(one), placed(other)
    ids = [[token if token == "text" else "image" for token in side] for side in (left, right)]
    equal = next((i for i, (a, b) in enumerate(zip(*ids, strict=False)) if a != b), min(map(len, ids)))
    found = alike(mine, theirs, equal)
    assert found <= equal
    assert left[:found] == right[:found]
    if found < equal:
        assert any(feature.offset == found for feature in (*mine, *theirs))
    assert collapsed(left, mine) == [token for token in left if token == "text" or token[1] == 0]


def test_messages_are_equal_if_their_images_are() -> None:
    def user(*parts: Any) -> Any:
        content = [
            {"type": "image", "image": part[0]} if isinstance(part, tuple) else {"type": "text", "text": part}
            for part in parts
        ]
        return meaning({"role": "user", "content": content})

    assert user(" a ", ("1",), "b ") == user("a ", ("1",), "b")
    assert user("a", "b", ("1",)) == user("ab", ("1",))
    assert user("a", ("1",)) != user("a", ("2",))
    assert user("a", ("1",)) != user(("1",), "a")
    assert user("a", ("1",)) != user('a{"image": "1", "type": "image"}')
    assert user("a") == meaning({"role": "user", "content": "a"})


async def test_a_prompt_of_a_program_has_its_own_images() -> None:
    sampling = SamplingParams(9, max_turns=3)
    prompt = Prompt((1, 9, 9), features=(Feature("a", "a", 1, 2),))
    [sample] = Group.start(0, prompt, 1, sampling, 0).samples
    assert sample.prompt_features == prompt.features


def test_a_part_without_an_image_is_an_error_of_its_message() -> None:
    message = {"role": "user", "content": [{"type": "image"}]}
    for images in (None, Images()):
        with pytest.raises(ValueError, match=r"no images|differ in number"):
            expanded([1], [message], images)


@given(st.lists(st.tuples(st.sampled_from([IMAGE, 1, 2]), st.integers(1, 4)), max_size=8))
def test_ranges_are_the_longest_runs_of_the_placeholder(runs: list[tuple[int, int]]) -> None:
    ids = [token for token, length in runs for _ in range(length)]
    inside = [index for start, length in ranges_of(ids, IMAGE) for index in range(start, start + length)]
    assert inside == [index for index, token in enumerate(ids) if token == IMAGE]
    ends = [(start, start + length) for start, length in ranges_of(ids, IMAGE)]
    assert all(end < start for (_, end), (start, _) in pairwise(ends))
