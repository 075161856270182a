"""Suffixes read off a template are what the template writes; turns read back in the form of the APIs."""

import json
import re
from copy import deepcopy

import pytest

from april.rendering.choice import program_renderer
from april.rendering.conversation import TemplateError
from april.rendering.template_reader import LONGEST_KEPT, TemplateReader
from april.rollout.episodes.turns import BadTurn
from tests.rendering.tokenizers import tokenizer

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    },
}
ASKED = {"role": "user", "content": "1 + 2?"}
READ = ["qwen2_5", "qwen3", "qwen3_instruct_2507", "llama3_1", "llama3_2", "qwen3_5_think", "qwen3_6", "qwen3_8"]


@pytest.mark.parametrize("name", READ)
def test_a_turn_in_the_apis_form_renders_as_the_turn_that_was_drawn(name):
    tokens = tokenizer(name)
    renderer = TemplateReader(tokens, [tokens.eos_token_id])
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": "Sète, 中"}}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    prompt = tokens.decode(renderer.render([ASKED], [TOOL]))
    written = renderer.written([ASKED, said], [TOOL], generation=False).removeprefix(prompt).rstrip("\n")
    drawn = tokens(written, add_special_tokens=False).input_ids
    message = renderer.parse(drawn, [TOOL], "7")
    (read,) = message["tool_calls"]
    assert re.fullmatch("call_[0-9a-f]{16}_0", read["id"])
    assert read["id"] != renderer.parse(drawn, [TOOL], "8")["tool_calls"][0]["id"]
    assert json.loads(read["function"]["arguments"]) == {"a": 3, "b": "Sète, 中"}
    if "think" not in name and name not in {"qwen3_6", "qwen3_8"}:
        again = renderer.written([ASKED, message], [TOOL], generation=False).removeprefix(prompt).rstrip("\n")
        assert again == written


def test_a_turn_that_begins_inside_thinking():
    tokens = tokenizer("qwen3_5_think")
    renderer = TemplateReader(tokens, [tokens.eos_token_id])
    ids = tokens("Half of it.\n</think>\n\n32", add_special_tokens=False).input_ids
    assert renderer.parse(ids) == {"role": "assistant", "content": "32", "reasoning_content": "Half of it."}
    cut = tokens("Half of", add_special_tokens=False).input_ids
    assert renderer.parse(cut) == {"role": "assistant", "content": "", "reasoning_content": "Half of"}


def test_a_call_that_cannot_be_read_stays_in_the_text():
    tokens = tokenizer("qwen3")
    renderer = TemplateReader(tokens, [tokens.eos_token_id])
    good = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    ids = tokens(f"Well. {good}\n<tool_call>\n{{add}}\n</tool_call>", add_special_tokens=False).input_ids
    message = renderer.parse(ids, [TOOL], "0")
    assert "<tool_call>\n{add}\n</tool_call>" in message["content"]
    assert [one["function"]["name"] for one in message["tool_calls"]] == ["add"]
    assert set(message) == {"role", "content", "tool_calls"}
    assert "tool_calls" not in renderer.parse(ids)  # no tools were offered


def test_templates_that_cannot_be_extended_or_rendered_are_refused():
    tokens = tokenizer("qwen3")
    renderer = TemplateReader(tokens, [tokens.eos_token_id])
    assert renderer.extend([1], [tokens.eos_token_id], [{"role": "assistant", "content": "x"}]) is None
    odd = deepcopy(tokenizer("llama3_1"))
    with pytest.raises(BadTurn, match="does not take messages of the roles"):
        TemplateReader(odd, [odd.eos_token_id]).render([ASKED, {"role": "assistant", "tool_calls": [1, 2]}], [TOOL])
    odd.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(TemplateError, match="ends a turn with text"):
        TemplateReader(odd)
    glm = TemplateReader(tokenizer("glm4moe"))
    assert glm.render([ASKED])
    with pytest.raises(BadTurn, match="in none of the formats hermes, llama, qwen-xml"):
        glm.render([ASKED], [TOOL])


def test_a_program_may_send_text_where_calls_cannot_be_read(caplog):
    tokens = tokenizer("phi3_5")
    renderer = program_renderer(tokens, [tokens.eos_token_id])
    assert "requests of programs that offer tools are refused" in caplog.text
    assert renderer.render([ASKED])
    with pytest.raises(BadTurn):
        renderer.render([ASKED], [TOOL])


@pytest.mark.parametrize("name", READ)
def test_suffixes_are_kept_by_what_the_template_writes(name, monkeypatch):
    tokens = tokenizer(name)
    renderer = TemplateReader(tokens, [tokens.eos_token_id])
    prompt, turn = renderer.render([ASKED], [TOOL]), [tokens.eos_token_id]

    def suffix(id, content):
        result = {"role": "tool", "tool_call_id": id, "name": "add", "content": content}
        return renderer.extend(prompt, turn, [result], [TOOL])

    first = suffix("call_1", "3")
    long = suffix("call_1", "3 " * LONGEST_KEPT)
    with monkeypatch.context() as patch:
        patch.setattr(renderer, "_behind", None)
        assert suffix("call_2", "3") == first
    assert suffix("call_2", "4") != first
    assert len(renderer._kept) == 2
    assert suffix("call_2", "3 " * LONGEST_KEPT) == long


def test_ids_of_calls_that_a_template_writes_are_in_its_suffixes():
    tokens = deepcopy(tokenizer("qwen2_5"))
    tokens.chat_template = tokens.chat_template.replace(
        "message.content", "(message.tool_call_id or '') + message.content"
    )
    renderer = TemplateReader(tokens, [tokens.eos_token_id])
    prompt, turn = renderer.render([ASKED]), [tokens.eos_token_id]
    written = [
        tokens.decode(renderer.extend(prompt, turn, [{"role": "tool", "tool_call_id": id, "content": "3"}]))
        for id in ("one", "two")
    ]
    assert "one" in written[0]
    assert "two" in written[1]
