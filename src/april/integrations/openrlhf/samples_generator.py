"""OpenRLHF's generator of training samples, on april's scheduler.

Invariants:
- a step trains on `--rollout.batch_size` complete groups, each next to each other, every sample with its own prompt and
  label; groups that OpenRLHF's filter rejects are replaced;
- a sample is scored once, by OpenRLHF's own executor or the user's agent executor, while others are generated;
- prompts come from OpenRLHF's dataloader in its order, each once an episode; every prompt drawn is in flight, trained
  on or rejected, and is part of OpenRLHF's checkpoint;
- the weights of the engines change only when OpenRLHF broadcasts new ones, and nothing runs in the engines then;
- with `--train.async_enable` generation continues while OpenRLHF trains;
- evaluation neither reads nor changes the buffer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar

from openrlhf.trainer.ppo_utils import samples_generator
from openrlhf.trainer.ray import vllm_engine
from openrlhf.utils.agent import SingleTurnAgentExecutor

from april.disk import as_json
from april.engines.pool import EnginePool
from april.integrations.adapter import RolloutAdapter
from april.integrations.generating_code import UNLIMITED, result_of
from april.integrations.openrlhf.agents import AgentExecutor, request_output
from april.integrations.openrlhf.settings import check_settings, params_of
from april.integrations.openrlhf.vllm_actor import replicas
from april.integrations.prompts import DataloaderRows
from april.integrations.settings import Settings
from april.integrations.state_format import check_format, with_format
from april.integrations.stop_tokens import stop_tokens
from april.rollout.batch import RolloutBatch
from april.rollout.engine import Engine
from april.rollout.event_loop import EventLoop
from april.rollout.sampling import FinishReason, SamplingParams
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.reward import Reward
from april.rollout.trajectory.sample import Sample

FORMAT = 2

T = TypeVar("T")


class ExecutorResponse:
    """A finished response, in place of the vLLM engine that OpenRLHF's executor calls."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._returned = False

    async def generate(self, prompt_token_ids: Sequence[int], sampling_params: Any, **_: Any) -> Any:
        """Return the response to the sample's own prompt, once.

        Raises:
            RuntimeError: this is the second request, or its prompt is not the sample's.
        """
        if self._returned:
            raise RuntimeError("the executor asks for another turn: april generates one turn a sample")
        self._returned = True
        sample = self._sample
        if tuple(prompt_token_ids) != tuple(sample.prompt_ids):
            raise RuntimeError("the executor made another prompt than the first time: it must make the same one")
        reason = "length" if sample.finish is FinishReason.LENGTH else "stop"
        return request_output(sample.response_ids, sample.logprobs.tolist(), reason)


def rows_of(batch: Any) -> Iterator[tuple[Any, ...]]:
    """Split a batch of OpenRLHF's dataloader into rows of prompt, label and images."""
    return zip(*batch[1:], strict=True)


class SamplesGenerator(samples_generator.SamplesGenerator):  # type: ignore[misc]
    """OpenRLHF's generator, with april's scheduler between its prompts and its engines."""

    def __init__(self, settings: Settings, generate_kwargs: Mapping[str, Any], **parts: Any) -> None:
        super().__init__(**parts)
        check_settings(self.args, settings)
        self.generate_kwargs = dict(generate_kwargs)
        self.updated = True
        """OpenRLHF has broadcast weights to the engines since the last rollout."""
        self._executor = SingleTurnAgentExecutor(getattr(self.args.reward, "remote_url", None))
        self._steps = 0
        """Number of training steps in this episode."""
        self._loop = EventLoop("april rollouts")
        self._agent: AgentExecutor | None = None
        self._loop.run(self._set_up(settings))

    async def _set_up(self, settings: Settings) -> None:
        self.rows = DataloaderRows(self.prompts_dataloader, rows_of, sets_epoch=False)
        engine = EnginePool(list[Engine](await replicas(self.vllm_engines)))
        if path := self.args.train.agent_func_path:
            stops = stop_tokens(self.tokenizer.name_or_path, self.tokenizer)
            self._agent = AgentExecutor(
                path, self.tokenizer, stops, self.generate_kwargs, engine.capacity.context_length
            )
        self.adapter = RolloutAdapter(
            engine,
            params_of(self.args, settings),
            extra=map(self._encode_row, self.rows),
            reward=self._score,
            sampling=self._sampling(self.generate_kwargs),
            dynamic_filter=self._keep if self.args.algo.dynamic_filtering_enable else None,
            seed=self.args.train.seed,
            overlap=self.args.train.async_enable,
            episodes=None if self._agent is None else self._agent.code.episodes,
        )
        self.latest: RolloutBatch | None = None
        """The batch returned last."""

    def _sampling(self, kwargs: Mapping[str, Any]) -> SamplingParams:
        drawn = SamplingParams(
            max_tokens=kwargs.get("max_new_tokens") or kwargs["max_len"],
            temperature=kwargs.get("temperature", 1.0),
            top_p=kwargs.get("top_p", 1.0),
            top_k=max(kwargs.get("top_k", -1), 0),
        )
        if self._agent is None:
            return drawn
        stops = self._agent.stop_token_ids
        return replace(drawn, max_tokens=kwargs["max_len"], max_turns=UNLIMITED, stop_token_ids=stops)

    def _encode_row(self, row: tuple[Any, ...]) -> Prompt:
        prompt, label, images = row
        if images is not None:
            raise ValueError("a prompt has images: april's integration passes on no images")
        return self._encode(prompt, label, self.generate_kwargs)

    def _encode(self, prompt: str, label: Any, kwargs: Mapping[str, Any]) -> Prompt:
        """Tokenize a prompt as OpenRLHF's executor does; a prompt that leaves no room for a response is shortened."""
        if self._agent is not None:
            return self._agent.prompt(prompt, label, kwargs)
        ids = self.tokenizer(text=prompt, add_special_tokens=False)["input_ids"]
        room = self.generate_kwargs["max_len"] - (self.generate_kwargs.get("max_new_tokens") or 1)
        return Prompt(tuple(ids[-room:]), metadata={"prompt": prompt, "label": label})

    async def _respond(self, prompt: Prompt, sample: Sample) -> dict[str, Any]:
        """Run OpenRLHF's executor with a finished sample, and return its response, which includes the reward."""
        kwargs = self.generate_kwargs
        params = SimpleNamespace(max_tokens=kwargs.get("max_new_tokens"), logprobs=1)
        response: dict[str, Any] = await self._executor.execute(
            prompt=prompt.metadata["prompt"],
            label=prompt.metadata["label"],
            sampling_params=params,
            max_length=kwargs["max_len"],
            hf_tokenizer=self.tokenizer,
            llm_engine=ExecutorResponse(sample),
        )
        assert response["observation_tokens"] == [*sample.prompt_ids, *sample.response_ids]
        return response

    async def _score(self, prompt: Prompt, sample: Sample) -> Reward:
        if self._agent is not None:
            return await self._score_agent(prompt, sample)
        response = await self._respond(prompt, sample)
        outcome = {name: response[name] for name in ("reward", "scores", "extra_logs")}
        if self._executor.reward_endpoints and outcome["reward"] is None:
            raise RuntimeError("OpenRLHF's executor got no reward; its log contains the reason")
        # The info is saved with the buffer, so tensors are reduced to JSON types here.
        info = json.loads(as_json(outcome))
        return Reward(float(_scalar(info["reward"]) or 0.0), info)

    async def _score_agent(self, prompt: Prompt, sample: Sample) -> Reward:
        """Return the reward that the agent executor has given."""
        response = result_of(sample)
        return Reward(float(_scalar(response.get("reward")) or 0.0), {"scores": response.get("scores")})

    def _keep(self, group: Group) -> bool:
        """Apply OpenRLHF's filter: a range of a group's mean score, for groups whose samples all have a score."""
        scores = [_scalar(sample.reward_info["scores"]) for sample in group.outcomes]
        if None in scores:
            return True
        low, high = self.args.algo.dynamic_filtering_range
        return bool(low < sum(scores) / len(scores) < high)

    def _experiences(self, groups: Sequence[Group], kwargs: Mapping[str, Any]) -> list[Any]:
        """Convert groups to OpenRLHF's experiences, as OpenRLHF converts the responses of its engines."""
        return [
            self._process_response_into_experience(self._response(group.prompt, sample), **kwargs)
            for group in groups
            for sample in group.outcomes
        ]

    def _response(self, prompt: Prompt, sample: Sample) -> dict[str, Any]:
        """Return a sample as the response of OpenRLHF's executor."""
        begins = len(sample.prompt_ids)
        response = {
            "observation_tokens": [*sample.prompt_ids, *sample.response_ids],
            "action_ranges": [(begins, begins + sample.length)],
            "rollout_log_probs": [0.0] * begins + sample.logprobs.tolist(),
            "truncated": sample.finish is FinishReason.LENGTH,
            **(sample.reward_info if self._agent is None else result_of(sample)),
        }
        return {
            **response,
            "prompt": prompt.metadata["prompt"],
            "label": prompt.metadata["label"],
            "images": None,
            "mm_train_inputs": None,
            "reward": _scalar(response.get("reward")),
            "scores": _scalar(response.get("scores")),
            "extra_logs": {name: _scalar(value) for name, value in (response.get("extra_logs") or {}).items()},
        }

    def _call_engines(self, method: str) -> None:
        if self.args.vllm.enable_sleep:
            vllm_engine.batch_vllm_engine_call(self.vllm_engines, method)

    def generate_samples(self, **generate_kwargs: Any) -> tuple[list[Any], float | None, int, bool]:
        """Return a step's samples, the percentage of groups that the filter kept, the number of prompts drawn, and
        whether the episode is over."""
        before = self.rows.drawn
        self._call_engines("wake_up")
        try:
            batch = self._loop.run(self._next_batch())
        finally:
            self._call_engines("sleep")
        self.latest = batch
        self._steps += 1
        # Rows are drawn ahead of training, so an episode is measured in steps, not in rows.
        over = self._steps >= max(1, len(self.prompts_dataloader) // self.args.rollout.batch_size)
        if over:
            self._steps = 0
        kept = 100 * len(batch.groups) / (len(batch.groups) + len(batch.rejections))
        share = kept if self.args.algo.dynamic_filtering_enable else None
        return self._experiences(batch.groups, generate_kwargs), share, self.rows.drawn - before, over

    async def _next_batch(self) -> RolloutBatch:
        await self._follow_weights()
        return await self._watched(self.adapter.next_batch())

    async def _watched(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, unless the agent executor fails."""
        return await (work if self._agent is None else self._agent.code.watch(work))

    def update_weights(self, broadcast: Callable[[], None]) -> None:
        """Let OpenRLHF broadcast weights to the engines, which run nothing until it has ended."""
        paused = AsyncExitStack()
        self._loop.run(paused.enter_async_context(self.adapter.scheduler.pause()))
        try:
            broadcast()
            self.updated = True
            if self.args.train.async_enable:
                # The version first: tokens drawn after the pause are of the new weights.
                self._loop.run(self._follow_weights())
        finally:
            self._loop.run(paused.aclose())

    async def _follow_weights(self) -> None:
        if self.updated:
            await self.adapter.follow_weights()
            self.updated = False

    def _generate_vllm(
        self, dataloader_iter: Any, num_prompts: int, dynamic_filtering: bool, **generate_kwargs: Any
    ) -> tuple[list[Any], int, bool]:
        """Generate complete groups of exactly the next prompts, for evaluation."""
        prompts, labels, _, over = samples_generator._collect_prompt_batch(dataloader_iter, num_prompts)
        count = generate_kwargs.get("n_samples_per_prompt", self.args.rollout.n_samples_per_prompt)
        encoded = [self._encode(prompt, label, generate_kwargs) for prompt, label in zip(prompts, labels, strict=True)]
        groups = self._loop.run(self._evaluate(encoded, count, self._sampling(generate_kwargs)))
        return self._experiences(groups, generate_kwargs), len(encoded), over

    async def _evaluate(self, prompts: Sequence[Prompt], count: int, sampling: SamplingParams) -> list[Group]:
        await self._follow_weights()
        groups = await self._watched(self.adapter.evaluate(prompts, count, sampling))
        for group in groups:
            for sample in group.outcomes:
                reward = await self._score(group.prompt, sample)
                sample.reward, sample.reward_info = reward.value, reward.info
        return groups

    def state_dict(self) -> str:
        """Return the buffer as text, for OpenRLHF's checkpoint."""
        return as_json(with_format(FORMAT, steps=self._steps, **self._loop.run(self._state())))

    async def _state(self) -> dict[str, Any]:
        async with self.adapter.scheduler.pause():
            return self.adapter.state_dict()

    def load_state_dict(self, saved: str) -> None:
        state = check_format(json.loads(saved), FORMAT, "OpenRLHF's checkpoint")
        self.rows.reopen()
        self.adapter.load_state_dict(state)
        self._steps, self.updated = state["steps"], True


def _scalar(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value
