"""A program that talks to an OpenAI API: its session is an episode, token for token."""

from __future__ import annotations

import gc

import pytest

from april import Turn
from april.environments.bridge import ChatBridge
from april.environments.gateway import Program
from april.rollout.episodes.environment import ObservationError, checked
from tests.environments.test_bridge import observe, prompt_of, sample_of, say
from tests.rendering.tokenizers import tokenizer

CLIENT = """
import json, os, sys, urllib.request
row = json.loads(sys.stdin.readline())

def ask(messages, **more):
    body = json.dumps({"model": "policy", "messages": messages, **more}).encode()
    address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(address, body, headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]

messages = row["prompt"]
"""
AGENT = (
    CLIENT
    + """
for hint in ("higher", "lower"):
    messages.append(ask(messages))
    messages.append({"role": "user", "content": hint})
said = ask(messages)["content"]
print("done")
print(json.dumps({"reward": float(said == "48")}))
"""
)
ROW = {"id": "p", "prompt": [{"role": "user", "content": "Guess."}], "answer": None}


@pytest.fixture
def program(tmp_path):
    made = []

    def make(text: str, **settings) -> Program:
        (tmp_path / "agent.py").write_text(text)
        made.append(Program(["python", str(tmp_path / "agent.py")], **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()
    gc.collect()


def turn(text: str, index: int) -> Turn:
    return Turn("0.0", index, text, (1,))


def test_a_session_is_an_episode_that_the_template_would_write(program):
    tokens = tokenizer("qwen2_5")
    bridge, environment = ChatBridge(tokens, [tokens.eos_token_id]), program(AGENT)
    prompt = prompt_of(bridge, tokens, "Guess.")
    sample = sample_of(prompt, (tokens.eos_token_id,), bridge.begin(prompt, environment.reset(ROW, 0)))
    messages = [*ROW["prompt"]]
    for index, text in enumerate(["32", "56", "48"]):
        said = bridge.read(say(sample, tokens, text))
        step = checked(environment.step(turn(said.text, index)))
        messages.append({"role": "assistant", "content": text})
        if step.done:
            break
        observe(sample, bridge.extend(sample, step.observation))
        messages += step.observation
    assert (step.done, step.reward, index) == (True, 1.0, 2)
    written = tokens.apply_chat_template(messages, tokenize=False).removesuffix("\n")
    assert [*prompt.token_ids, *sample.response_ids] == tokens(written, add_special_tokens=False).input_ids


def test_a_program_begins_anew_with_a_reset(program):
    environment = program(AGENT)
    for _ in range(2):
        assert environment.reset(ROW, 0) == []
        assert checked(environment.step(turn("1", 0))).observation == [{"role": "user", "content": "higher"}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (CLIENT + "ask([*messages, ask(messages)][1:])", "message 0 of the program's request is not what it was"),
        (CLIENT + "ask([*messages, {**ask(messages), 'content': '?'}])", "message 1 of the program's request is not"),
        (CLIENT + "ask([*messages, ask(messages)], stream=True)", "asks for tools or for a stream"),
        (CLIENT + "ask(messages); print('no reward')", "the program's last line is 'no reward'"),
        (CLIENT + "ask(messages); raise KeyError('lost')", "the program failed: exit code 1, KeyError: 'lost'"),
    ],
)
def test_what_a_program_does_wrong_is_named(program, text, message):
    environment = program(text)
    environment.reset(ROW, 0)
    with pytest.raises(ObservationError, match=message):
        environment.step(turn("x", 0))


def test_a_program_that_asks_nothing_is_named(program):
    with pytest.raises(ObservationError, match="ended before it asked anything: exit code 3"):
        program("raise SystemExit(3)").reset(ROW, 0)
    with pytest.raises(ValueError, match="give a list of words"):
        Program("python agent.py")


def test_the_program_ends_with_its_episode(program):
    environment = program(AGENT)
    environment.reset(ROW, 0)
    process = environment.process
    environment.close()
    assert process.returncode is not None
    environment.close()


def test_the_task_may_reward_it(program):
    environment = program(CLIENT + "ask(messages)", rewarded=False)
    environment.reset(ROW, 0)
    assert checked(environment.step(turn("x", 0))).done


def test_a_program_sees_no_secret_and_the_gateway_answers_its_own_program_alone(program, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "sk-1")
    spy = (
        CLIENT
        + """
key = os.environ["OPENAI_API_KEY"]
os.environ["OPENAI_API_KEY"] = "april"
try:
    ask(messages)
    refused = 0
except urllib.error.HTTPError as error:
    refused = error.code
os.environ["OPENAI_API_KEY"] = key
found = [str(refused), os.environ.get("WANDB_API_KEY", "none"), os.environ["JUDGE_KEY"], str(len(key))]
ask([*messages, {"role": "user", "content": " ".join(found)}])
print(json.dumps({"reward": 1.0}))
"""
    )
    first = program(spy, env={"JUDGE_KEY": "sk-2"}).reset(ROW, 0)
    assert first[-1]["content"] == "401 none sk-2 32"
