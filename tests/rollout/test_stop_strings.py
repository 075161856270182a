"""Stop strings: where they end a response, whatever chunks, interrupts and failures bring its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april import Chunk, FinishReason, Sample, SamplingParams
from april.rollout.generation.stopping_engine import StoppingEngine
from april.rollout.stop_strings import MARGIN, StopScanner, first_stop, stop_of, tokens_needed
from april.rollout.trajectory.routes import RouteRows
from tests.rendering.tokenizers import tokenizer
from tests.rollout.test_episodes import Prompts
from tests.scheduling import scheduler_of
from tests.scripted_engine import ScriptedEngine, response


@cache
def bytes_tokenizer() -> Any:
    return tokenizer("qwen3")


def decode(token_ids: Sequence[int]) -> str:
    return str(bytes_tokenizer().decode(list(token_ids), clean_up_tokenization_spaces=False))


def ends_at(token_ids: Sequence[int], stops: Sequence[str]) -> int | None:
    """The definition: the first number of tokens whose text contains a stop string."""
    texts = (decode(token_ids[:count]) for count in range(1, len(token_ids) + 1))
    return next((count for count, text in enumerate(texts, 1) if any(stop in text for stop in stops)), None)


PIECES = st.sampled_from(["a", "b", "\n", " ", "ab", "Observation:", "é", "中", "🙂", "<|im_end|>", "</answer>"])


@given(st.lists(PIECES, min_size=1, max_size=40).map("".join), st.data())
@settings(max_examples=300, deadline=None)
def test_a_scanner_finds_the_first_token_with_a_stop_string(text: str, data: st.DataObject) -> None:
    token_ids = bytes_tokenizer()(text, add_special_tokens=False).input_ids
    at = st.integers(0, len(text) - 1)
    parts = st.tuples(at, st.integers(1, 6)).map(lambda part: text[part[0] : part[0] + part[1]])
    stops = data.draw(st.lists(parts | st.text("ab\n🙂", min_size=1, max_size=3), min_size=1, max_size=3))
    expected = ends_at(token_ids, stops)
    scanner, taken = StopScanner(decode, stops), 0
    while taken < len(token_ids):
        if data.draw(st.booleans()):  # an interrupt: the scanner is made again of the last tokens
            scanner = StopScanner(decode, stops, token_ids[max(0, taken - tokens_needed(stops)) : taken])
        chunk = token_ids[taken : taken + data.draw(st.integers(1, 9))]
        count = scanner.scan(chunk)
        if count is not None:
            assert taken + count == expected
            found = stop_of(decode, token_ids[:expected], stops, ())
            assert found == first_stop(decode(token_ids[:expected]), stops) is not None
            return
        taken += len(chunk)
    assert expected is None


def test_a_long_turn_is_not_decoded_again_and_again() -> None:
    longest = 0

    def counted(token_ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return "x" * len(token_ids)

    scanner = StopScanner(counted, ["stop"])
    for _ in range(5000):
        assert scanner.scan([1]) is None
    assert longest < 500


@pytest.mark.parametrize("lengths", [[4], [1, 12], [30] * 20 + [1] * 300])
def test_a_scan_decodes_few_tokens_beyond_those_that_a_stop_string_can_begin_in(lengths: list[int]) -> None:
    decoded = 0

    def counted(token_ids: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(token_ids)
        return "".join("x" * token for token in token_ids)

    scanner, scans = StopScanner(counted, ["</answer>"]), 3000
    for number in range(scans):
        assert scanner.scan([lengths[number % len(lengths)]]) is None
    needed = len("</answer>") - 1 + MARGIN
    assert decoded / scans < (needed + 48) / min(lengths)


SMALL: dict[str, Any] = {"rollout_batch_size": 2, "over_sampling_batch_size": 4, "n_samples_per_prompt": 2}


async def score(*_: Any) -> float:
    return 0.0


def words(token_ids: Sequence[int]) -> str:
    return " ".join(map(str, token_ids))


def cut(whole: Sequence[int], stops: Sequence[str]) -> list[int]:
    counts = range(1, len(whole) + 1)
    return list(whole[: next((n for n in counts if any(stop in words(whole[:n]) for stop in stops)), len(whole))])


@given(
    st.integers(0, 1000),
    st.lists(st.sampled_from(["7", "1 2", " 99", "4 5 6", "absent"]), min_size=1, max_size=3),
    st.sampled_from([0.0, 0.1]),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_samples_end_at_their_stop_strings(seed: int, stops: list[str], failure_rate: float, overlap: bool) -> None:
    engine = ScriptedEngine(slots=5, seed=seed, failure_rate=failure_rate)
    sampling = SamplingParams(max_tokens=60, stop=tuple(stops))
    own = {**SMALL, "max_retries": 20, "retry_delay": 0.0}
    rollouts = scheduler_of(engine, Prompts(), score, sampling=sampling, decode=words, overlap=overlap, **own)

    async def run() -> list[Any]:
        groups = []
        async with rollouts:
            for _ in range(3):
                groups += (await rollouts.next_batch()).groups
                await rollouts.update_weights()
                groups += await rollouts.evaluate([group.prompt for group in groups[:2]])
        return groups

    for sample in [sample for group in asyncio.run(run()) for sample in group.samples]:
        whole = response(sample.seed, 60)
        assert sample.response_ids == cut(whole, stops)
        stopped = any(stop in words(sample.response_ids) for stop in stops)
        assert sample.finish is (FinishReason.STOP if stopped or len(whole) < 60 else FinishReason.LENGTH)
    rollouts.buffer.check()
    assert not engine.flight


def test_stop_strings_need_the_text_of_tokens() -> None:
    with pytest.raises(ValueError, match=r"stop = \('x',\): stop strings need the scheduler's argument decode"):
        scheduler_of(ScriptedEngine(), Prompts(), score, sampling=SamplingParams(stop=("x",)), **SMALL)


@pytest.mark.parametrize("stop", ["x", ("",), ("a", "�"), (1,)])
def test_a_stop_string_that_is_none_is_refused(stop: Any) -> None:
    with pytest.raises(ValueError, match=r"^stop = .*(give a list of texts|a stop string is a text)"):
        SamplingParams(stop=stop)


@pytest.mark.parametrize("turns", [0, 3])
async def test_the_engine_keeps_nothing_of_a_sample_that_ended_unless_it_continues(turns: int) -> None:
    class Keeping(ScriptedEngine):
        forgotten: tuple[str, ...] = ()

        def forget(self, sample_ids: Any = None) -> None:
            assert self.flight.keys().isdisjoint(sample_ids)
            self.forgotten += tuple(sample_ids)

    sampling = SamplingParams(max_tokens=60, stop=(" ",), max_turns=turns)
    sample = Sample(0, 0, (5,), sampling, seed=next(s for s in range(99) if len(response(s, 60)) > 20))
    engine = Keeping(slots=1)
    stopping = StoppingEngine(engine, words)
    stopping.submit(sample)
    chunks: list[Chunk] = []
    while not chunks or chunks[-1].finish is None:
        chunks += await stopping.poll()
    assert engine.forgotten == (() if turns else (sample.id,))


async def test_routes_of_a_forgotten_sample_are_dropped() -> None:
    stopping = StoppingEngine(ScriptedEngine(), words)
    stopping._late_routes["0.0"] = stopping._late_routes["0.1"] = RouteRows(0, np.zeros((1, 1, 1), np.uint8))
    stopping.forget(["0.0"])
    assert list(stopping._late_routes) == ["0.1"]
    stopping.forget()
    assert not stopping._late_routes


class LateRoutes(ScriptedEngine):
    """Supplies the experts of all tokens that it has drawn with the last chunk of a sample, as servers do."""

    async def interrupt(self, sample_ids: Any = None) -> list[Chunk]:
        total = {id: position for id, (_, position, _) in self.flight.items()}
        await super().interrupt(sample_ids)
        return [
            Chunk(id, (), (), self.version, routes=RouteRows(0, np.full((length, 1, 1), length, np.uint8)))
            for id, length in total.items()
        ]


async def test_experts_of_the_tokens_before_a_stop_string_are_kept() -> None:
    sample = Sample(0, 0, (5,), SamplingParams(max_tokens=60, stop=(" ",)), seed=3)
    engine = LateRoutes(slots=1)
    engine.flight[sample.id] = ([11, 12, 13, 14], 0, 60)
    stopping = StoppingEngine(engine, words)
    stopping.engine.submit = lambda sample: None  # type: ignore[method-assign]
    stopping.submit(sample)
    chunks = []
    while not chunks or chunks[-1].finish is None:
        chunks += await stopping.poll()
    for chunk in chunks:
        sample.extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)
        if chunk.routes is not None:
            sample.check_routes(chunk.routes, 0)
            sample.route(chunk.routes, chunk.version, False)
    assert sample.response_ids == [11, 12]
    assert sample.routes is not None
    assert sample.routes.length == 2  # the prompt's token and the first drawn one: the last token was not consumed
