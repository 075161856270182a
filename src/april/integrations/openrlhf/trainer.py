"""OpenRLHF's trainer with april's rollouts, and the command that starts it.

Classes of OpenRLHF are replaced where OpenRLHF looks them up: its vLLM actor, its two trainers, and the trainer's
generator of samples; also the function that it calls first with its arguments.
"""

from __future__ import annotations

import argparse
import logging
import runpy
import sys
from dataclasses import fields
from typing import Any

import ray
from openrlhf import utils
from openrlhf.trainer import ppo_trainer, ppo_trainer_async
from openrlhf.trainer.ray import vllm_engine

from april.integrations.openrlhf.samples_generator import SamplesGenerator
from april.integrations.openrlhf.settings import SPELLING, check_settings
from april.integrations.openrlhf.vllm_actor import RolloutActor, undecorated
from april.integrations.settings import Settings

log = logging.getLogger(__name__)

get_strategy = utils.get_strategy


class PPOTrainer(undecorated(ppo_trainer.PPOTrainer)):  # type: ignore[misc]
    """OpenRLHF's trainer with april's generator. Its checkpoints include the rollout buffer."""

    samples_generator: Any

    def __init__(self, settings: Settings, *args: Any, **generate_kwargs: Any) -> None:
        super().__init__(*args, **generate_kwargs)
        own = self.samples_generator
        self.samples_generator = SamplesGenerator(
            settings,
            generate_kwargs,
            strategy=own.strategy,
            prompts_dataloader=own.prompts_dataloader,
            eval_dataloader=own.eval_dataloader,
            tokenizer=own.tokenizer,
            vllm_engines=own.vllm_engines,
        )

    def broadcast_to_vllm(self) -> None:
        self.samples_generator.update_weights(super().broadcast_to_vllm)

    def init_checkpoint_states(self) -> dict[str, Any]:
        states: dict[str, Any] = super().init_checkpoint_states()
        if "april" in states:
            self.samples_generator.load_state_dict(states["april"])
        elif states["global_step"]:
            log.warning(
                "--ckpt.load_enable: the checkpoint of step %s has no samples of april's: generation starts with new "
                "prompts",
                states["global_step"],
            )
        return states

    def save_logs_and_checkpoints(
        self, global_step: int, logs_dict: dict[str, Any] | None = None, client_states: dict[str, Any] | None = None
    ) -> None:
        logs = {
            **(logs_dict or {}),
            **{f"april/{name}": v for name, v in self.samples_generator.latest.metrics().items()},
        }
        # The state has all tokens of the buffer, and generation pauses for it: only for a step that is saved.
        saves = global_step % self.args.ckpt.save_steps == 0
        super().save_logs_and_checkpoints(global_step, logs, self._with_samples(client_states, saves))

    def save_best_checkpoint(
        self, eval_metrics: dict[str, Any], global_step: int, client_states: dict[str, Any] | None = None
    ) -> None:
        value = (eval_metrics or {}).get(self._detect_eval_metric_key(eval_metrics or {}))
        saves = value is not None and value > self.best_eval_metric_value
        super().save_best_checkpoint(eval_metrics, global_step, self._with_samples(client_states, saves))

    def _with_samples(self, client_states: dict[str, Any] | None, saves: bool) -> dict[str, Any]:
        """Return what OpenRLHF saves with a checkpoint, with the rollout buffer if it saves one."""
        return {**(client_states or {}), **({"april": self.samples_generator.state_dict()} if saves else {})}


class TrainerActor:
    """Replaces the actor class of OpenRLHF's trainer."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        return ray.remote(PPOTrainer).remote(self.settings, *args, **kwargs)


def install(settings: Settings) -> None:
    """Replace OpenRLHF's vLLM actor and trainer in this process, and check settings before OpenRLHF starts actors."""

    def checked_strategy(args: Any) -> Any:
        check_settings(args, settings)
        return get_strategy(args)

    utils.get_strategy = checked_strategy
    vllm_engine.RolloutRayActor = ray.remote(RolloutActor)
    ppo_trainer.PPOTrainer = TrainerActor(settings)
    # One trainer for both modes: with --train.async_enable its generator continues while it trains.
    ppo_trainer_async.PPOTrainerAsync = TrainerActor(settings)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m april.integrations.openrlhf", allow_abbrev=False, add_help=False)
    for field in fields(Settings):
        parser.add_argument(SPELLING.format(field.name), dest=field.name, default=field.default)
    own, theirs = parser.parse_known_args()
    install(Settings.read(vars(own), SPELLING))
    sys.argv[1:] = theirs
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=True)
