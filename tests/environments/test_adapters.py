"""Real environments of other packages: `make test-environments`. Packages that are not installed are skipped."""

from __future__ import annotations

import random
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from april import EnvironmentLost, Turn
from april.environments.source import EnvironmentSource, EnvironmentSpec
from april.rollout.episodes.environment import checked, fingerprint

ROW = {"id": "p", "prompt": [{"role": "user", "content": "Play."}], "answer": None}


def turn(text: str, index: int = 0) -> Turn:
    return Turn("0.0", index, text, (1,))


def made(path: str, **params):
    return EnvironmentSource(EnvironmentSpec(f"april.environments.{path}", params=params))()


def gem_episode(environment, seed: int, guesses: list[int]) -> list[tuple]:
    heard = [(fingerprint(environment.reset(ROW, seed)),)]
    for index, guess in enumerate(guesses):
        step = checked(environment.step(turn(f"\\boxed{{{guess}}}", index)))
        heard.append((step.observation, step.reward, step.done))
        if step.done:
            break
    return heard


def test_gem_plays_and_replays():
    pytest.importorskip("gem")
    environment = made("gem:GemEnvironment", id="game:GuessTheNumber-v0-hard", max_number=63, max_turns=6)
    assert "between 1 and 63" in environment.reset(ROW, 5)
    episode = gem_episode(environment, 5, [32, 16, 8, 4, 2, 1])
    assert episode == gem_episode(environment, 5, [32, 16, 8, 4, 2, 1])
    again = made("gem:GemEnvironment", id="game:GuessTheNumber-v0-hard", max_number=63, max_turns=6)
    assert episode == gem_episode(again, 5, [32, 16, 8, 4, 2, 1])
    assert "target number is" in episode[1][0]
    assert episode[1][0].endswith("Enter your next guess.")


@pytest.mark.parametrize(
    "id", ["game:GuessTheNumber-v0-random", "game:Mastermind-v0-random", "game:Minesweeper-v0-random"]
)
def test_gem_episodes_side_by_side_draw_from_their_own_seeds(id):
    pytest.importorskip("gem")

    def first(seed: int) -> list[str]:
        environment = made("gem:GemEnvironment", id=id)
        said = [str(environment.reset(ROW, seed))]
        for index, text in enumerate(["\\boxed{5}", "\\boxed{1234}", "\\boxed{crane}"]):
            step = checked(environment.step(turn(text, index)))
            said.append(step.observation)
            if step.done:
                break
        return said

    alone = [first(seed) for seed in range(24)]
    barrier = threading.Barrier(8)

    def together(seed: int) -> list[str]:
        barrier.wait()
        return first(seed)

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(together, range(24))) == alone


def test_gem_that_the_policy_misuses_answers_all_the_same():
    pytest.importorskip("gem")
    environment = made("gem:GemEnvironment", id="game:GuessTheNumber-v0-hard")
    environment.reset(ROW, 0)
    assert checked(environment.step(turn("I do not know"))).done


def test_the_guessing_example_is_gems_game():
    """The example's own game and GEM's have the same numbers and the same messages."""
    pytest.importorskip("gem")
    path = Path(__file__).parents[2] / "examples" / "guess" / "env.py"
    both = [EnvironmentSource(EnvironmentSpec(f"{path}:Guess", params={"package": p}))() for p in ("own", "gem")]
    for seed in range(40):
        guesses = random.Random(-seed).choices(range(70), k=6)
        heard = []
        for environment in both:
            heard.append([environment.reset(ROW, seed)])
            for index, guess in enumerate(guesses):
                step = checked(environment.step(turn(str(guess), index)))
                heard[-1].append((step.observation, step.reward, step.done))
                if step.done:
                    break
        assert heard[0] == heard[1]


def test_gymnasium_takes_numbers_and_returns_its_rendering():
    pytest.importorskip("gymnasium")
    environment = made("gymnasium:GymnasiumEnvironment", id="FrozenLake-v1", render_mode="ansi", is_slippery=False)
    assert "SFFF" in re.sub(r"\x1b\[\d+m", "", environment.reset(ROW, 7))
    wrong = checked(environment.step(turn("I go up")))
    assert wrong.observation == "Error: say a number from 0 to 3; the last number in a turn counts"
    assert not wrong.done
    steps = [checked(environment.step(turn(f"I choose {action}"))) for action in (2, 2, 1, 1, 1, 2)]
    assert [step.reward for step in steps] == [0, 0, 0, 0, 0, 1]
    assert steps[-1].done
    environment.close()


def test_gymnasium_replays_with_its_seed():
    pytest.importorskip("gymnasium")
    environment = made("gymnasium:GymnasiumEnvironment", id="Blackjack-v1")
    runs = []
    for _ in range(2):
        said = [environment.reset(ROW, 3)]
        for _ in range(3):
            step = checked(environment.step(turn("1")))
            said.append((step.observation, step.reward, step.done))
            if step.done:
                break
        runs.append(said)
    assert runs[0] == runs[1]


def test_gymnasium_with_words_for_actions(tmp_path):
    pytest.importorskip("gymnasium")
    (tmp_path / "words.py").write_text(
        "def action(text):\n"
        "    try:\n"
        "        return ['left', 'down', 'right', 'up'].index(text.strip())\n"
        "    except ValueError:\n"
        "        raise ValueError('say left, down, right or up') from None\n"
        "def say(observation):\n"
        "    return f'You are at {observation}.'\n"
    )
    environment = made(
        "gymnasium:GymnasiumEnvironment",
        id="FrozenLake-v1",
        is_slippery=False,
        action=f"{tmp_path}/words.py:action",
        observation=f"{tmp_path}/words.py:say",
    )
    assert environment.reset(ROW, 0) == "You are at 0."
    assert checked(environment.step(turn("right"))).observation == "You are at 1."
    assert checked(environment.step(turn("north"))).observation == "Error: say left, down, right or up"


def test_skyrl_gym_takes_turns():
    pytest.importorskip("skyrl_gym")
    environment = made("skyrl:SkyRLEnvironment", id="gsm8k_multi_turn")
    row = {**ROW, "answer": "4", "max_turns": 3}
    assert environment.reset(row, 0) == []
    first = checked(environment.step(turn("Let me think.")))
    assert first.observation[0]["role"] == "user"
    assert not first.done
    last = checked(environment.step(turn("#### 4", 1)))
    assert (last.reward, last.done) == (1.0, True)
    with pytest.raises(ValueError, match="skyrl-gym has no environment 'chess'; it has aime"):
        made("skyrl:SkyRLEnvironment", id="chess")


OPENENV = """
from openenv.core.env_server import Action, Environment, Observation, State

class Say(Action):
    text: str

class Heard(Observation):
    text: str = ""

class Echo(Environment):
    def __init__(self):
        super().__init__()
        self.count = 0
    def reset(self, seed=None, episode_id=None, **kwargs):
        self.count = 0
        return Heard(text=f"seed {seed}")
    def step(self, action, timeout_s=None, **kwargs):
        self.count += 1
        return Heard(text=action.text.upper(), reward=len(action.text), done=self.count == 2)
    @property
    def state(self):
        return State(step_count=self.count)

def action(text):
    if not text:
        raise ValueError("say something")
    return Say(text=text)

def say(observation):
    return observation.text
"""
CLIENT = """
from openenv.core import EnvClient
from openenv.core.client_types import StepResult
from echo_env import Heard, Say

class Client(EnvClient):
    def _step_payload(self, action):
        return action.model_dump()
    def _parse_result(self, payload):
        heard = Heard(**payload["observation"])
        return StepResult(observation=heard, reward=payload.get("reward"), done=payload.get("done", False))
    def _parse_state(self, payload):
        return payload

def make():
    return Client(base_url="http://127.0.0.1:%d").sync()
"""


def test_openenv_in_this_process(tmp_path):
    pytest.importorskip("openenv.core.env_server")
    (tmp_path / "echo_env.py").write_text(OPENENV)
    named = {"make": "Echo", "action": "action", "observation": "say"}
    environment = made("openenv:OpenEnvEnvironment", **{k: f"{tmp_path}/echo_env.py:{v}" for k, v in named.items()})
    assert environment.reset(ROW, 9) == "seed 9"
    assert checked(environment.step(turn(""))).observation == "Error: say something"
    steps = [checked(environment.step(turn(text))) for text in ("ab", "abc")]
    assert [(step.observation, step.reward, step.done) for step in steps] == [("AB", 2.0, False), ("ABC", 3.0, True)]
    environment.close()


def test_openenv_behind_its_server(tmp_path, monkeypatch):
    server = pytest.importorskip("openenv.core.env_server")
    import uvicorn

    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "echo_env.py").write_text(OPENENV)
    import echo_env

    app = server.create_fastapi_app(echo_env.Echo, echo_env.Say, echo_env.Heard)
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    serving = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=serving.run, args=([listening],))
    thread.start()
    try:
        (tmp_path / "echo_client.py").write_text(CLIENT % listening.getsockname()[1])
        environment = made(
            "openenv:OpenEnvEnvironment",
            make="echo_client:make",
            action="echo_env:action",
            observation="echo_env:say",
        )
        assert environment.reset(ROW, 9) == "seed 9"
        step = checked(environment.step(turn("ab")))
        assert (step.observation, step.reward, step.done) == ("AB", 2.0, False)
    finally:
        serving.should_exit = True
        thread.join()
    with pytest.raises(EnvironmentLost, match="the environment's server does not answer"):
        environment.step(turn("x"))


def test_a_package_that_is_not_installed_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gem", None)
    with pytest.raises(ValueError, match=r"needs gem-llm, which the extra 'gem' brings: pip install"):
        made("gem:GemEnvironment", id="game:GuessTheNumber-v0-hard")
