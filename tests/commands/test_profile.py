"""`april profile`, on the embedded engine."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from april.simulation.profile import Profile, Tail
from april.simulation.profile_page import lines_of, profile_page, trust_of
from april.simulation.recorded import read_recorded
from april.simulation.turns import Turns
from april.simulation.workload import Workload
from tests.commands.conftest import status
from tests.simulation.test_page import POINT, SYNCHRONOUS

SLOW = """
import asyncio

from april import EnvStep


class Slow:
    def reset(self, prompt, seed):
        return "?"

    async def step(self, turn):
        await asyncio.sleep(0.05)
        return EnvStep("and")

    def close(self):
        pass
"""
April = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--rollouts", "0"), "--rollouts 0: must be at least 1"),
        (("--simulated-steps", "2"), "--simulated-steps 2: must be at least 8"),
        (("--output", "recipe.toml"), "nothing can be written to"),
        (("--output", "trained"), "--output trained: a run is there; choose another directory"),
        (("--task.name", "gdc"), "gcd"),
        (("--model.path", "/nowhere"), "no such directory"),
        (("--max-response-length", "256"), "leaves no room for a prompt in a context of 256 tokens"),
        (("--max-prompt-length", "5"), "more than the 5 for which there is room (max_prompt_length)"),
    ],
)
def test_errors_are_one_line(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: tuple[str], message: str
) -> None:
    monkeypatch.chdir(recipe.parent)
    (recipe.parent / "trained").mkdir()
    (recipe.parent / "trained" / "metrics.jsonl").touch()
    assert status("profile", "recipe.toml", *options) == 2
    said = capsys.readouterr()
    assert message in said.out + said.err
    assert "Traceback" not in said.err


def test_a_profile_forecasts_the_gain_and_is_an_input_of_simulate(recipe: Path, april: April) -> None:
    folder = recipe.parent / "runs" / "profile"
    folder.mkdir(parents=True)
    (folder / "trace.jsonl").write_text('{"step": 1}\n')
    done = april("profile", "recipe.toml", "--max-num-seqs", "4", "--rollouts", "1", "--simulated-steps", "8")
    assert done.returncode == 0, done.stderr
    document = json.loads((folder / "profile.json").read_text())
    assert document["lengths"]["responses"] == 9
    assert 0 < document["tail"]["step_occupancy"] <= 1
    assert document["settings"][0]["synchronous"]
    assert document["measured_consumed_tokens_per_second"] > 0
    assert document["verdict"] in " ".join(done.stdout.split())
    assert "Throughput against staleness" in (folder / "profile.html").read_text()
    assert len(read_recorded(folder).workload.observed) == 9, "and nothing of the profile that was there before"
    assert (folder / "cost_model.json").is_file()


def test_episodes_are_profiled_with_the_time_of_their_environment(recipe: Path, april: April) -> None:
    (recipe.parent / "slow.py").write_text(SLOW)
    settings = recipe.read_text().split("[rollout]")[1]
    recipe.write_text(
        '[model]\npath = "policy"\n[task]\nkind = "environment"\nprompt = "say"\n'
        '[environment]\npath = "slow.py:Slow"\nmax_turns = 3\nworkers = 0\n[rollout]\n'
        f"stop_token_ids = [20, 21, 22, 23, 24, 25, 26, 27]{settings}"
    )
    profiled = april("profile", "recipe.toml", "--max-num-seqs", "4", "--rollouts", "1", "--simulated-steps", "8")
    assert profiled.returncode == 0, profiled.stderr
    folder = recipe.parent / "runs" / "profile"
    turns = json.loads((folder / "profile.json").read_text())["turns"]
    assert 0.05 <= turns["seconds"] < 10
    assert 1 <= turns["tokens"] <= 48
    assert turns["observation_tokens"] >= 1
    assert "Episodes: turns of" in profiled.stdout
    assert read_recorded(folder).turns == Turns(**turns), "april simulate goes on from them"


def profile(lengths: list[int], gain: float, truncated: int = 0, occupancy: float = 0.5) -> Profile:
    cut = np.arange(len(lengths)) >= len(lengths) - truncated
    better = SYNCHRONOUS.consumed_tokens_per_second * gain
    points = [SYNCHRONOUS, replace(POINT, consumed_tokens_per_second=better, generated_tokens_per_second=better)]
    return Profile(
        workload=Workload("run", observed=tuple(sorted(lengths)), max_tokens=max(lengths)),
        truncated=cut,
        tail=Tail(step_seconds=10.0, share=0.4, occupancy=0.1, step_occupancy=occupancy),
        consumed_tokens_per_second=SYNCHRONOUS.consumed_tokens_per_second,
        cost=None,  # type: ignore[arg-type]
        points=points,
    )


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (profile([10, 20, 400], 1.5), "Worth it: N' = 12,288 is expected to bring 1.50 times"),
        (profile([99, 100, 101], 1.0), r"Not worth it: \+0% .* lengths hardly vary: the 99th percentile is 1.01 times"),
        (profile([10, 400, 400], 1.04, truncated=2), "Not worth it: .* 67% of the responses reach the budget"),
        (profile([10, 20, 400], 1.02, occupancy=0.95), "Not worth it: .* 95% of the slots already decode"),
        (profile([10, 20, 400], 1.02), "Not worth it: .* empty slots cost little"),
    ],
)
def test_the_verdict_contains_its_reason(found: Profile, said: str) -> None:
    assert re.search(said, found.verdict)
    assert found.verdict.split("'")[0] in profile_page("title", found)
    assert ("are cut off there" in trust_of(found)) == (found.truncated.mean() > 0.5)
    assert max(map(len, list(lines_of(found))[1:-1])) <= 80


def test_the_tail_begins_after_nine_of_ten_samples() -> None:
    def span(sample: int, start: float, end: float) -> dict[str, object]:
        return {"sample": f"0.{sample}", "start": 0.0, "queued": start, "end": end}

    spans = [*(span(sample, 0.0, 1.0) for sample in range(8)), span(8, 1.0, 2.0), span(9, 0.0, 6.0)]
    tail = Tail.of([{"slots": 10, "spans": spans, "end": 6.0}])  # type: ignore[typeddict-item]
    assert tail.step_seconds == 6.0
    assert tail.share == pytest.approx(4 / 6)
    assert tail.occupancy == pytest.approx(0.1), "one of ten slots"
    assert tail.step_occupancy == pytest.approx((8 + 1 + 6) / 60)
