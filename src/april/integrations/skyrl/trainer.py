"""SkyRL's trainer with april's rollouts, and the entrypoint that starts it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import ray
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils import validate_cfg
from skyrl.train.utils.utils import initialize_ray

from april.integrations.settings import Settings
from april.integrations.skyrl.checkpoint import load_state, save_state
from april.integrations.skyrl.fully_async import FullyAsyncTrainer
from april.integrations.skyrl.generator import Generator, TrainingDataloader
from april.integrations.skyrl.settings import check_settings, settings_of


class Trainer(RayPPOTrainer):  # type: ignore[misc]
    """SkyRL's trainer. Its checkpoints include the rollout buffer."""

    generator: Generator
    train_dataloader: Any

    def _build_train_dataloader_and_compute_training_steps(self) -> None:
        super()._build_train_dataloader_and_compute_training_steps()
        if self.train_dataloader is not None:
            self.train_dataloader = TrainingDataloader(self.train_dataloader, self.cfg.trainer.train_batch_size)
            self.generator.dataloader = self.train_dataloader

    async def train(self) -> None:
        try:
            await super().train()
        finally:
            await self.generator.close()

    def save_checkpoints(self) -> str:
        save_state(self.generator.state_dict(), self.cfg.trainer.ckpt_path, self.global_step)
        path: str = super().save_checkpoints()
        return path

    def load_checkpoints(self) -> tuple[int, str]:
        step, folder = super().load_checkpoints()
        load_state(self.generator, folder)
        return step, folder


class Experiment(BasePPOExp):  # type: ignore[misc]
    """SkyRL's experiment with april's generator and trainer. Use it in place of `BasePPOExp` in your own entrypoint."""

    def __init__(self, cfg: SkyRLTrainConfig, settings: Settings | None = None) -> None:
        self.settings = settings or settings_of(cfg, {})
        check_settings(cfg, self.settings)
        # april sends its requests again after an update: a cache of the old weights would answer them.
        cfg.trainer.fully_async.clear_kv_cache_on_weight_sync = True
        super().__init__(cfg)

    def get_generator(self, cfg: SkyRLTrainConfig, tokenizer: Any, inference_engine_client: Any) -> Generator:
        own = super().get_generator(cfg, tokenizer, inference_engine_client)
        return Generator(
            cfg,
            self.settings,
            generator_cfg=cfg.generator,
            skyrl_gym_cfg=cfg.environment.skyrl_gym,
            inference_engine_client=inference_engine_client,
            tokenizer=tokenizer,
            policy_model_name=own.policy_model_name,
        )

    def get_trainer(self, **parts: Any) -> RayPPOTrainer:
        if self.cfg.trainer.fully_async.enabled:
            return FullyAsyncTrainer(**parts)
        return Trainer(**parts)


@ray.remote(num_cpus=1)  # type: ignore[untyped-decorator]
def run(cfg: SkyRLTrainConfig, settings: Settings) -> None:
    """Run the experiment in a Ray task, as SkyRL's entrypoint does, which keeps it off the head node."""
    Experiment(cfg, settings).run()


def read(arguments: Sequence[str]) -> tuple[SkyRLTrainConfig, Settings]:
    """Read SkyRL's configuration and april's settings (`april.over_sampling_batch_size=192`) from a command line.

    Raises:
        ValueError: a setting is unknown or invalid.
    """
    own = [argument for argument in arguments if argument.startswith("april.")]
    theirs = [a for a in arguments if not a.startswith(("april.", "trainer.override_entrypoint="))]
    given = dict(argument.removeprefix("april.").split("=", 1) for argument in own)
    cfg = SkyRLTrainConfig.from_cli_overrides(theirs)
    return cfg, settings_of(cfg, given)


def main() -> None:
    cfg, settings = read(sys.argv[1:])
    validate_cfg(cfg)
    check_settings(cfg, settings)
    initialize_ray(cfg)
    ray.get(run.remote(cfg, settings))
