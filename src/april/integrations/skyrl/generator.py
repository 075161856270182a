"""SkyRL's generator on april's scheduler.

Invariants:
- a step trains on `trainer.train_batch_size` complete groups, each next to each other, every sample with its own prompt
  and reward;
- a sample is scored once, by SkyRL's own agent loop and environment, while others are generated;
- prompts come from SkyRL's dataloader in its order, each once an epoch; every prompt drawn is in flight, trained on or
  rejected, and is part of SkyRL's checkpoint;
- between SkyRL's calls nothing runs on its servers, so they sleep and take weights with nothing in flight;
- evaluation is SkyRL's own and neither reads nor changes the buffer.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import skyrl_gym
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.generators.base import (
    TRAINING_PHASE_EVAL,
    GeneratorInput,
    GeneratorOutput,
    TrajectoryID,
)
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator, TrajectoryOutput

from april.disk import as_json
from april.integrations.adapter import RolloutAdapter
from april.integrations.finished_response import FinishedResponse
from april.integrations.prompts import DataloaderRows
from april.integrations.servers import UnlabelledVLLM, connect
from april.integrations.settings import Settings
from april.integrations.skyrl.settings import check_settings, params_of
from april.integrations.state_format import check_format, with_format
from april.rollout.batch import RolloutBatch
from april.rollout.sampling import SamplingParams
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.reward import Reward
from april.rollout.trajectory.sample import Sample

FORMAT = 2


class TrainingDataloader:
    """SkyRL's training dataloader: SkyRL's loop draws batches from it, and april extra prompts.

    Args:
        dataloader: SkyRL's own dataloader.
        size: number of rows of a batch.
    """

    def __init__(self, dataloader: Any, size: int) -> None:
        self.rows = DataloaderRows(dataloader)
        self.size = size
        self._steps = 0
        """Number of this epoch's batches that the loop has drawn."""

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        while self._steps < len(self):
            self._steps += 1
            yield [next(self.rows) for _ in range(self.size)]
        self._steps = 0

    def state_dict(self) -> dict[str, Any]:
        # After the last batch of an epoch the loop has not reset the count yet.
        return {"steps": self._steps % len(self), "rows": self.rows.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps = state["steps"]
        self.rows.load_state_dict(state["rows"])


class AgentLoopResponse(FinishedResponse):
    """A finished response, in place of the inference client that SkyRL's agent loop calls."""

    def __init__(self, sample: Sample, client: Any) -> None:
        super().__init__(sample, "the environment")
        self._client = client

    async def generate(self, request: Mapping[str, Any], model: str | None = None) -> dict[str, Any]:
        (prompt,) = request["prompt_token_ids"]
        sample = self.response_to(prompt)
        ids = list(sample.response_ids)
        return {
            "responses": await self._client.detokenize([ids]),
            "response_ids": [ids],
            "stop_reasons": [self.stop_reason],
            "response_logprobs": [sample.logprobs.tolist()],
        }

    async def finish_session(self, session_id: str) -> None:
        """The servers hold nothing for a session."""


async def _batch_of_one(
    loop: SkyRLGymGenerator, prompt: Any, env_class: str, env_extras: Any, length: int
) -> TrajectoryOutput:
    """Run SkyRL's batched generation, which is one turn without an agent loop, on a single sample."""
    metrics: dict[str, Any] = {}
    run = loop._run_in_executor_if_available

    async def observed(method: Callable[..., Any], *args: Any) -> Any:
        # SkyRL returns the metrics of environments as means only.
        if method.__name__ == "close":
            metrics.update(method.__self__.get_metrics())  # type: ignore[attr-defined]
        return await run(method, *args)

    loop._run_in_executor_if_available = observed
    made = await SkyRLGymGenerator.generate_batched(loop, [prompt], [env_class], [env_extras], length)
    return TrajectoryOutput(
        prompt_ids=made["prompt_token_ids"][0],
        response_ids=made["response_ids"][0],
        reward=made["rewards"][0],
        stop_reason=made["stop_reasons"][0],
        loss_mask=made["loss_masks"][0],
        rollout_logprobs=made["rollout_logprobs"][0],
        env_metrics=metrics,
    )


class Generator(SkyRLGymGenerator):  # type: ignore[misc]
    """SkyRL's generator, with april's scheduler between its prompts and its servers."""

    def __init__(self, cfg: SkyRLTrainConfig, settings: Settings, **parts: Any) -> None:
        check_settings(cfg, settings)
        super().__init__(**parts)
        self.cfg = cfg
        self.settings = settings
        self.dataloader: TrainingDataloader | None = None
        """Set once SkyRL's trainer has built its dataloader."""
        self.adapter: RolloutAdapter | None = None
        self.latest: RolloutBatch | None = None
        """The batch returned last."""
        self._weights: int | None = None
        """SkyRL's count of weights when rollouts were last collected."""
        self._saved: Mapping[str, Any] | None = None

    async def generate(self, input_batch: GeneratorInput, disable_tqdm: bool = False) -> GeneratorOutput:
        """Return a batch of complete groups, and replace the prompts of `input_batch`. SkyRL does evaluation itself."""
        metadata = input_batch["batch_metadata"]
        if metadata is not None and metadata.training_phase == TRAINING_PHASE_EVAL:
            return await super().generate(input_batch, disable_tqdm)
        adapter = await self._connected()
        taken = await adapter.rollout([self._encode(row) for row in self._rows(input_batch)])
        self.latest = taken
        output = await self._assembled(taken.groups, input_batch)
        output["rollout_metrics"].update({f"april/{name}": value for name, value in taken.metrics().items()})
        return output

    def _rows(self, batch: GeneratorInput) -> list[dict[str, Any]]:
        """Return the dataset rows of the requested prompts. SkyRL repeats each prompt for every sample of its group."""
        columns = zip(batch["prompts"], batch["env_classes"], batch["env_extras"], batch["trajectory_ids"], strict=True)
        return [
            {"prompt": prompt, "env_class": env_class, "env_extras": extras, "uid": id.instance_id}
            for prompt, env_class, extras, id in columns
            if id.repetition_id == 0
        ]

    def _extra(self) -> Iterator[Prompt]:
        assert self.dataloader is not None, "SkyRL's trainer has no dataloader"
        return map(self._encode, self.dataloader.rows)

    def _encode(self, row: Mapping[str, Any]) -> Prompt:
        """Make a prompt as SkyRL's agent loop does: initialise the environment, and apply the chat template."""
        given = {**row, "env_class": row["env_class"] or self.cfg.environment.env_class}
        try:
            as_json(given)
        except (TypeError, ValueError) as error:
            raise ValueError(f"row {row['uid']} of data.train_data cannot be part of a checkpoint: {error}") from None
        config = getattr(self.skyrl_gym_cfg, given["env_class"], {})
        extras = {**copy.deepcopy(given["env_extras"]), "max_turns": self.max_turns}
        env = skyrl_gym.make(given["env_class"], env_config=config, extras=extras)
        history, _ = env.init(copy.deepcopy(given["prompt"]))
        env.close()
        ids = self.tokenizer.apply_chat_template(
            history,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **self.generator_cfg.chat_template_kwargs,
        )
        if len(ids) > self.generator_cfg.max_input_length:
            raise ValueError(
                f"row {row['uid']} of data.train_data: a prompt of {len(ids)} tokens where generator.max_input_length "
                f"= {self.generator_cfg.max_input_length}: raise it, or lower trainer.max_prompt_length"
            )
        return Prompt(tuple(ids), metadata=given)

    async def _score(self, prompt: Prompt, sample: Sample) -> Reward:
        """Run SkyRL's agent loop, or its batched generation, with a finished response; return its reward and output."""
        row = prompt.metadata
        # A shallow copy, because samples are scored concurrently and each copy has its own client.
        loop = copy.copy(self)
        loop.inference_engine_client = AgentLoopResponse(sample, self.inference_engine_client)
        given = copy.deepcopy((row["prompt"], row["env_class"], row["env_extras"]))
        length = self.generator_cfg.sampling_params.max_generate_length
        if self.batched:
            output = await _batch_of_one(loop, *given, length)
        else:
            output = await SkyRLGymGenerator.agent_loop(
                loop,
                *given,
                length,
                self.generator_cfg.max_input_length,
                trajectory_id=TrajectoryID(row["uid"], sample.index),
            )
        kept = ("response_ids", "reward", "stop_reason", "loss_mask", "rollout_logprobs", "env_metrics")
        info = json.loads(as_json({name: getattr(output, name) for name in kept}))
        return Reward(float(np.sum(info["reward"])), info)

    def _keep(self, group: Group) -> bool:
        """Apply SkyRL's filter: the rewards of a group must differ."""
        return len(group.samples) == 1 or len({sample.reward for sample in group.samples}) > 1

    async def _assembled(self, groups: Sequence[Group], batch: GeneratorInput) -> GeneratorOutput:
        """Assemble a batch as SkyRL's generator does from the outputs of its agent loop."""
        outputs: dict[str, TrajectoryOutput] = {}
        names = ("prompts", "env_classes", "env_extras", "trajectory_ids")
        columns: dict[str, list[Any]] = {name: [] for name in names}
        for group in groups:
            row = group.prompt.metadata
            for sample in group.samples:
                # SkyRL groups samples by this id. A row's own id may be in flight twice, from two epochs.
                id = TrajectoryID(str(group.id), sample.index)
                outputs[id.to_string()] = TrajectoryOutput(prompt_ids=list(sample.prompt_ids), **sample.reward_info)
                values = (row["prompt"], row["env_class"], copy.deepcopy(row["env_extras"]), id)
                for column, value in zip(columns.values(), values, strict=True):
                    column.append(value)
        batch.update(columns)

        async def finished(*_: Any, trajectory_id: TrajectoryID, **__: Any) -> TrajectoryOutput:
            return outputs[trajectory_id.to_string()]

        generator = copy.copy(self)
        generator.agent_loop = finished
        if self.batched:
            # Batched generation returns the same, but leaves the rewards of truncated responses as they are.
            generator.batched = False
            generator.generator_cfg = replace(self.generator_cfg, zero_reward_on_non_stop=False)
        return await SkyRLGymGenerator.generate(generator, batch, disable_tqdm=True)

    async def _connected(self) -> RolloutAdapter:
        """Return the adapter, connected to SkyRL's servers and at the version of their weights."""
        if self.adapter is None:
            self.adapter = await self._connect()
            if self._saved is not None:
                self.adapter.load_state_dict(self._saved)
        weights = self.inference_engine_client.weight_version
        if weights != self._weights:
            await self.adapter.follow_weights()
            self._weights = weights
        return self.adapter

    async def _connect(self) -> RolloutAdapter:
        drawn = self.generator_cfg.sampling_params
        filters = self.cfg.trainer.algorithm.dynamic_sampling.type == "filter"
        client = self.inference_engine_client
        adapter = self.policy_model_name if client.uses_lora_weight_sync else None
        api = partial(UnlabelledVLLM, adapter=adapter)
        return RolloutAdapter(
            await connect(client.server_urls, api, self.cfg.trainer.policy.model.path),
            params_of(self.cfg, self.settings),
            extra=self._extra(),
            reward=self._score,
            sampling=SamplingParams(
                max_tokens=drawn.max_generate_length,
                temperature=drawn.temperature,
                top_p=drawn.top_p,
                top_k=max(drawn.top_k, 0),
                min_p=drawn.min_p,
                stop_token_ids=(self.tokenizer.eos_token_id,),
            ),
            dynamic_filter=self._keep if filters else None,
            seed=self.cfg.trainer.seed,
        )

    def state_dict(self) -> Mapping[str, Any] | None:
        """Return the buffer for SkyRL's checkpoint, or None before the first rollout."""
        if self.adapter is None:
            return self._saved
        return with_format(FORMAT, **self.adapter.state_dict())

    def load_state_dict(self, saved: Mapping[str, Any], where: str) -> None:
        """Restore `state_dict`. Call it before the first rollout.

        Raises:
            ValueError: the state has another format.
        """
        self._saved = check_format(saved, FORMAT, where)

    async def close(self) -> None:
        if self.adapter is not None:
            await self.adapter.close()
            await self.adapter.scheduler.engine.close()
