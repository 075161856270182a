from __future__ import annotations

import json

import pytest

from april.rollout.sampling import SamplingParams
from april.rollout.trajectory.group import Group
from april.tasks.encoding import Encoder
from april.tasks.task import Problem, TaskSpec
from tests.tasks.conftest import make_tokenizer

CONVERSATION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]


def test_plain_text_is_tokenized_unchanged(tokenizer):
    prompt = Encoder(tokenizer)(Problem("p", "2 + 2?"))
    assert tokenizer.decode(prompt.token_ids) == "<bos>2 + 2?"


def test_the_end_token_that_a_tokenizer_appends_is_removed():
    tokenizer = make_tokenizer(before="<bos>", after="<eos>")
    assert tokenizer("2 + 2?").input_ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(Encoder(tokenizer)(Problem("p", "2 + 2?")).token_ids) == "<bos>2 + 2?"


def test_an_end_token_that_the_user_wrote_stays(tokenizer):
    assert tokenizer.decode(Encoder(tokenizer)(Problem("p", "a<eos>")).token_ids) == "<bos>a<eos>"


def test_conversations_use_the_chat_template_with_its_special_tokens(chat_tokenizer):
    prompt = Encoder(chat_tokenizer)(Problem("p", CONVERSATION))
    assert chat_tokenizer.decode(prompt.token_ids) == "<|system|>Be brief.<eos><|user|>2 + 2?<eos><|assistant|>"


@pytest.mark.parametrize(
    ("chat_template", "text"),
    [("auto", "<bos>2 + 2?"), ("never", "<bos>2 + 2?"), ("always", "<|user|>2 + 2?<eos><|assistant|>")],
)
def test_plain_text_becomes_a_user_message_only_on_request(chat_tokenizer, chat_template, text):
    prompt = Encoder(chat_tokenizer, chat_template)(Problem("p", "2 + 2?"))
    assert chat_tokenizer.decode(prompt.token_ids) == text


def test_the_system_prompt_precedes_text_and_conversations():
    spec = TaskSpec("reasoning_gym", "gcd", system_prompt="Think.")
    first = {"role": "system", "content": "Think."}
    assert spec.with_system_prompt("q") == [first, {"role": "user", "content": "q"}]
    assert spec.with_system_prompt([{"role": "user", "content": "q"}]) == spec.with_system_prompt("q")
    assert TaskSpec("reasoning_gym", "gcd").with_system_prompt("q") == "q"


@pytest.mark.parametrize(
    ("prompt", "chat_template", "message"),
    [
        ("", "auto", "'p7': its prompt is empty"),
        (" \n", "always", "'p7': its prompt is empty"),
        ([], "auto", "'p7': its prompt is empty"),
        (CONVERSATION, "auto", "'p7': it is a conversation, but the tokenizer has no chat template"),
        ("text", "always", "'p7': it is a conversation, but the tokenizer has no chat template"),
        (CONVERSATION, "never", "'p7': it is a conversation, but chat_template"),
    ],
)
def test_problems_that_cannot_be_encoded_are_named(tokenizer, prompt, chat_template, message):
    with pytest.raises(ValueError, match=message):
        Encoder(tokenizer, chat_template)(Problem("p7", prompt))


def test_a_problem_is_restored_from_a_saved_group(tokenizer):
    problem = Problem("p", CONVERSATION[1]["content"], "4", {"level": 3, "tags": ["a"]})
    group = Group.start(0, Encoder(tokenizer)(problem), 2, SamplingParams(), seed=1)
    restored = Group.from_dict(json.loads(json.dumps(group.to_dict())))
    assert Problem.of(restored.prompt) == problem


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "gym"}, "kind = 'gym'"),
        ({"kind": "reasoning_gym"}, "name = None"),
        ({"kind": "records"}, "path = None"),
        ({"size": 0}, "size = 0"),
        ({"eval_size": -1}, "eval_size = -1"),
        ({"eval_size": 0.1}, "eval_size = 0.1"),
        ({"seed": -1}, "seed = -1"),
        ({"reward_scope": "batch"}, "reward_scope = 'batch'"),
        ({"extract": "last"}, "extract = 'last'"),
        ({"chat_template": "yes"}, "chat_template = 'yes'"),
        ({"chat_template": "never", "system_prompt": "Think."}, "system_prompt = 'Think.': needs the chat template"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    base = {"kind": "reasoning_gym", "name": None if settings.get("kind") else "gcd"}
    with pytest.raises(ValueError, match=message):
        TaskSpec(**{**base, **settings})
