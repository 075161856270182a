"""SkyRL's generator on april's scheduler.

Invariants:
- a step trains on `trainer.train_batch_size` complete groups, each next to each other, every sample with its own prompt
  and reward;
- SkyRL's own agent loop and environment drive each sample, over one or more turns, while others are generated;
- prompts come from SkyRL's dataloader in its order, each once an epoch; every prompt drawn is in flight, trained on or
  rejected, and is part of SkyRL's checkpoint;
- between SkyRL's calls nothing runs on its servers, so they sleep and take weights with nothing in flight; in fully
  asynchronous training, generation continues during training and is interrupted for each weight update;
- evaluation is SkyRL's own and neither reads nor changes the buffer.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.generators.base import (
    TRAINING_PHASE_EVAL,
    GeneratorInput,
    GeneratorOutput,
    TrajectoryID,
)
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator, StepWiseOutput, TrajectoryOutput

from april.disk import as_json
from april.integrations.adapter import RolloutAdapter
from april.integrations.generating_code import UNLIMITED, GeneratingCode
from april.integrations.prompts import DataloaderRows
from april.integrations.routes import route_metrics, shape_of
from april.integrations.rules.skyrl_rules import REPLAY
from april.integrations.servers import UnlabelledVLLM, connect
from april.integrations.settings import Settings
from april.integrations.skyrl.agent_loops import AgentLoops, output_of, reward
from april.integrations.skyrl.settings import check_settings, params_of
from april.integrations.state_format import check_format, with_format
from april.integrations.stop_tokens import stop_tokens
from april.rollout.batch import RolloutBatch
from april.rollout.engine import Engine
from april.rollout.sampling import SamplingParams
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt

FORMAT = 3


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
        replayed = self.generator_cfg.inference_engine.enable_return_routed_experts
        self.routes = shape_of(cfg.trainer.policy.model.path, f"{REPLAY}=true") if replayed else None
        """Shape of the routes that the servers return; None without router replay."""
        self._code: GeneratingCode | None = None
        """The agent loops; set with the adapter."""
        self._weights: int | None = None
        """SkyRL's count of weights when rollouts were last collected."""
        self._saved: Mapping[str, Any] | None = None

    async def generate(self, input_batch: GeneratorInput, disable_tqdm: bool = False) -> GeneratorOutput:
        """Return a batch of complete groups, and replace the prompts of `input_batch`. SkyRL does evaluation itself."""
        metadata = input_batch["batch_metadata"]
        if metadata is not None and metadata.training_phase == TRAINING_PHASE_EVAL:
            return await super().generate(input_batch, disable_tqdm)
        adapter = await self._connected()
        taken = await self._taken(adapter.rollout([self._encode(row) for row in self._rows(input_batch)]))
        output = await self._assembled(taken.groups, input_batch)
        output["rollout_metrics"].update(self.metrics())
        return output

    async def next_groups(self) -> list[tuple[GeneratorOutput, list[Any]]]:
        """Return the next batch's groups as SkyRL's generator returns them, each with the prompts of its samples, and
        continue to generate."""
        adapter = await self._connected()
        taken = await self._taken(adapter.next_batch())
        made = []
        for group in taken.groups:
            batch = GeneratorInput(batch_metadata=None, sampling_params=None)
            made.append((await self._assembled([group], batch), batch["prompts"]))
        return made

    async def _taken(self, batch: Coroutine[Any, Any, RolloutBatch]) -> RolloutBatch:
        assert self._code is not None, "the adapter has agent loops"
        self.latest = await self._code.watch(batch)
        return self.latest

    def metrics(self) -> dict[str, Any]:
        """Return april's metrics of the latest batch."""
        assert self.latest is not None, "no batch was returned"
        metrics = self.latest.metrics() | route_metrics(self.latest.groups, self.routes)
        return {f"april/{name}": value for name, value in metrics.items()}

    async def update_weights(self, update: Callable[[], Awaitable[Any]]) -> None:
        """Interrupt generation, update the weights of SkyRL's servers, and continue."""
        if self.adapter is None:
            await update()
            return
        async with self.adapter.scheduler.pause():
            await update()
            await self._follow(self.adapter)

    async def snapshot(self) -> tuple[Mapping[str, Any] | None, Mapping[str, Any]]:
        """Return `state_dict` and the dataloader's state of the same moment, during generation."""
        assert self.dataloader is not None, "SkyRL's trainer has no dataloader"
        if self.adapter is None:
            return self.state_dict(), self.dataloader.state_dict()
        async with self.adapter.scheduler.pause():
            return self.state_dict(), self.dataloader.state_dict()

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
        """Make a prompt of a dataset row. SkyRL's agent loop makes its tokens."""
        given = {**row, "env_class": row["env_class"] or self.cfg.environment.env_class}
        try:
            as_json(given)
        except (TypeError, ValueError) as error:
            raise ValueError(f"row {row['uid']} of data.train_data cannot be part of a checkpoint: {error}") from None
        return Prompt((), metadata=given)

    def _keep(self, group: Group) -> bool:
        """Apply SkyRL's filter: the rewards of a group must differ."""
        return group.size == 1 or len({sample.reward for sample in group.outcomes}) > 1

    async def _assembled(self, groups: Sequence[Group], batch: GeneratorInput) -> GeneratorOutput:
        """Assemble a batch as SkyRL's generator does from the outputs of its agent loop."""
        outputs: dict[str, TrajectoryOutput | StepWiseOutput] = {}
        names = ("prompts", "env_classes", "env_extras", "trajectory_ids")
        columns: dict[str, list[Any]] = {name: [] for name in names}
        for group in groups:
            row = group.prompt.metadata
            for sample in group.outcomes:
                # SkyRL groups samples by this id. A row's own id may be in flight twice, from two epochs.
                id = TrajectoryID(str(group.id), sample.episode)
                outputs[id.to_string()] = output_of(sample, self.generator_cfg.step_wise_trajectories, self.routes)
                values = (row["prompt"], row["env_class"], copy.deepcopy(row["env_extras"]), id)
                for column, value in zip(columns.values(), values, strict=True):
                    column.append(value)
        batch.update(columns)

        async def finished(*_: Any, trajectory_id: TrajectoryID, **__: Any) -> TrajectoryOutput | StepWiseOutput:
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
            self.adapter = self._rollouts(await self._connect())
            if self._saved is not None:
                self.adapter.load_state_dict(self._saved)
        await self._follow(self.adapter)
        return self.adapter

    async def _follow(self, adapter: RolloutAdapter) -> None:
        """Raise april's version if SkyRL has updated the weights."""
        weights = self.inference_engine_client.weight_version
        if weights != self._weights:
            await adapter.follow_weights()
            self._weights = weights

    async def _connect(self) -> Engine:
        client = self.inference_engine_client
        adapter = self.policy_model_name if client.uses_lora_weight_sync else None
        api = partial(UnlabelledVLLM, adapter=adapter, routes=self.routes)
        return await connect(client.server_urls, api, self.cfg.trainer.policy.model.path)

    def _rollouts(self, engine: Engine) -> RolloutAdapter:
        drawn = self.generator_cfg.sampling_params
        filters = self.cfg.trainer.algorithm.dynamic_sampling.type == "filter"
        stops = self._stop_tokens()
        loops = AgentLoops(self, stops, engine.capacity.context_length, self.routes)
        self._code = loops.code
        return RolloutAdapter(
            engine,
            params_of(self.cfg, self.settings),
            extra=self._extra(),
            reward=reward,
            sampling=SamplingParams(
                max_tokens=loops.budget,
                temperature=drawn.temperature,
                top_p=drawn.top_p,
                top_k=max(drawn.top_k, 0),
                min_p=drawn.min_p,
                stop_token_ids=stops,
                stop=loops.stops,
                max_turns=UNLIMITED,
            ),
            episodes=loops.code.episodes,
            dynamic_filter=self._keep if filters else None,
            overlap=self.cfg.trainer.fully_async.enabled,
            seed=self.cfg.trainer.seed,
        )

    def _stop_tokens(self) -> tuple[int, ...]:
        return stop_tokens(self.cfg.trainer.policy.model.path, self.tokenizer)

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
