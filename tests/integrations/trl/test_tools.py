"""TRL's tools and environments, played as april's episodes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from april.integrations.trl.checkpoint import STATE
from april.integrations.trl.episodes import completion
from april.rollout.sampling import FinishReason
from tests.integrations.trl.plain import TIMES, differences
from tests.integrations.trl.tools import Box, Plain, Recorded, called, look, look_later, partial, rows, settings
from tests.integrations.trl.trainer import rows as texts
from tests.limits import HANG

WAYS: dict[str, dict[str, Any]] = {
    "tools": {"tools": [look]},
    "async": {"tools": [look_later], "max_tool_calling_iterations": 1, "max_completion_length": 400},
    "environment": {"environment_factory": Box},
}


def logged(trained: Any, tools: bool = True) -> list[dict[str, float]]:
    """What both trainers log, with or without the counts of tool calls."""
    left_out = ("april/", *TIMES, *(() if tools else ("tools/",)))
    return [
        {name: value for name, value in entry.items() if not any(part in name for part in left_out)}
        for entry in trained.state.log_history
    ]


@pytest.mark.parametrize(
    "way", [pytest.param(way, id=name, marks=[pytest.mark.slow] * (name != "tools")) for name, way in WAYS.items()]
)
def test_every_metric_is_plain_trls_on_the_same_turns(way: dict[str, Any], tmp_path: Path) -> None:
    """TRL's own loop over tool calls gets the turns of april's policy, and must give the same tokens: all tokens before
    a turn identify it. With a short `max_completion_length`, TRL also calls the tools of a truncated turn, and counts
    them, though the policy never sees the results; april does not."""
    way = {"max_completion_length": 400, **way} if "environment_factory" in way else way
    ours = Recorded(**settings(tmp_path, **way), partial_rollouts=partial(4))
    ours.train()
    ours.close()
    plain = Plain(**settings(tmp_path, **way))
    plain.turns = ours.turns
    plain.train()
    assert not any(plain.turns.values()), "TRL went through the same turns"
    cut = "max_completion_length" not in way
    assert differences(logged(ours, tools=not cut), logged(plain, tools=not cut)) == []
    samples = [sample for groups, _ in ours.batches for group in groups for sample in group.samples]
    assert sum(sample.turns for sample in samples) > len(samples), "some turns called a tool, and others followed"
    assert any(sample.finish is FinishReason.LENGTH for sample in samples) == cut


@pytest.fixture(scope="module", params=["tools", "environment"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, dict[str, Any]]:
    """Four steps with twice the number of groups of a step in flight, and a checkpoint in the middle."""
    folder, way = tmp_path_factory.mktemp("run"), WAYS[request.param]
    trained = Recorded(
        **settings(folder, **way, max_steps=4, save_strategy="steps", save_steps=2), partial_rollouts=partial()
    )
    trained.train()
    trained.close()
    return trained, folder, way


def test_the_loss_is_of_the_policys_tokens_alone(run: Any) -> None:
    answered = 0
    for groups, output in run[0].batches:
        samples = [sample for group in groups for sample in group.samples]
        for i, sample in enumerate(samples):
            prompt_ids, ids, logprobs, mask = completion(sample)
            assert output["prompt_ids"][i].tolist()[-len(prompt_ids) :] == prompt_ids
            assert output["completion_ids"][i, : len(ids)].tolist() == ids
            assert output["tool_mask"][i, : len(ids)].tolist() == mask
            torch.testing.assert_close(output["old_per_token_logps"][i, : len(ids)], torch.tensor(logprobs))
            assert len(ids) <= run[0].args.max_completion_length
            answered += len(mask) - sum(mask)
    assert answered > 0


def test_results_of_tools_are_rendered_like_trls(run: Any) -> None:
    trained = run[0]
    for groups, _ in trained.batches:
        for sample in (sample for group in groups for sample in group.samples):
            for transition in sample.transitions[1:]:
                if transition.tokens:
                    at = slice(transition.start, transition.start + transition.tokens)
                    assert sample.response_ids[at] == trained._get_tool_suffix_ids(transition.info["messages"])
            messages = trained.rollouts.episodes.conversation(sample)
            assert called(messages) == sum(len(t.info["messages"]) for t in sample.transitions[1:] if t.tokens)


def test_episodes_are_carried_over_steps(run: Any) -> None:
    entries = [entry for entry in run[0].state.log_history if "loss" in entry]
    assert [entry["april/policy_version"] for entry in entries] == [0, 1, 2, 3]
    assert any(entry["april/samples_resumed"] > 0 for entry in entries)
    assert all(entry["april/staleness_max"] <= 5 for entry in entries)


def test_a_resumed_run_continues_its_conversations(run: Any) -> None:
    """Its environments are new ones, brought to where the completions are by the same calls: the reward checks it."""
    _, folder, way = run
    checkpoint = folder / "checkpoint-2"
    saved = json.loads((checkpoint / STATE).read_text())["scheduler"]["state"]["buffer"]["groups"]
    begun = {
        (group["id"], sample["index"]): [token for _, ids, _ in sample["segments"] for token in ids]
        for group in saved
        for sample in group["samples"]
    }
    assert sum(map(len, begun.values())) > 0
    resumed = Recorded(**settings(folder, **way, max_steps=4), partial_rollouts=partial())
    resumed.train(resume_from_checkpoint=str(checkpoint))
    resumed.close()
    seen = {(s.group_id, s.index): s.response_ids for groups, _ in resumed.batches for g in groups for s in g.samples}
    assert {group["id"] for group in saved} & {group for group, _ in seen}
    for name, ids in seen.items():
        assert ids[: len(begun.get(name, ()))] == begun.get(name, [])


@pytest.mark.slow
def test_process_0_calls_the_tools_of_all(tmp_path: Path) -> None:
    command = "accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no"
    script = ["--dynamo_backend", "no", "-m", "tests.integrations.trl.tools", str(tmp_path)]
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "OMP_NUM_THREADS": "1"}
    launched = [sys.executable, "-m", *command.split(), *script]
    done = subprocess.run(
        launched, env=environment, cwd=root, capture_output=True, text=True, timeout=HANG, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert len(ranks[0]) == len(ranks[1]) == 24
    for rows_of_rank in ranks:
        assert all(row["answered"] == row["masked"] for row in rows_of_rank)
        assert any(row["turns"] > 1 for row in rows_of_rank)
    groups = [row["group"] for rank in ranks for row in rank]
    assert all(groups.count(group) == 4 for group in groups), "each group is trained on whole, and once"


def test_evaluation_plays_episodes_of_its_own(tmp_path: Path) -> None:
    given = settings(tmp_path, **WAYS["environment"], max_steps=1, num_generations_eval=2, per_device_eval_batch_size=4)
    trained = Recorded(**given, eval_dataset=rows(16), partial_rollouts=partial())
    trained.train()
    trained.evaluate()
    assert "eval_reward" in trained.state.log_history[-1]
    assert trained.state.log_history[-1]["eval_tools/call_frequency"] > 0
    trained.close()


def test_a_tool_that_sets_a_signal_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def look(at: str) -> str:
        """Look at something.

        Args:
            at: What.
        """
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        return at

    trained = Recorded(**settings(tmp_path, tools=[look], max_steps=1), partial_rollouts=partial())
    trained.train()
    trained.close()
    assert trained.state.log_history[0]["tools/failure_frequency"] == 1
    assert caplog.text.count("tool look: it sets a signal") == 1


def test_several_environments_each_with_their_own_tools(tmp_path: Path) -> None:
    class Other(Box):
        """Gives shorter answers."""

        def reset(self, answer: int, **row: Any) -> str | None:
            assert "environment" not in row
            super().reset(answer)
            return f",{answer % 7}" if answer % 2 else None

    named = rows().map(lambda row: {"environment": "box" if row["answer"] % 3 else "other"})
    given = settings(tmp_path, environment_factory={"box": Box, "other": Other}, train_dataset=named, max_steps=2)
    trained = Recorded(**given, partial_rollouts=partial())
    trained.train()
    assert "rewards/Other/mean" in trained.state.log_history[0]
    trained.close()


def test_an_unknown_environment_is_an_error_of_trls_words_when_the_row_is_used(tmp_path: Path) -> None:
    named = rows().map(lambda row: {"environment": "box" if row["answer"] % 2 else "bag"})
    given = settings(tmp_path, environment_factory={"box": Box}, train_dataset=named)
    trained = Recorded(**given, partial_rollouts=partial())
    words = r"Example has `environment='bag'`, which is not among the environments .* Expected one of: \['box'\]\."
    with pytest.raises(ValueError, match=words):
        trained.train()
    trained.close()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tools": [look], "train_dataset": texts()}, 'tools need conversations in the column "prompt"'),
        ({"tools": [look], "partial": {"on_update": "redraft"}}, 'on_update = "redraft": results of tools'),
    ],
)
def test_unsupported_settings_are_refused_in_one_line(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    rollouts = partial()
    rollouts.on_update = changed.get("partial", {}).get("on_update", "recompute")
    given = {name: value for name, value in changed.items() if name != "partial"}
    with pytest.raises(ValueError, match=message) as caught:
        Recorded(**settings(tmp_path, **given), partial_rollouts=rollouts)
    assert "\n" not in str(caught.value)
