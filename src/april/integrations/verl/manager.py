"""verl's agent-loop manager on april's scheduler.

Invariants:
- a step trains on exactly `data.train_batch_size` complete groups, the oldest first; none is dropped for its age;
- a prompt leaves verl's dataloader when its group is started, or with a processor of images up to a step's prompts
  earlier; it leaves TransferQueue when its group is trained on or rejected; verl's own code writes its trajectories to
  TransferQueue when its group is handed to training;
- after a step is sampled, verl's replicas run no request of april's;
- every token keeps the log-probability and the policy version that it was drawn with;
- unfinished samples are part of verl's checkpoint, and a resumed run continues them from their last tokens;
- validation is verl's own and neither reads nor changes the buffer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np
import transfer_queue as tq
from ray.exceptions import ActorDiedError
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl.utils import tensordict_utils as tu

from april.integrations.adapter import RolloutAdapter
from april.integrations.generating_code import UNLIMITED
from april.integrations.routes import route_metrics, shape_of, whole_routes
from april.integrations.rules.verl_rules import REPLAY
from april.integrations.state_format import check_format, with_format
from april.integrations.verl.agent_loops import AgentLoops, fields_of, outputs_of
from april.integrations.verl.prompt_encoder import PromptEncoder
from april.integrations.verl.prompt_worker import PromptWorker
from april.integrations.verl.replicas import ReplicaEngine, capacity_of
from april.integrations.verl.settings import params_of
from april.rollout.event_loop import EventLoop
from april.rollout.sampling import SamplingParams
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.reward import Reward
from april.rollout.trajectory.sample import Sample

log = logging.getLogger(__name__)

FORMAT = 7

SINGLE_TURN = "single_turn_agent"


class AprilRolloutManager(AgentLoopManagerTQ):
    """verl's agent-loop manager with april's scheduler for training prompts. verl's own workers validate.

    One of verl's agent-loop workers runs in this process: it tokenizes prompts, scores samples and writes trajectories.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.worker = PromptWorker(self.config, self.llm_client, self.teacher_client, self.reward_loop_worker_handles)
        self.loop = EventLoop("april")
        self.rows: dict[str, dict[str, Any]] = {}
        """Dataset rows of the prompts in flight and of those encoded ahead, by uid."""
        self._encoded: deque[tuple[str, Future[Prompt]]] = deque()
        """Prompts that were encoded ahead, by uid, in verl's order."""
        self._sampling_params = {
            "temperature": self.rollout_config.temperature,
            "top_p": self.rollout_config.top_p,
            "top_k": self.rollout_config.top_k,
            "repetition_penalty": 1.0,
            "logprobs": True,
        }
        self._agent = self.rollout_config.agent.default_agent_loop
        self.loops: AgentLoops | None = None
        """None if every sample is one turn."""
        self._named_loops = self._agent != SINGLE_TURN or self.rollout_config.multi_turn.enable
        """Whether prompts may name agent loops of several turns."""
        gpus = self.config.trainer.nnodes * self.config.trainer.n_gpus_per_node
        self._capacity = capacity_of(self.rollout_config, gpus)
        self.encoder = PromptEncoder(self.worker, agent_loops=self._named_loops)
        if self._named_loops:
            context_length = self._capacity[0].context_length
            self.loops = AgentLoops(self.worker, self.encoder, self.rows, self._sampling_params, context_length)
        self._refill: Callable[[int], int] | None = None
        self._abort: Callable[[], Any] | None = None
        self._lost: Callable[[ActorDiedError], int] | None = None
        if self.loops is not None and self.rollout_config.enable_rollout_routing_replay:
            raise ValueError(f"{REPLAY}=true: april hands over no routes of agent loops: set it to false")
        self._routes = (
            shape_of(self.config.actor_rollout_ref.model.path, f"{REPLAY}=true")
            if self.rollout_config.enable_rollout_routing_replay
            else None
        )
        self.adapter = self._connect()

    def attach(
        self, refill: Callable[[int], int], abort: Callable[[], Any], lost: Callable[[ActorDiedError], int]
    ) -> None:
        """Set the trainer's functions.

        Args:
            refill: fetches a number of prompts from the dataloader and passes them to `generate_sequences`.
            abort: ends all requests on all replicas.
            lost: removes a replica that has died, and returns the number of replicas left.
        """
        self._refill, self._abort, self._lost = refill, abort, lost

    def generate_sequences(self, prompts: TensorDict) -> None:
        if tu.get(prompts, "validate", False):
            super().generate_sequences(prompts)
            return
        for i in range(len(prompts)):
            row = row_of(prompts, i)
            agent = row.setdefault("agent_name", self._agent)
            if not self._named_loops and agent != SINGLE_TURN:
                raise ValueError(
                    f"data: a prompt asks for the agent loop {agent!r}: set "
                    "actor_rollout_ref.rollout.multi_turn.enable=true"
                )
            self.rows[row["uid"]] = row
            self._encoded.append((row["uid"], self.encoder.start(row)))

    def collect(self, global_steps: int) -> dict[str, float]:
        """Put a batch of complete groups into TransferQueue, ready to be sampled."""
        return self.loop.run(self._collect(global_steps))

    async def _collect(self, global_steps: int) -> dict[str, float]:
        # verl counts steps from 1 and updates the weights after each: step k samples with the weights of step k - 1.
        await self.adapter.advance_to(global_steps - 1)
        batch = await self.adapter.next_batch()
        # One group after another: verl keeps the order in which rows arrive, and the rows of a group must be adjacent.
        for group in batch.groups:
            await self._hand_over(group)
        for left_out in batch.quarantined:
            log.warning("a group was quarantined (%s): %s", left_out.reason, left_out.error)
        # Rows of rejected groups are neither in the batch, nor in the buffer, nor encoded ahead.
        kept = {group.prompt.id for group in [*batch.groups, *self.adapter.scheduler.buffer]}
        kept |= {uid for uid, _ in self._encoded}
        if rejected := [uid for uid in self.rows if uid not in kept]:
            await tq.async_kv_clear(keys=rejected, partition_id="train")
        for uid in [*rejected, *(group.prompt.id for group in batch.groups)]:
            del self.rows[uid]
            self.encoder.forget(uid)
        metrics = batch.metrics() | route_metrics(batch.groups, self._routes)
        return {f"training/april/{name}": value for name, value in metrics.items()}

    async def _hand_over(self, group: Group) -> None:
        """Write the group's trajectories, and then mark its prompt as finished."""
        row = self._row(group.prompt)
        await asyncio.gather(
            *(
                self.worker._agent_loop_postprocess(
                    self._scored_outputs(group.prompt.id, sample), False, session_id=sample.episode, **row
                )
                for sample in group.outcomes
            )
        )
        # Last, because verl samples prompts with this mark: their trajectories have to be complete.
        await tq.async_kv_put(key=group.prompt.id, partition_id="train", tag={"status": "finished"})

    def _row(self, prompt: Prompt) -> dict[str, Any]:
        """Return a prompt's row without the name of its agent loop, as verl's worker expects it."""
        return {name: value for name, value in self.rows[prompt.id].items() if name != "agent_name"}

    def _scored_outputs(self, uid: str, sample: Sample) -> list[AgentLoopOutput]:
        """Return a sample's trajectories with its routes, and with its reward, which belongs to the last of them."""
        outputs = self._outputs(uid, sample)
        if self._routes is not None:  # samples are then one response each
            tokens = len(sample.prompt_ids) + sample.length
            outputs[0].routed_experts = whole_routes(sample.routes, tokens, self._routes, np.int16)
        if self.reward_loop_worker_handles is not None and sample.reward is not None:
            outputs[-1].reward_score = sample.reward
            outputs[-1].extra_fields.setdefault("reward_extra_info", dict(sample.reward_info))
        return outputs

    def _outputs(self, uid: str, sample: Sample) -> list[AgentLoopOutput]:
        """Return a sample's trajectories: its one response, or those of its agent loop."""
        if self.loops is not None:
            outputs = outputs_of(sample)
        else:
            output = AgentLoopOutput(
                prompt_ids=[*sample.prompt_ids],
                response_ids=sample.response_ids,
                response_mask=[1] * sample.length,
                response_logprobs=sample.logprobs.tolist(),
                num_turns=2,
                metrics=AgentLoopMetrics(),
                extra_fields=fields_of(sample.versions.tolist()),
            )
            outputs = [output]
        for output in outputs:
            images = self.encoder.images(uid, output.prompt_ids + output.response_ids)
            output.multi_modal_data = {"images": images} if images else {}
            output.mm_processor_kwargs = self.encoder.settings
            output.mm_processor_output = None
        return outputs

    async def _score(self, prompt: Prompt, sample: Sample) -> float | Reward:
        """Return the reward of the agent loop or of verl's reward workers, or 0 if a colocated reward model scores the
        batch later."""
        if self.reward_loop_worker_handles is None:
            return 0.0
        outputs = self._outputs(prompt.id, sample)
        await self.worker._compute_score(outputs, kwargs={"session_id": sample.episode, **self._row(prompt)})
        final = outputs[-1]
        return Reward(float(final.reward_score), final.extra_fields.get("reward_extra_info", {}))

    def _prompts(self) -> Iterator[Prompt]:
        """Yield further prompts, which verl requests one at a time."""
        while True:
            assert self._refill is not None, "attach comes first"
            while len(self._encoded) <= self.encoder.ahead:
                self._refill(1)  # verl's function calls `generate_sequences`
            _, prompt = self._encoded.popleft()
            yield prompt.result()

    def _media(self, sample: Sample) -> Mapping[str, Any] | None:
        """Return the images of a sample as further arguments of a request; None if they are not kept, because the
        sample belongs to no group."""
        group = self.adapter.scheduler.buffer.groups.get(sample.group_id)
        if group is None:
            return None
        images = self.encoder.images(group.prompt.id, [*sample.prompt_ids, *sample.response_ids])
        return {"image_data": list(images), "mm_processor_kwargs": self.encoder.settings} if images else {}

    def _keep(self, group: Group) -> bool:
        """Apply verl's filter of groups without a learning signal (algorithm.filter_groups)."""
        metric = self.config.algorithm.filter_groups.metric
        if metric == "reward":
            values = [sample.reward for sample in group.outcomes]
        else:
            values = [sample.reward_info[metric] for sample in group.outcomes]
        return len(values) == 1 or len(set(values)) > 1

    async def _abort_all(self) -> None:
        assert self._abort is not None, "attach comes first"
        await self._abort()

    def _remove_replica(self, error: ActorDiedError) -> int:
        assert self._lost is not None, "attach comes first"
        return self._lost(error)

    def _connect(self) -> RolloutAdapter:
        rollout = self.rollout_config
        filters = self.config.algorithm.get("filter_groups")
        capacity, calls, replicas = self._capacity
        if self.loops is not None and capacity.context_length < rollout.prompt_length + rollout.response_length:
            raise ValueError(
                f"actor_rollout_ref.rollout.max_model_len = {rollout.max_model_len}: prompt and turns of an agent loop "
                f"take up to {rollout.prompt_length + rollout.response_length} tokens; raise it"
            )
        engine = ReplicaEngine(
            self.llm_client,
            capacity,
            self._sampling_params,
            self._abort_all,
            calls,
            replicas,
            self._remove_replica,
            routes=self._routes,
            media=self._media,
            undrawn=self.encoder.undrawn,
        )
        return RolloutAdapter(
            engine,
            params_of(self.config),
            extra=self._prompts(),
            reward=self._score,
            sampling=SamplingParams(
                # The budget of an agent loop's response is part of its request.
                max_tokens=rollout.response_length if self.loops is None else capacity.context_length,
                temperature=rollout.temperature,
                top_p=rollout.top_p,
                top_k=max(rollout.top_k, 0),
                max_turns=0 if self.loops is None else UNLIMITED,
            ),
            dynamic_filter=self._keep if filters is not None and filters.get("enable") else None,
            seed=rollout.get("seed", 0),
            episodes=None if self.loops is None else self.loops.code.episodes,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the buffer. The rows of its prompts are part of TransferQueue's own checkpoint."""
        return self.loop.run(self._state())

    async def _state(self) -> dict[str, Any]:
        return with_format(
            FORMAT,
            sampling=self._sampling_params,
            ahead=[uid for uid, _ in self._encoded],
            **self.adapter.state_dict(),
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> int:
        """Restore `state_dict`, after TransferQueue is restored, and return the number of waiting prompts.

        Raises:
            ValueError: the state has another format, or an image has changed.
        """
        check_format(state, FORMAT, "verl's checkpoint")
        self._sampling_params.update(state["sampling"])
        self.adapter.load_state_dict(state)
        prompts = [group.prompt for group in self.adapter.scheduler.buffer]
        uids = [*(prompt.id for prompt in prompts), *state["ahead"]]
        if uids:
            batch = tq.kv_batch_get(keys=uids, partition_id="train")
            tags = tq.kv_list("train")["train"]
            for i, uid in enumerate(uids):
                row = {**row_of(batch, i), "global_steps": tags[uid]["global_steps"]}
                row.setdefault("agent_name", self._agent)
                self.rows[uid] = row
        self.encoder.restore(prompts, self.rows)
        for uid in state["ahead"]:
            self._encoded.append((uid, self.encoder.start(self.rows[uid])))
        return len(uids)


def row_of(batch: TensorDict, i: int) -> dict[str, Any]:
    """Return row `i` of a batch of verl's dataset, as agent loops receive it."""
    row = {}
    for name, column in batch.items():
        if isinstance(column, NonTensorData):
            row[name] = column.data
        elif isinstance(column, NonTensorStack):
            row[name] = column[i].data
        else:
            row[name] = column[i]
    return row
