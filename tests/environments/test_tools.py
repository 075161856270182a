"""Functions as tools: an invalid call is an observation, and never the end of a run."""

import asyncio
import inspect
import json
import pickle
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from april import EnvironmentLost, EnvStep, Prompt, Turn
from april.environments.bridge import ChatBridge
from april.environments.source import EnvironmentSource, EnvironmentSpec
from april.environments.tools import ToolClassEnvironment, ToolEnvironment, ToolError, schema_of
from april.rendering.tool_calls import hermes, message_of
from april.rollout.episodes.environment import ObservationError, checked
from tests.environments.test_bridge import sample_of, say
from tests.rendering.tokenizers import tokenizer


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def divide(a: float, b: float) -> float:
    """Divide two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a / b


async def slow(word: str) -> str:
    """Say a word back.

    Args:
        word: The word.
    """
    await asyncio.sleep(0)
    return word


class Counter:
    """A counter, as TRL's environment_factory makes one."""

    def __init__(self) -> None:
        self.value = 0

    def reset(self, start: int, **kwargs) -> str:
        self.value = start
        return f"It shows {start}."

    def press(self, times: int) -> str:
        """Press the button.

        Args:
            times: How often.
        """
        self.value += times
        return f"It shows {self.value}."

    def get_reward(self) -> float:
        return float(self.value)


def turn(text: str, index: int = 0) -> Turn:
    return Turn("0.0", index, text, (1,), message_of(text, hermes))


def call(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def contents(step: EnvStep) -> list[str]:
    return [message["content"] for message in checked(step).observation]


def test_calls_are_answered_in_their_order_and_a_turn_without_one_ends_the_episode():
    environment = ToolEnvironment({"add": add, "divide": divide})
    assert environment.reset({}, 0) == ""
    step = environment.step(turn("I add." + call("add", a=2, b=3) + call("divide", a=1, b=4)))
    assert step.observation == [
        {"role": "tool", "name": "add", "content": "5"},
        {"role": "tool", "name": "divide", "content": "0.25"},
    ]
    assert not step.done
    assert environment.step(turn("It is 5.", 1)) == EnvStep([], done=True)


@pytest.mark.parametrize(
    ("said", "observation"),
    [
        (call("multiply", a=1), "Error: there is no tool 'multiply'; there are add, divide"),
        (call("add", a=1), "Error: add: missing a required argument: 'b'"),
        (call("add", a=1, b=2, c=3), "Error: add: got an unexpected keyword argument 'c'"),
        (call("divide", a=1, b=0), "Error: divide failed: ZeroDivisionError: division by zero"),
        (call("add", a=1, b="x"), "Error: add failed: TypeError: unsupported operand"),
        ("<tool_call>{add</tool_call>", "Error: a tool call is no valid JSON"),
        ("<tool_call>", "Error: a tool call does not end with </tool_call>"),
    ],
)
def test_an_invalid_call_is_an_observation_with_the_cause(said, observation):
    (content,) = contents(ToolEnvironment({"add": add, "divide": divide}).step(turn(said)))
    assert content.startswith(observation)


@given(st.text())
def test_any_text_of_the_policy_is_answered(text):
    environment = ToolEnvironment({"add": add})
    for said in (text, f"<tool_call>{text}</tool_call>", call("add", a=text, b=text), call(text)):
        checked(environment.step(turn(said)))


def test_numbers_in_text_are_converted():
    xml = ToolEnvironment({"add": add, "slow": slow})
    said = Turn("0.0", 0, "", (1,), {"tool_calls": [{"function": {"name": "add", "arguments": {"a": "2", "b": "3"}}}]})
    assert contents(asyncio.run(xml.step(said))) == ["5"]


def test_async_and_synchronous_tools_can_be_called_in_one_turn():
    environment = ToolEnvironment({"add": add, "slow": slow})
    assert inspect.iscoroutinefunction(environment.step)
    assert not inspect.iscoroutinefunction(ToolEnvironment({"add": add}).step)
    said = turn(call("slow", word="x") + call("add", a=1, b=1) + call("slow", wrong=1))
    step = asyncio.run(environment.step(said))
    assert contents(step) == ["x", "2", "Error: slow: missing a required argument: 'word'"]


def test_a_tool_reports_the_loss_of_its_environment_to_the_scheduler():
    def gone() -> str:
        """Look."""
        raise EnvironmentLost("the sandbox does not answer")

    with pytest.raises(EnvironmentLost):
        ToolEnvironment({"gone": gone}).step(turn(call("gone")))


def test_a_class_with_tools_begins_with_its_row_and_owns_the_reward():
    environment = ToolClassEnvironment(Counter())
    row = {"id": "p", "prompt": "Press.", "answer": None, "start": 3, "unused": 1}
    assert environment.reset(row, seed=0) == "It shows 3."
    steps = [environment.step(turn(call("press", times=times), i)) for i, times in enumerate([2, -4])]
    steps.append(environment.step(turn("Done.", 2)))
    assert [contents(step) for step in steps] == [["It shows 5."], ["It shows 1."], []]
    assert [step.reward for step in steps] == [5.0, -4.0, 0.0]  # their sum is the last answer
    assert [step.done for step in steps] == [False, False, True]
    environment.reset(row, seed=0)
    assert environment.step(turn("Done.")).reward == 3.0


def test_a_reward_that_is_no_number_is_named():
    class Silent(Counter):
        def get_reward(self):
            return None

    environment = ToolClassEnvironment(Silent())
    environment.reset({"start": 0}, 0)
    with pytest.raises(ObservationError, match="get_reward returned None, which is no number"):
        environment.step(turn("Done."))


def test_an_invalid_tool_is_refused_by_name():
    def undescribed(a: int) -> int:
        """Double it."""
        return 2 * a

    with pytest.raises(ToolError, match=r"undescribed cannot be a tool: .*no description for the argument 'a'"):
        schema_of(undescribed)
    with pytest.raises(ToolError, match="int has neither step nor reset"):
        ToolClassEnvironment(3)


def test_a_conversation_with_tools_equals_the_template():
    """From the schema to the answer, with a real template: the policy sampled exactly the required tokens."""
    tokens = tokenizer("qwen3_instruct_2507")
    environment = ToolEnvironment({"add": add})
    tools = list(environment.toolbox.schemas.values())
    bridge = ChatBridge(tokens, [tokens.eos_token_id], tools)
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}]
    messages = [{"role": "user", "content": "1 + 2?"}]
    begun = tokens.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, tools=tools)
    messages.append({"role": "assistant", "content": "", "tool_calls": calls})
    written = tokens.apply_chat_template(messages, tokenize=False, tools=tools)
    said = written.removeprefix(begun).rstrip("\n")
    ids = tokens(said, add_special_tokens=False).input_ids
    read = bridge.read(ids)
    step = environment.step(Turn("0.0", 0, read.text, tuple(ids), read.message))
    messages += step.observation
    after = tokens.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, tools=tools)
    sample = sample_of(Prompt((1,)), (tokens.eos_token_id,), [2])
    say(sample, tokens, said.removesuffix("<|im_end|>"))
    behind = "<|im_end|>" + tokens.decode(bridge.extend(sample, step.observation))
    assert begun + said.removesuffix(tokens.eos_token) + behind == after


FILE = '''
def double(a: int) -> int:
    """Double it.

    Args:
        a: A number.
    """
    return 2 * a

def broken(a):
    """No."""

class Env:
    def __init__(self, size=1):
        if size < 0:
            raise ValueError("size must not be negative")
        self.size = size
    def reset(self, prompt, seed):
        return str(self.size)
    def step(self, turn):
        return None
    def close(self):
        pass

class Tools:
    def reset(self, **row):
        pass
    def double(self, a: int) -> int:
        """Double it.

        Args:
            a: A number.
        """
        return 2 * a

def factory():
    return Tools()

constant = 3
class Nothing:
    pass
'''


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(FILE)
    (tmp_path / "raises.py").write_text("1 / 0")
    return str(tmp_path)


def test_a_recipe_names_environments_and_tools(folder):
    source = EnvironmentSource(EnvironmentSpec("mine.py:Env", params={"size": 3}, folder=folder))
    assert source().reset({}, 0) == "3"
    assert source.tools == []
    for spec in (
        EnvironmentSpec(tools="mine.py:double", folder=folder),
        EnvironmentSpec("mine.py:Tools", folder=folder),
        EnvironmentSpec("mine.py:factory", folder=folder),
    ):
        source = pickle.loads(pickle.dumps(EnvironmentSource(spec)))
        assert [tool["function"]["name"] for tool in source.tools] == ["double"]
        environment = source()
        environment.reset({}, 0)
        assert contents(environment.step(turn(call("double", a=4)))) == ["8"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "path: name an environment, or functions in tools"),
        ({"path": "mine.py:Env", "tools": "mine.py:double"}, "path: name an environment, or functions in tools"),
        ({"path": "mine.py"}, "path = 'mine.py': must be \"FILE.py:NAME\""),
        ({"path": "other.py:Env"}, "path = 'other.py:Env': there is no file other.py in"),
        ({"path": "mine.py:Missing"}, "mine.py has no 'Missing'"),
        ({"path": "raises.py:Env"}, "importing it failed: ZeroDivisionError"),
        ({"path": "no_such_package.x:Env"}, "there is no module 'no_such_package'"),
        ({"path": "mine.py:Env", "params": {"size": -1}}, 'params {"size": -1} failed: ValueError: size must not be'),
        ({"path": "mine.py:Env", "params": {"seize": 1}}, "unexpected keyword argument 'seize'"),
        ({"path": "mine.py:constant"}, "this is a int, which cannot be called"),
        ({"path": "mine.py:Nothing"}, "Nothing has neither step nor reset"),
        ({"tools": "mine.py:double,broken"}, "broken cannot be a tool"),
        ({"tools": "mine.py:"}, 'must be "FILE.py:NAME,NAME,…"'),
    ],
)
def test_invalid_settings_of_tools_are_refused_in_one_line(folder, settings, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        EnvironmentSource(EnvironmentSpec(**settings, folder=folder))
    assert "\n" not in str(caught.value)
