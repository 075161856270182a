"""Responses of agent executors, and checkpoints, without engines."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("openrlhf", reason="OpenRLHF is not installed here: scripts/setup_openrlhf.sh")
STAND_INS = Path(__file__).with_name("stand_ins")
sys.path.insert(0, str(STAND_INS))

import torch  # noqa: E402
from vllm import SamplingParams as VLLMParams  # noqa: E402

from april import Group, Prompt, SamplingParams  # noqa: E402
from april.integrations.generating_code import CodeEpisode  # noqa: E402
from april.integrations.openrlhf import PPOTrainer  # noqa: E402
from april.integrations.openrlhf.agents import SampleEngine, kept_of  # noqa: E402
from april.integrations.openrlhf.samples_generator import SamplesGenerator  # noqa: E402
from april.rollout.episodes.turns import AgentStart, TurnReply  # noqa: E402
from april.rollout.stop_strings import StopScanner  # noqa: E402
from tests import tiny  # noqa: E402

TOKENIZER = tiny.tokenizer()

NEEDED = {"observation_tokens": [4, 5, 6], "action_ranges": [(1, 3)], "rollout_log_probs": [0.0, -1.0, -2.0]}


def experience(response: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """OpenRLHF's experience of a sample whose executor returned `response`."""
    from april.integrations.openrlhf import samples_generator

    monkeypatch.setattr(samples_generator, "result_of", lambda sample: kept_of(response))
    generator = SamplesGenerator.__new__(SamplesGenerator)
    generator._agent = object()  # type: ignore[assignment]
    prompt = Prompt((), metadata={"prompt": "say", "label": "5"})
    (sample,) = Group.start(0, prompt, 1, SamplingParams(3), 0).samples
    return generator._process_response_into_experience(generator._response(prompt, sample), max_len=8)


def test_an_executor_may_leave_out_what_openrlhf_does_not_need(monkeypatch: pytest.MonkeyPatch) -> None:
    made = experience(NEEDED, monkeypatch)
    assert made.rewards is None
    assert made.scores is None
    assert not made.truncated.item()
    scored = experience({**NEEDED, "reward": torch.tensor([2.0]), "truncated": True}, monkeypatch)
    assert scored.rewards.tolist() == [2.0]
    assert scored.truncated.item()


async def test_an_executor_without_reward_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from april.integrations.openrlhf import samples_generator

    monkeypatch.setattr(samples_generator, "result_of", lambda sample: kept_of(NEEDED))
    reward = await SamplesGenerator._score_agent(None, None, None)  # type: ignore[arg-type]
    assert (reward.value, reward.info) == (0.0, {"scores": None})


@pytest.mark.parametrize("name", NEEDED)
def test_a_response_without_what_openrlhf_needs_is_named(name: str) -> None:
    with pytest.raises(RuntimeError, match=f"response lacks {name}, which OpenRLHF needs"):
        kept_of({key: value for key, value in NEEDED.items() if key != name})


@pytest.mark.parametrize(("scores", "kept"), [([0.0, None], True), ([0.0, 1.0], True), ([0.0, 0.0], False)])
def test_the_filter_keeps_groups_without_scores(scores: list[float | None], kept: bool) -> None:
    args = SimpleNamespace(algo=SimpleNamespace(dynamic_filtering_range=(0.0, 2.0)))
    outcomes = [SimpleNamespace(reward_info={"scores": score}) for score in scores]
    assert SamplesGenerator._keep(SimpleNamespace(args=args), SimpleNamespace(outcomes=outcomes)) is kept  # type: ignore[arg-type]


class Saving:
    """Stands where OpenRLHF's group of actors and april's generator are; keeps what is saved."""

    latest = SimpleNamespace(metrics=dict)

    def __init__(self) -> None:
        self.saved: list[dict[str, Any]] = []
        self.states = 0

    def state_dict(self) -> str:
        self.states += 1
        return "the buffer"

    def saved_steps(self) -> list[int]:
        """Steps whose checkpoint has the buffer."""
        return [states["global_step"] for states in self.saved if states["april"] == "the buffer"]

    def async_run_method(self, method_name: str, **given: Any) -> list[Any]:
        assert method_name == "save_checkpoint"
        self.saved.append(given["client_states"])
        return []


def trainer_of(saving: Saving, save_steps: float) -> Any:
    trainer = PPOTrainer.__new__(PPOTrainer)
    trainer.__dict__ |= {
        "args": SimpleNamespace(
            ckpt=SimpleNamespace(save_steps=save_steps), logger=SimpleNamespace(logging_steps=float("inf"))
        ),
        "samples_generator": saving,
        "actor_model_group": saving,
        "critic_model_group": None,
        "best_eval_metric_key": "",
        "best_eval_metric_value": 0.5,
        "_latest_eval_metric_value": None,
    }
    return trainer


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.get", lambda refs: refs)


def test_the_buffer_is_written_for_steps_that_are_saved_only() -> None:
    saving = Saving()
    trainer = trainer_of(saving, 3)
    for step in range(1, 7):
        trainer.save_logs_and_checkpoints(step, {}, {"global_step": step})
    assert [(states["global_step"], states["april"]) for states in saving.saved] == [
        (3, "the buffer"),
        (6, "the buffer"),
    ]
    assert saving.states == 2
    trainer_of(saving, float("inf")).save_logs_and_checkpoints(3, {}, {})
    assert saving.states == 2


def test_the_best_checkpoint_has_the_buffer() -> None:
    saving = Saving()
    trainer = trainer_of(saving, float("inf"))
    for step, metrics in enumerate([{}, {"eval_pass1": 0.4}, {"loss": 1.0}, {"eval_pass1": 0.7}, {"eval_pass1": 0.6}]):
        trainer.save_best_checkpoint(metrics, step, {"global_step": step})
    assert saving.saved_steps() == [3]
    assert saving.states == 1


def test_a_checkpoint_without_the_buffer_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    base = PPOTrainer.__mro__[1]
    trainer = trainer_of(Saving(), 1)
    for found, warned in (({"global_step": 0}, False), ({"global_step": 4}, True)):
        monkeypatch.setattr(base, "init_checkpoint_states", lambda self, found=found: found)
        with caplog.at_level(logging.WARNING):
            assert trainer.init_checkpoint_states() == found
        assert ("the checkpoint of step 4 has no samples of april's" in caplog.text) is warned


class Answers:
    """A policy that draws "abcd", up to a stop string of the request."""

    async def reply(self, key: str, request: Any) -> list[TurnReply]:
        ids = TOKENIZER.encode("abcd", add_special_tokens=False)
        count = StopScanner(TOKENIZER.decode, request.stop).scan(ids) if request.stop else None
        stop = request.stop[0] if count is not None else None
        drawn = ids[:count]
        return [TurnReply("turn", {}, (), drawn, [-1.0] * len(drawn), "stop" if stop else "length", [0] * 4, stop)]


@pytest.mark.parametrize(
    ("stop", "include", "text", "tokens"),
    [("bc", False, "a", 3), (["bc"], True, "abc", 3), (None, False, "abcd", 4), (["x"], False, "abcd", 4)],
)
async def test_an_executor_may_set_stop_strings(stop: Any, include: bool, text: str, tokens: int) -> None:
    episode = CodeEpisode(Answers(), AgentStart("april-0.0", {}, 0))  # type: ignore[arg-type]
    engine = SampleEngine(episode, TOKENIZER, VLLMParams())
    params = VLLMParams(stop=stop, include_stop_str_in_output=include)
    (output,) = (await engine.generate([4, 5], params)).outputs
    assert (output.text, len(output.token_ids)) == (text, tokens)
    assert output.finish_reason == ("stop" if tokens == 3 else "length")
