"""SkyRL's agent loops as april's episodes, against SkyRL's own generator on the same policy."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

pytest.importorskip("skyrl", reason="SkyRL is not installed here: scripts/setup_skyrl.sh")
sys.path.insert(0, str(Path(__file__).parent / "stand_ins"))

from skyrl.backends.skyrl_train.utils.io import io
from skyrl.train.dataset.preprocess import _collate_rollout_expert_indices
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl.train.utils.trainer_utils import validate_generator_output

from april.integrations.skyrl.checkpoint import load_state, save_state
from april.rollout.episodes.environment import ObservationError
from april.rollout.state_files import SUFFIX
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
from tests.mixtures import mixture

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
    client = ContextClient(words, cfg.generator.sampling_params.stop or (), replaying(cfg))
    skyrls = SkyRLGymGenerator(cfg.generator, cfg.environment.skyrl_gym, client, words)
    batch = requested([row(number, cfg.environment.env_class) for number in numbers], GROUP)
    return await skyrls.generate(batch, disable_tqdm=True), client.stopped


def replaying(cfg: Any) -> bool:
    return bool(cfg.generator.inference_engine.enable_return_routed_experts)


@pytest.mark.parametrize("mode", MODES)
def test_trajectories_are_those_of_skyrls_generator(tmp_path: Path, mode: str) -> None:
    """Through interrupts in mid-turn and a restart, in which the environments are brought to where they were."""
    asyncio.run(compared(configured(tmp_path, **MODES[mode]), str(tmp_path)))


class Bucket(MemoryFileSystem):
    """SkyRL's cloud storage in memory."""

    protocol = ("gs", "memory")
    store: ClassVar[dict[str, Any]] = {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.removeprefix("gs:/"))


@pytest.mark.parametrize("batched", [False, True])
def test_routes_are_those_of_skyrls_generator(tmp_path: Path, batched: bool) -> None:
    """Of all turns, through interrupts and a restart, as SkyRL's trainer packs them. SkyRL replays them in Megatron.
    The second checkpoint is in cloud storage."""
    fsspec.register_implementation("gs", Bucket, clobber=True)
    mixture("Glm4Moe").save_pretrained(tmp_path / "model")
    cfg = configured(
        tmp_path,
        **(
            {"generator__max_turns": 1, "generator__batched": True, "trainer__max_prompt_length": 200}
            if batched
            else {}
        ),
    )
    cfg.generator.inference_engine.enable_return_routed_experts = True  # its check of settings requires Megatron
    asyncio.run(compared(cfg, "gs://bucket/checkpoints" if batched else str(tmp_path)))


async def compared(cfg: Any, checkpoints: str) -> None:
    routed = replaying(cfg)
    earlier = None
    engines = [ContextEngine(slots=5, routed=routed) for _ in range(2)]
    made = generator(cfg, 1000, engines[0])
    turns = set()
    for step in range(4):
        if step == 2:
            for state in (earlier, made.state_dict()):
                save_state(state, checkpoints, step)
            folder = f"{checkpoints}/global_step_{step}"
            assert any(name.endswith(SUFFIX) for name in io.list_dir(folder)) == routed
            await made.close()
            made = generator(cfg, 1000 + made.adapter.prompts.extra_drawn, engines[1])
            load_state(made, folder)
        numbers = range(N * step, N * step + N)
        batch = requested([row(number, cfg.environment.env_class) for number in numbers], GROUP)
        output = await made.generate(batch)
        validate_generator_output(N * GROUP, output, step_wise=cfg.generator.step_wise_trajectories)
        expected, stopped = await own(cfg, [int(extras["answer"]) for extras in batch["env_extras"][::GROUP]])
        assert bool(stopped) == bool(cfg.generator.sampling_params.stop)
        assert output["rollout_logprobs"] is not None
        for column in COLUMNS:
            if column in expected or not cfg.generator.batched:
                assert output[column] == expected[column], column
        if routed:
            check_routes(output, expected)
        if output.get("trajectory_ids") is not None and not cfg.generator.batched:
            pairs = zip(output["trajectory_ids"], expected["trajectory_ids"], strict=True)
            assert len({(one.to_string(), other.to_string()) for one, other in pairs}) == N * GROUP
        turns |= {metrics["turns"] for metrics in output["env_metrics"] if metrics}
        earlier = made.state_dict()
        made._weights = None  # SkyRL has updated the weights
    await made.close()
    several = cfg.generator.max_turns > 1
    assert (len(turns) > 1) == several, "the episodes had all the same number of turns"
    for engine in engines:
        assert engine.resumed[several], "no later turn was resumed in its middle: the test saw nothing"


def check_routes(output: Any, expected: Any) -> None:
    both = list(zip(output["rollout_expert_indices"], expected["rollout_expert_indices"], strict=True))
    for own, theirs in both:
        assert own.dtype == theirs.dtype
        np.testing.assert_array_equal(own, theirs)
    lengths = [len(p) + len(r) for p, r in zip(output["prompt_token_ids"], output["response_ids"], strict=True)]
    packed = _collate_rollout_expert_indices([own for own, _ in both], np.array(lengths))
    assert packed.values.shape == (sum(lengths), conversations.LAYERS, conversations.TOP_K)
    validate_generator_output(N * GROUP, output, step_wise=False, routes_expected=True)


def test_an_environment_that_asks_for_more_than_one_turn_is_named(tmp_path: Path) -> None:
    cfg = configured(
        tmp_path, environment__env_class="talkative", generator__max_turns=1, trainer__max_prompt_length=200
    )
    made = generator(cfg, 1000, ContextEngine())
    batch = requested([row(number, "talkative") for number in range(N)], GROUP)
    with pytest.raises(ObservationError, match=r"another turn where generator\.max_turns = 1: raise it"):
        asyncio.run(made.generate(batch))
