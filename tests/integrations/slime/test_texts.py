"""Requests of generate functions that exchange text, without a server."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from tests import tiny
from tests.integrations.slime.source import need_slime

need_slime()

from april.integrations.generating_code import CodeEpisode  # noqa: E402
from april.integrations.slime.functions import GenerateFunction, special_tokens  # noqa: E402
from april.rollout.episodes.turns import AgentStart, TurnReply  # noqa: E402

TOKENIZER = tiny.tokenizer()
END: int = TOKENIZER.eos_token_id
ENDED = TOKENIZER.convert_ids_to_tokens(END)


def encode(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False)
    return ids


class Answers:
    """A policy whose every turn is "abc" and the end token, or "abc" if the request has "c" as a stop string."""

    async def reply(self, key: str, request: Any) -> list[TurnReply]:
        if "c" in request.stop:
            ids = encode("abc")
            return [TurnReply("turn", {}, (), ids, [-1.0] * 3, "stop", [0] * 3, "c")]
        ids = [*encode("abc"), END]
        return [TurnReply("turn", {}, (), ids, [-1.0] * len(ids), "stop", [0] * len(ids))]


def generate_function() -> GenerateFunction:
    function = GenerateFunction.__new__(GenerateFunction)
    args = Namespace(rollout_temperature=1.0, rollout_top_p=1.0, rollout_top_k=-1)
    function.__dict__ |= {
        "_args": args,
        "_tokenizer": TOKENIZER,
        "_special": special_tokens(TOKENIZER),
        "_stop_token_ids": frozenset([END]),
    }
    return function


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("no_trim", [True, False])
@pytest.mark.parametrize("between", [f"{ENDED}x", "x"], ids=["a template's end", "no end"])
async def test_the_next_prompt_has_the_tokens_of_the_functions_text(skip: bool, no_trim: bool, between: str) -> None:
    function = generate_function()
    episode: CodeEpisode = CodeEpisode(Answers(), AgentStart("april-0.0", {}, 0))  # type: ignore[arg-type]
    sampling = {"skip_special_tokens": skip, "no_stop_trim": no_trim, "temperature": 1.0}
    first = await function._generate(episode, {"text": "hi", "sampling_params": sampling})
    assert first["text"] == ("abc" if skip or not no_trim else f"abc{ENDED}")
    text = f"hi{first['text']}{between}"
    await function._generate(episode, {"text": text, "sampling_params": sampling})
    asked = episode.turns[1].token_ids[:-4]
    assert asked == encode(text)


async def test_each_request_has_its_own_stop_strings() -> None:
    function = generate_function()
    episode: CodeEpisode = CodeEpisode(Answers(), AgentStart("april-0.0", {}, 0))  # type: ignore[arg-type]
    matched = []
    for stop, no_trim, text in ((["q"], True, f"abc{ENDED}"), ("c", True, "abc"), (["q", "c"], False, "ab")):
        sampling = {"stop": stop, "no_stop_trim": no_trim, "skip_special_tokens": False}
        output = await function._generate(episode, {"input_ids": encode("hi"), "sampling_params": sampling})
        assert output["text"] == text
        matched.append(output["meta_info"]["finish_reason"]["matched"])
    assert matched == [END, "c", "c"]
