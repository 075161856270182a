"""SkyRL's own loops and april's plug-in in SkyRL, on one engine with realistic costs (`passes.py`).

SkyRL's trainers, dataloader, generator, environments, client and staleness manager are its own; a training step waits
for a number of passes, and new weights are SkyRL's pause and resume, as in its own simulated trainer. Arms:

- `synchronous`: its `RayPPOTrainer`;
- `fully_async_2N`, `fully_async_4N`: its `FullyAsyncRayPPOTrainer`, which generates while it trains, with 2 N and 4 N
  generation workers;
- `april_2N`, `april_4N`: its `RayPPOTrainer` with april's generator, at N' = 2 N and 4 N. (`auto` plans by the clock,
  and this engine's time is its passes.)
- `april_async_2N`, `april_async_4N`: its `FullyAsyncRayPPOTrainer` with april's rollouts, at N' = 2 N and 4 N;
- `fully_async_2N_bound2` and the like: the same with another bound on staleness, since SkyRL's largest staleness
  exceeds its bound.

Trainer and engine of the synchronous arms take turns: a training step adds its passes to theirs.

    .frameworks/skyrl/bin/python benchmarks/integrations/skyrl_rollouts.py
"""

from __future__ import annotations

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "integrations" / "skyrl" / "stand_ins"))

import skyrl_gym
from pass_server import VLLMPasses
from passes import BOUND, GROUP, LONGEST, OVER, STEPS, N, Passes, Steps, measure
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer
from skyrl.train.fully_async_trainer_sim import _SimDispatch
from skyrl.train.trainer import RayPPOTrainer

from april.integrations.settings import Settings
from april.integrations.skyrl import Experiment, Trainer
from april.integrations.skyrl.fully_async import FullyAsyncTrainer
from tests.integrations.restart import own_ray
from tests.integrations.skyrl.trainer import configuration, prepare

TURNS = ("synchronous", "april_2N", "april_4N")
"""Arms whose trainer and engine take turns."""
STAND_INS = Path(__file__).parents[2] / "tests" / "integrations" / "skyrl" / "stand_ins"
ARMS = "april_2N fully_async_2N synchronous april_4N fully_async_4N"
PROMPT = "{:04}?"


class Dispatch(_SimDispatch):  # type: ignore[misc]
    """SkyRL's class for a simulated trainer, which notifies the engine of new weights."""

    def __init__(self, client: Any, passes: Passes) -> None:
        super().__init__(client, 0.0)
        self.passes = passes

    async def save_weights_for_sampler(self) -> None:
        await super().save_weights_for_sampler()
        self.passes.version += 1

    def get_timing_metrics(self) -> dict[str, float]:
        return {}

    def finalize_pending_saves(self, model: str) -> None:
        """There is none."""


class Simulated:
    """The interface that SkyRL's trainers use of their workers."""

    server: VLLMPasses
    ticks: int
    steps: Steps
    ref_model = critic_model = None

    def build_models(self, *workers: Any) -> None:
        self.dispatch = Dispatch(self.inference_engine_client, self.server.passes)  # type: ignore[attr-defined]

    def fwd_logprobs_values_reward(self, batch: Any) -> Any:
        return batch

    def compute_advantages_and_returns(self, batch: Any) -> Any:
        return batch

    def train_critic_and_policy(self, batch: Any) -> dict[str, float]:
        pairs = zip(batch["sequences"], batch["attention_mask"], strict=True)
        sequences = [ids[mask.bool()].tolist() for ids, mask in pairs]
        assert len(sequences) == N * GROUP, "not a step's samples"
        self.steps.append(self.server.train(sequences, self.ticks))
        return {}


class Synchronous(Simulated, RayPPOTrainer):  # type: ignore[misc]
    pass


class FullyAsync(Simulated, FullyAsyncRayPPOTrainer):  # type: ignore[misc]
    pass


class April(Simulated, Trainer):
    pass


class AprilAsync(Simulated, FullyAsyncTrainer):
    pass


def run(folder: Path, arm: str, ticks: int, seed: int) -> Steps:
    """A run of an arm, its training steps `ticks` passes long."""
    passes = Passes(prompt=len(PROMPT.format(0)) + 1, seed=seed)
    server = VLLMPasses(folder / "model", passes)
    name, _, given = arm.partition("_bound")
    over, bound = OVER.get(name[-2:], N), int(given or BOUND)
    overlapping = "async" in name
    cfg = configuration(
        folder,
        [server.url],
        trainer__train_batch_size=N,
        trainer__policy_mini_batch_size=N,
        trainer__max_training_steps=STEPS,
        trainer__ckpt_interval=-1,
        trainer__resume_mode="none",
        trainer__algorithm__policy_loss_type="rollout_is",
        trainer__algorithm__off_policy_correction__tis_ratio_type=None,
        trainer__fully_async__enabled=overlapping,
        trainer__fully_async__max_staleness_steps=bound,
        trainer__fully_async__num_parallel_generation_workers=over,
        generator__n_samples_per_prompt=GROUP,
        generator__sampling_params__max_generate_length=LONGEST,
        generator__sampling_params__logprobs=0,
    )
    if arm.startswith("april"):
        own = Settings(over_sampling_batch_size=over, max_staleness=bound)
        experiment, trainer = Experiment(cfg, own), AprilAsync if overlapping else April
    else:
        experiment, trainer = BasePPOExp(cfg), FullyAsync if overlapping else Synchronous
    made = type(arm, (trainer,), {"server": server, "ticks": ticks, "steps": []})
    experiment.get_trainer = lambda **parts: made(**parts)
    experiment.run()
    server.close()
    assert len(made.steps) == STEPS
    return made.steps


def main() -> None:
    skyrl_gym.register(id="length", entry_point="tests.integrations.skyrl.trainer:Length")
    with tempfile.TemporaryDirectory() as name, own_ray(STAND_INS):
        folder = Path(name)
        prepare(folder)
        prompts = [[{"role": "user", "content": PROMPT.format(n)}] for n in range(400)]
        rows = [{"prompt": prompt, "env_class": "length", "answer": "0"} for prompt in prompts]
        (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
        measure(__file__, __doc__, ARMS, partial(run, folder), TURNS)


if __name__ == "__main__":
    main()
