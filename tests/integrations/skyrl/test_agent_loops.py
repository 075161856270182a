"""SkyRL's agent loops as april's episodes, against SkyRL's own generator on the same policy."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("skyrl", reason="SkyRL is not installed here: scripts/setup_skyrl.sh")
sys.path.insert(0, str(Path(__file__).parent / "stand_ins"))

from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl.train.utils.trainer_utils import validate_generator_output

from april.rollout.episodes.environment import ObservationError
from tests.integrations.skyrl import conversations
from tests.integrations.skyrl.conversations import (
    TURN_TOKENS,
    ContextClient,
    ContextEngine,
    generator,
    requested,
    row,
)
from tests.integrations.skyrl.trainer import configuration

N, GROUP, TURNS = 3, 2, 6
COLUMNS = (
    "prompt_token_ids",
    "response_ids",
    "rewards",
    "loss_masks",
    "stop_reasons",
    "rollout_logprobs",
    "is_last_step",
    "env_metrics",
)
STOPS = {"generator__sampling_params__stop": ["AB", "CDE", "H"]}
MODES = {
    "conversation": {},
    "one message": {"generator__use_conversation_multi_turn": False},
    "step-wise": {"generator__step_wise_trajectories": True},
    "short input": {"generator__max_input_length": 60},
    "more turns than max_turns": {"environment__env_class": "talkative", "generator__max_turns": 2},
    "unset logprobs": {"generator__sampling_params__logprobs": None},  # SkyRL's correction sets them
    "stop strings": STOPS,
    "stop strings in one message": {**STOPS, "generator__use_conversation_multi_turn": False},
    "stop strings step-wise": {
        **STOPS,
        "generator__step_wise_trajectories": True,
        "generator__append_eos_token_after_stop_str_in_multi_turn": False,
    },
    "overlong": {"generator__apply_overlong_filtering": True, "generator__zero_reward_on_non_stop": True},
}


def configured(folder: Path, **changed: Any) -> Any:
    return configuration(
        folder,
        ["http://127.0.0.1:1"],
        **{
            "trainer__train_batch_size": N,
            "trainer__policy_mini_batch_size": N,
            "trainer__micro_train_batch_size_per_gpu": N,
            "trainer__micro_forward_batch_size_per_gpu": N,
            "generator__n_samples_per_prompt": GROUP,
            "environment__skyrl_gym__max_env_workers": 0,  # no threads, so that each run is the same
            "environment__env_class": "dialogue",
            "generator__max_turns": TURNS,
            "generator__max_input_length": 200,
            "generator__sampling_params__max_generate_length": TURN_TOKENS,
            **changed,
        },
    )


async def own(cfg: Any, numbers: list[int]) -> tuple[Any, int]:
    """Return what SkyRL's own generator returns for these rows, and the number of turns that a stop string ended."""
    words = conversations.tokenizer()
    client = ContextClient(words, cfg.generator.sampling_params.stop or ())
    skyrls = SkyRLGymGenerator(cfg.generator, cfg.environment.skyrl_gym, client, words)
    batch = requested([row(number, cfg.environment.env_class) for number in numbers], GROUP)
    return await skyrls.generate(batch, disable_tqdm=True), client.stopped


@pytest.mark.parametrize("mode", MODES)
def test_trajectories_are_those_of_skyrls_generator(tmp_path: Path, mode: str) -> None:
    """Through interrupts in mid-turn and a restart, in which the environments are brought to where they were."""
    asyncio.run(compared(configured(tmp_path, **MODES[mode])))


async def compared(cfg: Any) -> None:
    engines = [ContextEngine(slots=5), ContextEngine(slots=5)]
    made = generator(cfg, 1000, engines[0])
    turns = set()
    for step in range(4):
        if step == 2:
            state = json.loads(json.dumps(made.state_dict()))
            await made.close()
            made = generator(cfg, 1000 + made.adapter.prompts.extra_drawn, engines[1])
            made.load_state_dict(state, "the test")
        numbers = range(N * step, N * step + N)
        batch = requested([row(number, cfg.environment.env_class) for number in numbers], GROUP)
        output = await made.generate(batch)
        validate_generator_output(N * GROUP, output, step_wise=cfg.generator.step_wise_trajectories)
        expected, stopped = await own(cfg, [int(extras["answer"]) for extras in batch["env_extras"][::GROUP]])
        assert bool(stopped) == bool(cfg.generator.sampling_params.stop)
        assert output["rollout_logprobs"] is not None
        for column in COLUMNS:
            assert output[column] == expected[column], column
        if output["trajectory_ids"] is not None:
            pairs = zip(output["trajectory_ids"], expected["trajectory_ids"], strict=True)
            assert len({(one.to_string(), other.to_string()) for one, other in pairs}) == N * GROUP
        turns |= {metrics["turns"] for metrics in output["env_metrics"] if metrics}
        made._weights = None  # SkyRL has updated the weights
    await made.close()
    assert len(turns) > 1, "the episodes had all the same number of turns"
    for engine in engines:
        assert engine.resumed[True], "no later turn was resumed in its middle: the test saw nothing"


def test_an_environment_that_asks_for_more_than_one_turn_is_named(tmp_path: Path) -> None:
    cfg = configured(
        tmp_path, environment__env_class="talkative", generator__max_turns=1, trainer__max_prompt_length=200
    )
    made = generator(cfg, 1000, ContextEngine())
    batch = requested([row(number, "talkative") for number in range(N)], GROUP)
    with pytest.raises(ObservationError, match=r"another turn where generator\.max_turns = 1: raise it"):
        asyncio.run(made.generate(batch))
