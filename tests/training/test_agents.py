"""`april train` with a program that drives its episodes; killed at any moment, it ends like the run that never died."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from april.reporting.completions import files, read_completions
from tests.forked import run as april
from tests.killed_run import straight_and_killed
from tests.training.test_episodes import steps_of
from tests.training.test_trainer import metrics

ROOT = Path(__file__).parents[2]
PROGRAM = '''
from openai import AsyncOpenAI

PROBE = {"type": "function", "function": {"name": "probe", "description": "Probe.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}}}}}


async def play(record, access):
    """Two turns, then the second one again with another question, then a summary of it all with a tool."""
    async with AsyncOpenAI(base_url=f"{access.address}/v1", api_key=access.secret, timeout=3600) as client:
        async def ask(messages, **more):
            answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=12, **more)
            return answer.choices[0].message
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": str(record["seed"] % 9)}]
        first = await ask(messages)
        said = {"role": "assistant", "content": (first.content or "").strip()}
        second = await ask([*messages, said, {"role": "user", "content": "more"}])
        third = await ask([*messages, said, {"role": "user", "content": "else"}])
        last = await ask([{"role": "user", "content": "sum it up"}], tools=[PROBE])
        texts = [one.content or "" for one in (first, second, third, last)]
    return {"reward": sum(len(text) % 5 for text in texts) / 16, "letters": len("".join(texts))}
'''
RECIPE = """
[model]
path = "MODEL"
[task]
kind = "environment"
prompt = "say"
eval_size = 2
[environment]
function = "agent.py:play"
max_turns = 5
concurrency = 64
[rollout]
rollout_batch_size = 2
over_sampling_batch_size = 4
n_samples_per_prompt = 2
max_response_length = 48
max_staleness = 2
[engine]
max_num_seqs = 12
context_length = 512
[algorithm]
kl_coef = 0.0
[training]
steps = 3
learning_rate = 1e-3
eval_samples = 1
eval_interval = 3
save_interval = 2
threads = 1
journal_flush_seconds = 0
[reporting]
output = "OUT"
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "agent.py").write_text(PROGRAM)
    path = tmp_path / "recipe.toml"
    model = str(ROOT / "examples/gcd_tool/model")
    path.write_text(RECIPE.replace("OUT", str(tmp_path / "run")).replace("MODEL", model))
    return path


def test_a_run_trains_on_the_conversations_of_a_program(recipe: Path, tmp_path: Path) -> None:
    done = april("train", recipe)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    assert json.loads((run / "summary.json").read_text())["discarded_tokens"] == 0
    lines = steps_of(run)
    assert len(lines) == 3
    assert all(line["turns_mean"] == 4 for line in lines)
    # The second question after the first turn is another sequence, and the summary a third one.
    assert all(line["sequences_per_episode"] == 3 for line in lines)
    assert all(line["staleness_max"] <= 2 for line in lines)
    assert all(line["environment_failures"] == line["episodes_restarted"] == 0 for line in lines)
    rows = read_completions(files(run)[-2])
    assert len(rows) == 2 * 2 * 3
    for group in {row["group"] for row in rows}:
        for episode in range(2):
            own = [row for row in rows if (row["group"], row["episode"]) == (group, episode)]
            assert len({row["reward"] for row in own}) == 1
            assert sorted(len(row["turns"]) for row in own) == [2, 2, 3]


def test_a_repeatedly_killed_run_ends_like_an_undisturbed_one(recipe: Path, tmp_path: Path) -> None:
    """Each program starts again after a crash, and gets its turns from the journal up to its last one."""
    straight, killed = straight_and_killed(recipe, tmp_path)
    for one, other in zip(metrics(killed), metrics(straight), strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            if name in (
                "samples_interrupted",
                "samples_resumed",
                "engine_idle_slots",
            ):
                continue
            # Samples that share a forward pass are others, and with them the rounding; no token is.
            same = pytest.approx(other[name], rel=1e-3, abs=1e-4) if isinstance(value, float) else other[name]
            assert value == same, name
