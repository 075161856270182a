"""Renderers of model families: chosen by agreement with the chat template, and exact where both mechanisms apply."""

import pytest

pytest.importorskip("renderers", exc_type=ImportError)

from april.rendering.choice import renderer_of
from april.rendering.conversation import TemplateError
from april.rendering.model_family import MORE, RESULT, ModelFamily, family_of
from april.rendering.template_reader import TemplateReader
from tests.rendering.test_template_reader import ASKED, TOOL
from tests.rendering.tokenizers import tokenizer

BOTH = [
    ("qwen3", "qwen3"),
    ("qwen3_instruct_2507", "qwen3"),
    ("llama3_1", "llama-3"),
    ("qwen3_5_think", "qwen3.5"),
    ("qwen3_8", "qwen3.8"),
]


@pytest.mark.parametrize(("name", "family"), BOTH)
@pytest.mark.parametrize("turn", ["It is 3.", "中 .é\n\nYes", "", "<|im_end|"])
@pytest.mark.parametrize("ended", [True, False])
def test_both_mechanisms_extend_a_conversation_by_the_same_tokens(name, family, turn, ended):
    tokens = tokenizer(name)
    reader = TemplateReader(tokens, [tokens.eos_token_id])
    other = ModelFamily(family, tokens, [tokens.eos_token_id])
    thought = "x\n</think>\n\n" if reader._opens_thinking else ""
    ids = tokens(thought + turn, add_special_tokens=False).input_ids + ([tokens.eos_token_id] if ended else [])
    for messages, tools in (([MORE], []), ([RESULT], [TOOL]), ([RESULT, RESULT, MORE], [TOOL])):
        prompt = reader.render([ASKED], tools)
        assert list(reader.extend(prompt, ids, messages, tools)) == list(other.extend(prompt, ids, messages, tools))
        assert reader.parse(ids, tools) == other.parse(ids, tools)


@pytest.mark.parametrize("name", ["glm4moe", "nemotron_3_nano"])
def test_a_template_that_cannot_be_read_gets_its_family(name):
    tokens = tokenizer(name)
    renderer = renderer_of(tokens, [tokens.eos_token_id], [TOOL])
    prompt = renderer.render([ASKED], [TOOL])
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "x"}}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    whole = tokens(renderer.written([ASKED, said], [TOOL], generation=False), add_special_tokens=False).input_ids
    drawn = whole[len(prompt) :]
    message = renderer.parse(drawn, [TOOL], "1")
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1, "b": "x"}'}


def test_a_template_of_no_family_is_refused():
    with pytest.raises(TemplateError, match="no model family of the package renderers has this template"):
        renderer_of(tokenizer("phi3_5"), [], [TOOL])
    with pytest.raises(TemplateError, match="differs from the chat template"):
        ModelFamily("qwen3", tokenizer("qwen2_5"))
    assert family_of(tokenizer("cohere2"), [], True, None) is None
