"""The examples' environments, bit by bit: what their policies were taught is what a run makes of them."""

from __future__ import annotations

import json
import random
import sys
from itertools import islice
from pathlib import Path

import pytest

from april import Turn
from april.commands.main import run
from april.config.reading import load_recipe
from april.environments.source import EnvironmentSource, EnvironmentSpec
from april.environments.tools import ToolEnvironment

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch):
    """The make_checkpoint module of an example; the examples use the same module names."""
    made = ("make_checkpoint", "env", "agent", "chat_warm_start")

    def load(name: str):
        monkeypatch.syspath_prepend(str(EXAMPLES / name))
        for module in made:
            sys.modules.pop(module, None)
        return __import__("make_checkpoint")

    yield load
    for module in made:
        sys.modules.pop(module, None)


def test_keeping_to_the_hints_wins_half_of_the_games(example):
    guess = example("guess")
    tokenizer = guess.make_tokenizer(guess.PIECES, guess.PATTERN, guess.TEMPLATE)
    stage = guess.Stage(guess.Guess(guess.MOST, guess.TURNS, package="own"), tokenizer, guess.TURNS)
    episodes = list(islice(guess.demonstrations(stage, seed=1), 600))
    assert 0.42 < sum(episode.reward for episode in episodes) / 600 < 0.56
    for episode in episodes[:50]:
        said = tokenizer.decode([token for token, own in zip(episode.token_ids, episode.said, strict=True) if own])
        assert 1 <= said.count("<|im_end|>") <= guess.TURNS
        written = tokenizer.decode(episode.token_ids)
        assert tokenizer(written, add_special_tokens=False).input_ids == episode.token_ids


def test_halving_wins_every_game(example):
    guess = example("guess")
    tokenizer = guess.make_tokenizer(guess.PIECES, guess.PATTERN, guess.TEMPLATE)
    stage = guess.Stage(guess.Guess(guess.MOST, guess.TURNS, package="own"), tokenizer, guess.TURNS)

    def halve(heard):
        low, high = 0, 64
        for index, hint in enumerate(heard[1:]):
            middle = (low + high) // 2
            low, high = (middle, high) if hint == "higher" else (low, middle)
            assert index < 6
        return f"{low:02}-{high:02} {(low + high) // 2:02}"

    prompt = stage.prompt(guess.PROMPT)
    assert all(stage.play(prompt, halve, seed).reward == 1.0 for seed in range(100))


def test_games_that_are_trained_on_are_judged_by_their_questions_and_held_out_ones_by_the_number():
    path = str(EXAMPLES / "guess" / "env.py")
    game = EnvironmentSource(EnvironmentSpec(f"{path}:Guess", params={"package": "own", "by_turn": True}))()

    def play(split: str, seed: int, choose) -> tuple[list[float], str]:
        """The rewards of a game, and the last answer."""
        game.reset({"id": f"environment/{split}/0"}, seed)
        rewards, low, high = [], 0, 64
        while True:
            guess = choose(low, high)
            step = game.step(Turn("0.0", len(rewards), f"{low:02}-{high:02} {guess:02}", ()))
            rewards.append(step.reward)
            if step.done:
                return rewards, step.observation
            low, high = (guess, high) if step.observation == "higher" else (low, guess)

    rng = random.Random(0)
    for seed in range(40):
        rewards, said = play("train", seed, lambda low, high: (low + high) // 2)
        assert (set(rewards), said) == ({1.0}, "right")
        rewards, said = play("train", seed, lambda low, high: rng.randrange(low + 1, high))
        assert all(0 < reward <= 1 for reward in rewards)
        rewards, said = play("eval", seed, lambda low, high: rng.randrange(low + 1, high))
        assert sum(rewards) == (said == "right")
    game.reset({"id": "environment/train/0"}, 3)
    first, again, none = (game.step(Turn("0.0", turn, said, ())) for turn, said in enumerate(("00-64 31", "0 31", "x")))
    assert 0.999 < first.reward < 1
    assert again.reward == 0.0
    assert (none.reward, none.done) == (0.0, True)


def test_careful_players_find_the_divisor_with_the_tool(example):
    gcd = example("gcd_tool")
    tokenizer = gcd.make_tokenizer(gcd.pieces(), gcd.PATTERN, gcd.TOOL_TEMPLATE)
    tools = [gcd.schema_of(gcd.subtract)]
    stage = gcd.Stage(ToolEnvironment({"subtract": gcd.subtract}), tokenizer, gcd.TURNS, tools)
    for episode, problem in zip(gcd.demonstrations(stage, 0.0, 0, 30), gcd.problems(0, 30), strict=True):
        written = tokenizer.decode(episode.token_ids)
        assert tokenizer.unk_token not in written
        assert written.endswith(f"<answer>{problem['answer']}</answer><|im_end|>")
        assert tokenizer(written, add_special_tokens=False).input_ids == episode.token_ids
    steps = sorted(gcd.careful_steps(*problem["metadata"]["numbers"]) for problem in gcd.problems(5, 2000))
    assert 8 <= steps[1000] <= 16
    assert 70 <= steps[1980] <= 120


def test_the_slow_tool_takes_as_long_each_time_and_its_tail_is_heavy():
    path = str(EXAMPLES / "gcd_tool" / "env.py")
    source = EnvironmentSource(EnvironmentSpec(f"{path}:SlowSubtraction", params={"latency": 0.02, "tail": "heavy"}))
    assert [tool["function"]["name"] for tool in source.tools] == ["subtract"]
    one, other = source(), source()
    one.reset({}, 7)
    other.reset({}, 7)
    seconds = [one.seconds(turn) for turn in range(2000)]
    assert seconds == [other.seconds(turn) for turn in range(2000)]
    assert 0.014 < sum(seconds) / 2000 < 0.026
    assert max(seconds) > 10 * sorted(seconds)[1000]


def test_the_guess_recipe_trains(tmp_path, capsys):
    small = ["--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--task.eval-size", "4"]
    recipe = str(EXAMPLES / "guess" / "recipe.toml")
    code = run(["train", recipe, *small, "--steps", "2", "--output", str(tmp_path / "run"), "--trackers"])
    assert code == 0, capsys.readouterr().err
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "reward" in line] == [1, 2]
    assert all(0 < line["reward"] <= 6 for line in lines if "reward" in line)


def test_the_recipe_with_a_tool_is_read():
    recipe = load_recipe(EXAMPLES / "gcd_tool" / "recipe.toml")
    source = EnvironmentSource(EnvironmentSpec(tools=recipe.environment.tools))
    assert [tool["function"]["name"] for tool in source.tools] == ["subtract"]


def test_halving_names_every_commit_and_bad_habits_a_quarter(example):
    bisect = example("bisect")
    tokenizer = bisect.tokenizer_of()
    stage = bisect.stage_of(tokenizer)
    halving = list(islice(bisect.demonstrations(stage, seed=0, early=0.0, halves=1.0), 100))
    assert {episode.reward for episode in halving} == {1.0}
    for episode in halving[:20]:
        written = tokenizer.decode(episode.token_ids)
        assert tokenizer.unk_token not in written
        assert tokenizer(written, add_special_tokens=False).input_ids == episode.token_ids
    habits = list(islice(bisect.demonstrations(stage, seed=1), 1000))
    assert 0.20 < sum(episode.reward for episode in habits) / 1000 < 0.31


def test_the_records_to_find_commits_in_are_those_that_the_script_writes(example, tmp_path):
    bisect = example("bisect")
    bisect.write_problems(tmp_path)
    for name in ("train.jsonl", "held_out.jsonl"):
        assert (tmp_path / name).read_text() == (EXAMPLES / "bisect" / name).read_text()
    prompts = [
        {json.loads(line)["prompt"] for line in (tmp_path / name).read_text().splitlines()}
        for name in ("train.jsonl", "held_out.jsonl")
    ]
    assert prompts[0].isdisjoint(prompts[1])


def test_the_agent_that_finds_commits_trains_and_is_interrupted(tmp_path, capsys):
    small = ["--rollout-batch-size", "2", "--over-sampling-batch-size", "6", "--n-samples-per-prompt", "4"]
    recipe = str(EXAMPLES / "bisect" / "recipe.toml")
    less = ["--task.eval-size", "2", "--eval-samples", "1"]
    code = run(["train", recipe, *small, *less, "--steps", "2", "--output", str(tmp_path / "run"), "--trackers"])
    assert code == 0, capsys.readouterr().err
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "samples_resumed" in line]
    assert [line["step"] for line in steps] == [1, 2]
    assert sum(line["samples_resumed"] for line in steps) > 0
    assert all(line["environment_failures"] == 0 for line in steps)
    assert all(1 <= line["turns_mean"] <= 5 for line in steps)
