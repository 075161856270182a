"""Rollouts for AReaL's trainer.

Invariants:
- a step trains on `train_dataset.batch_size` complete groups, the oldest first, none staler than
  `rollout.max_head_offpolicyness`; a group that a filter rejects is replaced or, with `dynamic_bs`, left out;
- AReaL's own workflow runs once per sample, as an episode: its responses are interrupted and resumed without its
  knowledge, and it scores them while other samples are generated;
- rows come from AReaL's dataloader in its order, each once an epoch; every row drawn is in flight, trained on or
  rejected, and is part of AReaL's recovery state;
- generation overlaps training; between AReaL's `pause` and `resume` the servers run no request of april's;
- evaluation is AReaL's own and neither reads nor changes the buffer.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import torch
from areal.api import ModelRequest, RolloutWorkflow
from areal.api.cli_args import PPOConfig
from areal.infra import workflow_context
from areal.infra.workflow_context import WorkflowContext
from areal.utils import stats_tracker
from areal.utils.data import concat_padded_tensors
from areal.utils.hf_utils import load_hf_tokenizer

from april.engines.servers.server_routes import ServerRoutes
from april.integrations.adapter import RolloutAdapter
from april.integrations.areal.servers import server_api
from april.integrations.areal.settings import check_request, params_of
from april.integrations.areal.workflow import EpisodeEngine, RequestCapture, RequestMade, tensors_of
from april.integrations.generating_code import UNLIMITED, CodeEpisode, GeneratingCode, result_of
from april.integrations.prompts import DataloaderRows
from april.integrations.routes import route_metrics, shape_of
from april.integrations.rules.areal_rules import REPLAY
from april.integrations.servers import connect
from april.integrations.settings import Settings
from april.integrations.state_format import check_format, with_format
from april.rollout.batch import RolloutBatch
from april.rollout.event_loop import EventLoop
from april.rollout.sampling import SamplingParams
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.reward import Reward
from april.rollout.trajectory.sample import Sample

log = logging.getLogger(__name__)

FORMAT = 3

TENSORS = "tensors"
"""Key in the result of a workflow: type and values of its tensors; None if it rejected the episode."""


class TrainingDataloader:
    """AReaL's training dataloader. Its state includes april's buffer, and only `Rollouts` draws from it."""

    def __init__(self, dataloader: Any, rollouts: Rollouts) -> None:
        self.rows = DataloaderRows(dataloader)
        self.batch_size: int = dataloader.batch_size
        self._rollouts = rollouts

    def __len__(self) -> int:
        return len(self.rows)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows.state_dict(), "april": self._rollouts.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "april" not in state:
            raise ValueError("AReaL's recovery state was saved without april: start a new run")
        self.rows.load_state_dict(state["rows"])
        self._rollouts.load_state_dict(state["april"])


class Rollouts:
    """The rollout buffer, and an event loop that generates between AReaL's calls."""

    def __init__(self, config: PPOConfig, settings: Settings) -> None:
        self.config = config
        self.params = params_of(config, settings)
        self.dataloader: TrainingDataloader | None = None
        self.adapter: RolloutAdapter | None = None
        self.latest: RolloutBatch | None = None
        """The batch returned last."""
        self._loop = EventLoop("april rollouts")
        self._code: GeneratingCode | None = None
        self._workflow: RolloutWorkflow | None = None
        self._accept: Callable[[dict[str, Any]], bool] | None = None
        self._sampling = SamplingParams()
        self._routes: ServerRoutes | None = None
        self._paused: AsyncExitStack | None = None
        self._saved: Mapping[str, Any] | None = None

    def batch(
        self, addresses: Sequence[str], version: int, workflow: RolloutWorkflow, accept: Any
    ) -> list[dict[str, torch.Tensor]]:
        """Return the next batch: for each group AReaL's tensors, of shape `[n_samples, length]`."""
        return self._loop.run(self._batch(addresses, version, workflow, accept))

    async def _batch(
        self, addresses: Sequence[str], version: int, workflow: RolloutWorkflow, accept: Any
    ) -> list[dict[str, torch.Tensor]]:
        if self.adapter is None:
            self._workflow, self._accept = workflow, accept
            self.adapter = await self._connect(addresses)
        await self.adapter.advance_to(version)
        kept: list[Group] = []
        while not kept:  # the filter may reject all of a batch
            assert self._code is not None
            self.latest = taken = await self._code.watch(self.adapter.next_batch())
            for left_out in taken.quarantined:
                log.warning("a group was left out (%s): %s", left_out.reason, left_out.error)
            kept = [group for group in taken.groups if not self.config.dynamic_bs or self._keep(group)]
        stats_tracker.get("rollout").scalar(**self._metrics(taken))
        return [self._trajectory(group) for group in kept]

    def _metrics(self, batch: RolloutBatch) -> dict[str, Any]:
        metrics = batch.metrics() | route_metrics(batch.groups, self._routes)
        return {f"april/{name}": value for name, value in metrics.items()}

    async def _connect(self, addresses: Sequence[str]) -> RolloutAdapter:
        assert self.dataloader is not None, "AReaL's trainer has no dataloader"
        # A workflow may change its row, which is part of the recovery state.
        request = await self._first_request(copy.deepcopy(self.dataloader.rows.peek()))
        self._sampling = self._sampling_of(request)
        urls = [address if "://" in address else f"http://{address}" for address in addresses]
        if self.config.rollout.return_routed_experts:
            self._routes = shape_of(self.config.actor.path, f"{REPLAY} = true")
        engine = await connect(urls, server_api(self.config, self._routes), self.config.actor.path)
        context = engine.capacity.context_length
        decode = load_hf_tokenizer(self.config.tokenizer_path).decode
        self._code = GeneratingCode(self._run, self._sampling.stop_token_ids, context, decode)
        adapter = RolloutAdapter(
            engine,
            self.params,
            extra=(Prompt((), metadata={"row": row}) for row in self.dataloader.rows),
            reward=self._score,
            sampling=replace(self._sampling, max_tokens=context, max_turns=UNLIMITED),
            episodes=self._code.episodes,
            dynamic_filter=None if self.config.dynamic_bs else self._keep,
            seed=self.config.seed,
            overlap=True,
        )
        if self._saved is not None:
            adapter.load_state_dict(self._saved)
        # AReaL has loaded the weights already: this records the version that the engine holds.
        await adapter.update_weights(version=adapter.version)
        return adapter

    async def _first_request(self, row: Any) -> ModelRequest:
        """Return the first request that the workflow sends to its engine for a row."""
        assert self._workflow is not None
        try:
            await self._workflow.arun_episode(RequestCapture(), row)
        except RequestMade as made:
            return made.request
        raise ValueError("the workflow returned without a request to its engine")

    @staticmethod
    def _sampling_of(request: ModelRequest) -> SamplingParams:
        gconfig = request.gconfig
        return SamplingParams(
            temperature=0.0 if gconfig.greedy else gconfig.temperature,
            top_p=gconfig.top_p,
            top_k=gconfig.top_k if gconfig.top_k < 1e8 else 0,
            stop_token_ids=tuple(sorted(id for id in gconfig.stop_token_ids if id is not None)),
        )

    def _check_request(self, request: ModelRequest) -> None:
        """Check that a request has april's sampling settings.

        Raises:
            ValueError: it does not.
        """
        if request.image_data or request.vision_msg_vllm:
            raise ValueError("the workflow's request contains images: april's integration passes on no images")
        check_request(request)
        if self._sampling_of(request) != self._sampling:
            raise ValueError("the workflow's gconfig differs between requests: april needs the same for all")

    async def _run(self, episode: CodeEpisode) -> Mapping[str, Any]:
        """Run the workflow for an episode, and return its tensors as JSON types."""
        assert self._workflow is not None
        assert self.adapter is not None
        adapter = self.adapter
        workflow_context.set(WorkflowContext(is_eval=False, task_id=episode.group_id))
        engine = EpisodeEngine(episode, self._check_request, lambda: adapter.version, self._routes)
        made = await self._workflow.arun_episode(engine, copy.deepcopy(episode.row["row"]))
        if not made:
            return {TENSORS: None}
        made = tensors_of(episode, made)
        reward = float(made["rewards"].float().mean())
        tensors = {name: [str(value.dtype).removeprefix("torch."), value.tolist()] for name, value in made.items()}
        return {TENSORS: tensors, "reward": reward}

    async def _score(self, prompt: Prompt, sample: Sample) -> Reward:
        """Return the reward of the workflow."""
        return Reward(result_of(sample).get("reward", 0.0))

    def _keep(self, group: Group) -> bool:
        """Return whether the workflow accepted all samples, and AReaL's filter the group."""
        if any(result_of(sample)[TENSORS] is None for sample in group.outcomes):
            return False
        return self._accept is None or bool(self._accept(self._trajectory(group)))

    @staticmethod
    def _trajectory(group: Group) -> dict[str, torch.Tensor]:
        """Concatenate a group's tensors as AReaL's grouped workflow does."""
        made: dict[str, torch.Tensor] = concat_padded_tensors(
            [
                {
                    name: torch.tensor(values, dtype=getattr(torch, dtype))
                    for name, (dtype, values) in result_of(sample)[TENSORS].items()
                }
                for sample in group.outcomes
            ]
        )
        return made

    def pause(self) -> None:
        """Interrupt generation until `resume`, so that the weights of the servers may change."""
        if self.adapter is not None and self._paused is None:
            self._paused = AsyncExitStack()
            self._loop.run(self._paused.enter_async_context(self.adapter.scheduler.pause()))

    def resume(self, version: int) -> None:
        """Resume generation, under the weights of AReaL's `version`."""
        if self._paused is not None:
            self._loop.run(self._resume(version))

    async def _resume(self, version: int) -> None:
        assert self.adapter is not None
        assert self._paused is not None
        # The version first: tokens sampled after the pause are of the new weights.
        await self.adapter.advance_to(version)
        paused, self._paused = self._paused, None
        await paused.aclose()

    def state_dict(self) -> Mapping[str, Any] | None:
        """Return the buffer, or None before the first batch. Call it while paused."""
        if self.adapter is None:
            return self._saved
        return self._loop.run(self._state(self.adapter))

    async def _state(self, adapter: RolloutAdapter) -> Mapping[str, Any]:
        return with_format(FORMAT, **adapter.state_dict())

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore `state_dict`. Call it before the first batch.

        Raises:
            ValueError: the state has another format.
        """
        self._saved = None if state is None else check_format(state, FORMAT, "AReaL's recovery state")

    def close(self) -> None:
        if self.adapter is not None:
            adapter, self.adapter = self.adapter, None
            self._loop.run(self._close(adapter))
        self._loop.close()

    async def _close(self, adapter: RolloutAdapter) -> None:
        await adapter.close()
        await adapter.scheduler.engine.close()
