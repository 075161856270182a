"""Turns, put behind each other token by token, are what the model's own chat template writes for the conversation."""

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april import FinishReason, Prompt, SamplingParams, TokenIds
from april.environments.bridge import ChatBridge, TextBridge, bridge_of
from april.rendering.conversation import TemplateError
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.sample import Sample
from april.rollout.trajectory.transition import Transition
from tests.rendering.tokenizers import tokenizer

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "One."}}},
    },
}
# Templates that write a conversation with another turn behind it as they wrote it before, where no turn thinks.
STABLE = ["qwen2_5", "qwen3_instruct_2507", "llama3", "llama3_1", "lfm2", "qwen2_5_vl"]
TOOLS = ["qwen2_5", "qwen3_instruct_2507", "llama3_1", "llama3_2"]


def prompt_of(bridge: ChatBridge, tokens, content: str) -> Prompt:
    messages = [{"role": "user", "content": content}]
    text = tokens.apply_chat_template(messages, tokenize=False, **bridge.prompt_arguments)
    return Prompt(tuple(tokens(text, add_special_tokens=False).input_ids), "p", {"prompt": messages})


def sample_of(prompt: Prompt, stops: tuple[int, ...], first: list[int]) -> Sample:
    sampling = SamplingParams(max_tokens=10**6, stop_token_ids=stops, max_turns=100)
    sample = Group.start(0, prompt, 1, sampling, seed=0).samples[0]
    observe(sample, first)
    return sample


def observe(sample: Sample, token_ids) -> None:
    sample.observe(token_ids, Transition(sample.length, len(token_ids)))


def say(sample: Sample, tokens, text: str, end: bool = True) -> list[int]:
    ids = tokens(text, add_special_tokens=False).input_ids + ([tokens.eos_token_id] if end else [])
    sample.extend(ids, [-0.5] * len(ids), version=0, finish=FinishReason.STOP)
    return ids


# What a template trims or what ends its turns cannot stand in a conversation that it is to write word for word.
text = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=12).map(
    lambda t: t.replace("<", "").replace("\\", "") or "x"
)
turn = st.text("ab1 .é中\n", min_size=1, max_size=12).map(lambda t: t.strip() or "x")


@pytest.mark.parametrize("name", STABLE)
@settings(max_examples=25, deadline=None)
@given(asked=text, turns=st.lists(st.tuples(turn, st.booleans(), text), min_size=1, max_size=4))
def test_prompt_turns_and_bridges_read_as_the_template_writes_them(name, asked, turns):
    tokens = tokenizer(name)
    bridge = ChatBridge(tokens, [tokens.eos_token_id])
    prompt = prompt_of(bridge, tokens, asked)
    sample = sample_of(prompt, (tokens.eos_token_id,), bridge.begin(prompt, ""))
    messages = [{"role": "user", "content": asked}]
    for said, ended, observation in turns:
        ids = say(sample, tokens, said, ended)
        assert bridge.read(ids).text == said
        observe(sample, bridge.extend(sample, observation))
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": observation}]
    written = tokens.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokens.decode([*prompt.token_ids, *sample.response_ids]) == written
    assert [*prompt.token_ids, *sample.response_ids] == tokens(written, add_special_tokens=False).input_ids
    ends = [i for i, t in enumerate(sample.response_ids) if t == tokens.eos_token_id and sample.loss_mask[i]]
    assert len(ends) == sum(ended for _, ended, _ in turns)
    assert all(sample.logprobs[i] == -0.5 for i in ends)


@pytest.mark.parametrize("name", TOOLS)
@settings(max_examples=25, deadline=None)
@given(results=st.lists(st.lists(text, min_size=1, max_size=3), min_size=1, max_size=3))
def test_results_of_tools_equal_the_template(name, results):
    tokens = tokenizer(name)
    bridge = ChatBridge(tokens, [tokens.eos_token_id], [TOOL])
    prompt = prompt_of(bridge, tokens, "What is 1 + 2?")
    sample = sample_of(prompt, (tokens.eos_token_id,), bridge.begin(prompt, ""))
    messages = [{"role": "user", "content": "What is 1 + 2?"}]
    for answers in results:
        say(sample, tokens, "Let me see.")
        observed = [{"role": "tool", "name": "add", "content": answer} for answer in answers]
        observe(sample, bridge.extend(sample, observed))
        messages += [{"role": "assistant", "content": "Let me see."}, *observed]
    written = tokens.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, tools=[TOOL])
    assert [*prompt.token_ids, *sample.response_ids] == tokens(written, add_special_tokens=False).input_ids


def test_thinking_stays_where_the_template_would_drop_it():
    """Qwen3's template omits the thinking of earlier turns. The policy sampled it, so it stays."""
    tokens = tokenizer("qwen3")
    bridge = ChatBridge(tokens, [tokens.eos_token_id])
    prompt = prompt_of(bridge, tokens, "Guess.")
    sample = sample_of(prompt, (tokens.eos_token_id,), bridge.begin(prompt, ""))
    said = say(sample, tokens, "<think>\nHalf of it.\n</think>\n\n32")
    observe(sample, bridge.extend(sample, "higher"))
    assert list(sample.turn_ids(0)) == said
    kept = tokens.decode([*prompt.token_ids, *sample.response_ids])
    conversation = [("user", "Guess."), ("assistant", "<think>\nHalf of it.\n</think>\n\n32"), ("user", "higher")]
    messages = [{"role": role, "content": content} for role, content in conversation]
    written = tokens.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert kept.replace("<think>\nHalf of it.\n</think>\n\n", "") == written


def test_the_observation_of_reset_is_a_message_after_the_prompt():
    tokens = tokenizer("qwen2_5")
    bridge = ChatBridge(tokens, [tokens.eos_token_id])
    prompt = prompt_of(bridge, tokens, "Play.")
    messages = [{"role": "user", "content": "Play."}, {"role": "user", "content": "Between 1 and 63."}]
    written = tokens.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    begun = [*prompt.token_ids, *bridge.begin(prompt, "Between 1 and 63.")]
    assert begun == tokens(written, add_special_tokens=False).input_ids


def test_a_prompt_that_already_lets_the_policy_speak_is_refused(caplog):
    tokens = tokenizer("qwen2_5")
    bridge = ChatBridge(tokens, [tokens.eos_token_id])
    messages = [{"role": "user", "content": "?"}]
    open_text = tokens.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = Prompt(tuple(tokens(open_text, add_special_tokens=False).input_ids), "p", {"prompt": messages})
    assert bridge.begin(prompt, "") is None
    assert "the prompt is not what the chat template writes before a turn of the policy" in caplog.text


def test_raw_token_ids_are_put_there_as_they_are():
    tokens = tokenizer("qwen2_5")
    for bridge in (ChatBridge(tokens, [tokens.eos_token_id]), TextBridge(tokens)):
        prompt = Prompt((1, 2))
        assert bridge.begin(prompt, TokenIds((5, 6))) == (5, 6)
        sample = sample_of(prompt, (), [3])
        say(sample, tokens, "x", end=False)
        assert bridge.extend(sample, TokenIds((7,))) == (7,)


def test_a_turn_that_ended_with_another_token_is_not_bridged(caplog):
    tokens = tokenizer("qwen3")
    other = tokens.convert_tokens_to_ids("<think>")
    bridge = ChatBridge(tokens, [tokens.eos_token_id, other])
    sample = sample_of(Prompt((1,)), (other,), [2])
    sample.extend([5, other], [-1.0, -1.0], version=0)
    assert bridge.extend(sample, "next") is None
    assert "the policy ended its turn with <think>, the chat template ends it with <|im_end|>" in caplog.text


def test_llama_may_end_a_message_before_a_tool_answers():
    tokens = tokenizer("llama3_1")
    ended = tokens.convert_tokens_to_ids("<|eom_id|>")
    if ended == tokens.unk_token_id:
        tokens.add_special_tokens({"additional_special_tokens": ["<|eom_id|>"]})
        ended = tokens.convert_tokens_to_ids("<|eom_id|>")
    bridge = ChatBridge(tokens, [tokens.eos_token_id, ended], [TOOL])
    sample = sample_of(Prompt((1,)), (ended,), [2])
    sample.extend([5, ended], [-1.0, -1.0], version=0)
    behind = tokens.decode(bridge.extend(sample, [{"role": "tool", "name": "add", "content": "3"}]))
    assert behind.startswith("<|start_header_id|>ipython")


def test_glm_ends_a_turn_with_the_next_role(caplog):
    tokens = tokenizer("glm4moe")
    user, observation = tokens.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
    bridge = ChatBridge(tokens, [user, observation])
    called = sample_of(Prompt((1,)), (user, observation), [2])
    called.extend([5, observation], [-1.0, -1.0], version=0)
    answer = [{"role": "tool", "content": "3"}]
    assert tokens.decode(bridge.extend(called, answer)).startswith("\n<tool_response>")
    assert bridge.extend(called, "next") is None
    assert "ended its turn with <|observation|>, the chat template ends it with <|user|>" in caplog.text


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("smolvlm", "does not write what a message says"),
        ("phi3", "ends a prompt differently where a turn follows"),
    ],
)
def test_a_template_that_cannot_be_bridged_is_refused_before_the_run(name, reason):
    with pytest.raises(TemplateError, match=reason):
        ChatBridge(tokenizer(name), [])


def test_messages_that_the_template_leaves_out_or_that_only_the_policy_writes_are_refused(caplog):
    tokens = tokenizer("cohere2")
    bridge = ChatBridge(tokens, [tokens.eos_token_id])
    sample = sample_of(Prompt((1,)), (tokens.eos_token_id,), [2])
    say(sample, tokens, "x")
    assert bridge.extend(sample, [{"role": "tool", "content": "3"}]) is None
    assert "the chat template leaves out messages of the role 'tool'" in caplog.text
    caplog.clear()
    assert bridge.extend(sample, [{"role": "assistant", "content": "3"}]) is None
    assert "which the policy did not draw" in caplog.text


def test_without_a_chat_template_text_follows_the_turn(caplog):
    tokens = tokenizer("qwen2_5")
    bridge = bridge_of(tokens, [tokens.eos_token_id], chat_template="never")
    sample = sample_of(Prompt((1,)), (tokens.eos_token_id,), bridge.begin(Prompt((1,)), ""))
    said = say(sample, tokens, "6,4")
    assert bridge.read(said).text == "6,4"
    assert tokens.decode(bridge.extend(sample, "2,4\n")) == "2,4\n"
    with caplog.at_level(logging.WARNING):
        assert bridge.extend(sample, [{"role": "user", "content": "x"}]) is None
    assert "needs a tokenizer with a chat template" in caplog.text
    with pytest.raises(TemplateError, match="tools need a tokenizer with a chat template"):
        bridge_of(tokens, [], "never", [TOOL])


@pytest.mark.parametrize("name", ["qwen2_5", None])
def test_the_text_of_a_turn_ends_with_its_stop_string(name: str | None) -> None:
    tokens = tokenizer(name or "qwen2_5")
    ids = tokens("Look: <search>who</search> and so on", add_special_tokens=False).input_ids
    bridge = bridge_of(tokens, (tokens.eos_token_id,), "auto" if name else "never", stops=("</search>", "</answer>"))
    assert bridge.read(ids).text == "Look: <search>who</search>"
    assert bridge.read(ids[:3]).text == tokens.decode(ids[:3])
