"""Prompts as tokens: chat templates, special tokens, and what cannot be encoded."""

from __future__ import annotations

from typing import Any

import pytest

from april.tasks.encoding import Encoder, check_template_arguments
from april.tasks.task import Problem, TaskSpec
from tests.tasks.conftest import CHAT_TEMPLATE, make_tokenizer

USER, ASSISTANT = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "It is"}
GEMMA = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
MISTRAL = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{% endfor %}"
)
THINKING = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"


def encoder(template: str = CHAT_TEMPLATE, **settings: Any) -> Encoder:
    return Encoder(make_tokenizer(before="<bos>", chat_template=template), **settings)


def text(encoder: Encoder, problem: Problem) -> str:
    return encoder.tokenizer.decode(encoder(problem).token_ids)


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (GEMMA, [{"role": "system", "content": "Be brief."}, USER], r"\(system, user\): System role not supported"),
        (MISTRAL, [USER, USER], r"\(user, user\): roles must alternate"),
        ("{{ messages[0].nothing.at_all }}", [USER], r"\(user\): .* has no attribute"),
    ],
)
def test_a_template_that_raises_is_an_error_that_names_the_problem(template, messages, message):
    with pytest.raises(ValueError, match=f"^problem 'p': the chat template refuses the conversation {message}"):
        encoder(template + CHAT_TEMPLATE)(Problem("p", messages))


def test_a_prompt_that_cannot_be_tokenized_affects_no_other_prompt_of_its_batch():
    problems = [Problem("a", "fine"), Problem("b", "half \ud83d"), Problem("c", [USER]), Problem("d", "fine too")]
    found = list(encoder().batch(problems))
    assert [isinstance(each, ValueError) for each in found] == [False, True, False, False]
    assert "the tokenizer refuses its prompt" in str(found[1])
    assert [found[i] for i in (0, 2, 3)] == [encoder()(problems[i]) for i in (0, 2, 3)]


def test_a_conversation_that_ends_with_the_assistants_turn_is_refused_or_continued():
    problem = Problem("p", [USER, ASSISTANT])
    with pytest.raises(ValueError, match=r"ends with the assistant's turn.*task.continue_assistant = true"):
        encoder()(problem)
    assert text(encoder(continue_assistant=True), problem) == "<|user|>2 + 2?<eos><|assistant|>It is"
    assert text(encoder(continue_assistant=True), Problem("p", [USER])) == "<|user|>2 + 2?<eos><|assistant|>"


@pytest.mark.parametrize("rendered", ["<bos><|user|>2 + 2?<eos><|assistant|>", "2 + 2?"])
def test_text_that_was_rendered_beforehand_gets_no_second_beginning(rendered):
    assert text(encoder(), Problem("p", rendered)) == "<bos>" + rendered.removeprefix("<bos>")


def test_template_arguments_reach_the_template():
    problem = Problem("p", [USER])
    template = CHAT_TEMPLATE + THINKING
    assert text(encoder(template), problem).endswith("<|assistant|>")
    assert text(encoder(template, template_arguments={"enable_thinking": False}), problem).endswith("<think></think>")


def test_template_arguments_that_no_template_reads_are_refused():
    check_template_arguments({"enable_thinking": False}, encoder(CHAT_TEMPLATE + THINKING).tokenizer)
    with pytest.raises(ValueError, match=r"template_arguments.enable_thinkng: .* does not read 'enable_thinkng'"):
        check_template_arguments({"enable_thinkng": False}, encoder(CHAT_TEMPLATE + THINKING).tokenizer)
    with pytest.raises(ValueError, match=r"template_arguments.enable_thinking: .* is missing"):
        check_template_arguments({"enable_thinking": False}, make_tokenizer())
    with pytest.raises(ValueError, match=r"template_arguments = .*: april sets add_generation_prompt itself"):
        TaskSpec("reasoning_gym", "gcd", template_arguments={"add_generation_prompt": False})
