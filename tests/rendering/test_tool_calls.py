"""Tool calls are read in the format of the policy's chat template; errors name the cause."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from april.environments.bridge import ChatBridge
from april.rendering.tool_calls import ERRORS, BadCall, hermes, llama, message_of, qwen_xml
from tests.environments.test_bridge import TOOL
from tests.rendering.tokenizers import tokenizer

arguments = st.dictionaries(
    st.text("abc", min_size=1), st.integers() | st.text() | st.lists(st.floats(0, 1)), max_size=3
)


@given(st.lists(arguments, min_size=1, max_size=3), st.text("xyz \n"))
def test_hermes_calls_are_read_in_order(calls, between):
    text = between.join(
        f"<tool_call>\n{json.dumps({'name': 'add', 'arguments': call})}\n</tool_call>" for call in calls
    )
    assert list(hermes(text)) == [{"name": "add", "arguments": call} for call in calls]


@given(st.lists(arguments, min_size=1, max_size=3))
def test_llama_calls_are_read_in_order(calls):
    text = "; ".join(json.dumps({"name": "add", "parameters": call}) for call in calls)
    assert list(llama(text)) == [{"name": "add", "arguments": call} for call in calls]
    assert list(llama("<|python_tag|>" + text)) == [{"name": "add", "arguments": call} for call in calls]


@given(st.text())
def test_no_text_is_too_broken_to_read(text):
    for read in (hermes, llama, qwen_xml):
        list(read(text))
        list(read(f"<tool_call>{text}</tool_call>"))
        list(read('{"name": ' + text))


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1", "llama3_2", "qwen3_5_think", "qwen3_8"])
def test_calls_rendered_by_the_template_are_read_back(name):
    tokens = tokenizer(name)
    bridge = ChatBridge(tokens, [tokens.eos_token_id], [TOOL])
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": "Sète, 中"}}}
    asked = {"role": "user", "content": "?"}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    written = tokens.apply_chat_template([asked, said], tokenize=False, tools=[TOOL])
    prompt = tokens.apply_chat_template([asked], tokenize=False, tools=[TOOL], add_generation_prompt=True)
    ids = tokens(written.removeprefix(prompt).strip(), add_special_tokens=False).input_ids
    assert bridge.read(ids).message["tool_calls"] == [call]


@pytest.mark.parametrize(
    ("read", "text", "reason"),
    [
        (hermes, "<tool_call>{'name': 'add'}</tool_call>", "no valid JSON"),
        (hermes, '<tool_call>{"name": "add"', "does not end with </tool_call>"),
        (hermes, '<tool_call>["add"]</tool_call>', 'must be a JSON object with "name"'),
        (hermes, '<tool_call>{"name": "add", "arguments": 3}</tool_call>', "of the call of add must be a JSON object"),
        (hermes, f"<tool_call>{'[' * 100_000}</tool_call>", "nested too deeply"),
        (hermes, '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "which JSON does not have"),
        (llama, '{"name": "add", "parameters": {"a": ' + "[" * 100_000, "nested too deeply"),
        (llama, '{"name": "add", "parameters": {', "no valid JSON"),
        (qwen_xml, "<tool_call>add(3)</tool_call>", "must hold <function=NAME>"),
    ],
)
def test_errors_of_unreadable_calls_name_the_cause(read, text, reason):
    (found,) = read(text)
    assert isinstance(found, BadCall)
    assert reason in found


def test_thinking_is_no_call_and_a_json_answer_neither():
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    message = message_of(f"<think>\nMaybe {call}?\n</think>\n\n4", hermes)
    assert message == {"role": "assistant", "content": "4", "reasoning_content": f"Maybe {call}?"}
    assert list(llama('{"answer": 4}')) == []
    assert message_of("<tool_call>{", hermes)[ERRORS]
