"""AReaL with active partial rollouts: `from april.integrations.areal import PPOTrainer` in place of AReaL's, in a
script that AReaL's launcher starts.

Invariants:
- a step trains on `train_dataset.batch_size` complete groups, the oldest first, none staler than
  `rollout.max_head_offpolicyness`; a group that a filter turns away is replaced;
- an episode is AReaL's own workflow, which asks for its response, and gets it once it is finished while others
  generate;
- rows come from AReaL's dataloader in its order, each once an epoch; what it has given is under way here, trained on,
  or turned away, and AReaL's recovery state holds it;
- generation goes on while AReaL trains, and from its `pause` to its `resume` nothing of april's runs on its servers;
- evaluation is AReaL's own and neither sees nor changes the buffer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import torch
from areal.api import ModelRequest, RolloutWorkflow
from areal.api.cli_args import PPOConfig
from areal.infra import workflow_context
from areal.infra.workflow_context import WorkflowContext
from areal.utils import stats_tracker
from areal.utils.data import concat_padded_tensors

from april.integrations.adapter import RolloutAdapter
from april.integrations.areal.settings import params_of
from april.integrations.areal.workflow import RequestCapture, RequestMade, WorkflowResponse
from april.integrations.prompts import DataloaderRows
from april.integrations.servers import UnlabelledSGLang, connect
from april.integrations.settings import Settings
from april.integrations.state_format import check_format, with_format
from april.rollout.batch import RolloutBatch
from april.rollout.event_loop import EventLoop
from april.rollout.sampling import SamplingParams
from april.rollout.trajectory import Group, Prompt, Reward, Sample

FORMAT = 2


class Prompts:
    """AReaL's training dataloader, with what is under way as a part of its state. Only `Rollouts` draws from it."""

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
            raise ValueError("AReaL's recovery state was saved without april: start the run anew")
        self.rows.load_state_dict(state["rows"])
        self._rollouts.load_state_dict(state["april"])


class Rollouts:
    """The buffer between AReaL's calls, and an event loop on which it generates meanwhile."""

    def __init__(self, config: PPOConfig, settings: Settings) -> None:
        self.config = config
        self.params = params_of(config, settings)
        self.prompts: Prompts | None = None
        self.adapter: RolloutAdapter | None = None
        self.step: RolloutBatch | None = None
        """The last one."""
        self._loop = EventLoop("april rollouts")
        self._questions = EventLoop("april prompts")
        self._workflow: RolloutWorkflow | None = None
        self._accept: Callable[[dict[str, Any]], bool] | None = None
        self._sampling = SamplingParams()
        self._paused: AsyncExitStack | None = None
        self._saved: Mapping[str, Any] | None = None

    def batch(
        self, addresses: Sequence[str], version: int, workflow: RolloutWorkflow, accept: Any
    ) -> list[dict[str, torch.Tensor]]:
        """A trajectory for each group of a step: AReaL's tensors of shape `[n_samples, length]`."""
        return self._loop.run(self._batch(addresses, version, workflow, accept))

    async def _batch(
        self, addresses: Sequence[str], version: int, workflow: RolloutWorkflow, accept: Any
    ) -> list[dict[str, torch.Tensor]]:
        if self.adapter is None:
            self._workflow, self._accept = workflow, accept
            self.adapter = await self._begin(addresses)
        await self.adapter.advance_to(version)
        self.step = await self.adapter.next_batch()
        stats_tracker.get("rollout").scalar(**{f"april/{name}": value for name, value in self.step.metrics().items()})
        return [self._trajectory(group) for group in self.step.groups]

    async def _begin(self, addresses: Sequence[str]) -> RolloutAdapter:
        assert self.prompts is not None, "AReaL's trainer has no dataloader"
        self._sampling = self._sampling_of(self._asked(self.prompts.rows.peek()))
        urls = [address if "://" in address else f"http://{address}" for address in addresses]
        adapter = RolloutAdapter(
            await connect(urls, UnlabelledSGLang, self.config.actor.path),
            self.params,
            extra=map(self._encode, self.prompts.rows),
            reward=self._score,
            sampling=self._sampling,
            dynamic_filter=self._keep,
            seed=self.config.seed,
            overlap=True,
        )
        if self._saved is not None:
            adapter.load_state_dict(self._saved)
        await adapter.update_weights(version=adapter.version)
        return adapter

    def _asked(self, row: Any) -> ModelRequest:
        """What the workflow asks its engine for, given a row."""
        return self._questions.run(self._question(copy.deepcopy(row)))

    async def _question(self, row: Any) -> ModelRequest:
        assert self._workflow is not None
        try:
            await self._workflow.arun_episode(RequestCapture(), row)
        except RequestMade as made:
            return made.request
        raise ValueError("the workflow returns without asking its engine for a response")

    @staticmethod
    def _sampling_of(request: ModelRequest) -> SamplingParams:
        asked = request.gconfig
        return SamplingParams(
            max_tokens=asked.max_new_tokens,
            temperature=0.0 if asked.greedy else asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k if asked.top_k < 1e8 else 0,
            stop_token_ids=tuple(id for id in asked.stop_token_ids if id is not None),
        )

    def _encode(self, row: Any) -> Prompt:
        request = self._asked(row)
        total = len(request.input_ids) + request.gconfig.max_new_tokens
        if total > request.gconfig.max_tokens:
            raise ValueError(
                f"gconfig.max_tokens = {request.gconfig.max_tokens}: a prompt and its response take up to {total}; "
                "raise it"
            )
        if self._sampling_of(request) != self._sampling:
            raise ValueError("the workflow asks for some rows with other gconfig than for others: april keeps to one")
        return Prompt(tuple(request.input_ids), metadata={"row": row})

    async def _score(self, prompt: Prompt, sample: Sample) -> Reward:
        """What the workflow makes of a finished response."""
        assert self._workflow is not None
        workflow_context.set(WorkflowContext(is_eval=False, task_id=int(sample.group_id)))
        made = await self._workflow.arun_episode(WorkflowResponse(sample), copy.deepcopy(prompt.metadata["row"]))
        if made is None:
            return Reward(0.0, {"tensors": None})
        if not all(isinstance(value, torch.Tensor) for value in made.values()):
            raise RuntimeError("the workflow returns something else than tensors: april takes tensors of one sequence")
        tensors = {name: (str(value.dtype).removeprefix("torch."), value.tolist()) for name, value in made.items()}
        return Reward(float(made["rewards"].float().mean()), {"tensors": tensors})

    def _keep(self, group: Group) -> bool:
        """No episode was rejected by its workflow, nor the group by AReaL's filter."""
        if any(sample.reward_info["tensors"] is None for sample in group.samples):
            return False
        return self._accept is None or bool(self._accept(self._trajectory(group)))

    @staticmethod
    def _trajectory(group: Group) -> dict[str, torch.Tensor]:
        """As AReaL's grouped workflow puts episodes together."""
        made: dict[str, torch.Tensor] = concat_padded_tensors(
            [
                {
                    name: torch.tensor(values, dtype=getattr(torch, dtype))
                    for name, (dtype, values) in sample.reward_info["tensors"].items()
                }
                for sample in group.samples
            ]
        )
        return made

    def pause(self) -> None:
        """From here on nothing runs on the servers, and their weights may change."""
        if self.adapter is not None and self._paused is None:
            self._paused = AsyncExitStack()
            self._loop.run(self._paused.enter_async_context(self.adapter.scheduler.pause()))

    def resume(self, version: int) -> None:
        """Go on, under the weights of AReaL's `version`."""
        if self._paused is not None:
            self._loop.run(self._resume(version))

    async def _resume(self, version: int) -> None:
        assert self.adapter is not None
        assert self._paused is not None
        await self.adapter.advance_to(version)
        paused, self._paused = self._paused, None
        await paused.aclose()

    def state_dict(self) -> Mapping[str, Any] | None:
        """The buffer; None before the first batch. While paused."""
        if self.adapter is None:
            return self._saved
        return self._loop.run(self._state(self.adapter))

    async def _state(self, adapter: RolloutAdapter) -> Mapping[str, Any]:
        return with_format(FORMAT, **adapter.state_dict())

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from `state_dict`, before the first batch.

        Raises:
            ValueError: another april made it.
        """
        self._saved = None if state is None else check_format(state, FORMAT, "AReaL's recovery state")

    def close(self) -> None:
        if self.adapter is not None:
            adapter, self.adapter = self.adapter, None
            self._loop.run(self._close(adapter))
        self._loop.close()
        self._questions.close()

    async def _close(self, adapter: RolloutAdapter) -> None:
        await adapter.close()
        await adapter.scheduler.engine.close()
