"""Rollout worker and weight transfer of TRL's asynchronous trainer. `async_grpo.py` states the invariants."""

from __future__ import annotations

import asyncio
import inspect
import queue
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from trl.chat_template_utils import get_training_chat_template, is_chat_template_prefix_preserving
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from april.config.recipe import Recipe
from april.config.settings.model_settings import ModelSettings
from april.integrations.trl.episodes import TRLEpisodes
from april.integrations.trl.prompts import dataset_prompts, encoder
from april.integrations.trl.settings import PartialRollouts, sampling_of
from april.rollout.event_loop import EventLoop
from april.rollout.scheduler import RolloutScheduler
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.reward import Reward
from april.rollout.trajectory.sample import Sample
from april.training.engine_builder import open_engine
from april.training.policy import load_policy, stop_tokens
from april.training.weight_transfer import model_transfer

AHEAD = 2
"""Maximum number of batches handed over and not trained on: the trainer's present batch, and the next."""


class RolloutWorker:
    """TRL's rollout worker and weight transfer in one: `RolloutWorkerProtocol` and `WeightTransferProtocol`."""

    def __init__(
        self,
        model: str,
        reward_funcs: Sequence[Any],
        args: Any,
        dataset: Any,
        tokenizer: Any,
        settings: PartialRollouts,
        tools: Sequence[Callable[..., Any]] = (),
    ) -> None:
        samples = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.weight_sync_steps
        samples *= args.world_size
        if samples % args.num_generations:
            raise ValueError(
                f"num_generations = {args.num_generations}: must divide the {samples} samples that are trained on "
                "between two weight syncs"
            )
        if args.max_staleness < 1:
            raise ValueError(
                "max_staleness = 0: batches are taken one weight sync ahead of training; set it to 1 or more"
            )
        self.rollout_buffer: Any = queue.Queue()
        self.metrics_queue: Any = queue.Queue()
        self.tokenizer = tokenizer
        self.reward_funcs = reward_funcs
        batch_size = samples // args.num_generations
        dtype: Any = args.dtype if args.dtype == "bfloat16" else "float32"
        recipe = Recipe(model=ModelSettings(path=model, dtype=dtype, compute_dtype=dtype), engine=settings)
        self.model, _ = load_policy(recipe.model)
        stops = stop_tokens(self.model, tokenizer)
        self.episodes: TRLEpisodes | None = None
        if tools:
            if settings.on_update == "redraft":
                raise ValueError('on_update = "redraft": results of tools cannot be drafts; leave it out')
            self.episodes = TRLEpisodes(_trainer_view(tools, args, dataset, tokenizer, stops), True)
        directory = Path(args.output_dir)
        self._transfer = model_transfer(settings, self.model, tokenizer, directory)
        self._batches: deque[list[Group]] = deque()
        """Batches handed over and not trained on, which are part of a checkpoint."""
        self._synced = False
        self._offset = 1
        """TRL's number of the weights minus the scheduler's policy version."""
        self._changed = asyncio.Condition()
        self._producer: asyncio.Task[None] | None = None
        self._progress = time.monotonic()
        self._loop: EventLoop | None = EventLoop("april rollouts")
        self._stack = AsyncExitStack()
        try:
            self.engine = self._run(self._stack.enter_async_context(open_engine(recipe, self.model, directory)))
            encode = encoder(tokenizer, None, args.chat_template_kwargs or {})
            sampling, episodes = sampling_of(args, stops), None
            if self.episodes is not None:
                encode, episodes = self.episodes.encode, self.episodes.episodes(self.engine.capacity.context_length)
                sampling = replace(sampling, max_turns=self.episodes.most_calls + 1, observations_count=True)
            self.scheduler = RolloutScheduler(
                self.engine,
                dataset_prompts(dataset, encode, args.seed),
                self._score,
                settings.params(batch_size, args.num_generations, args.max_staleness),
                sampling=sampling,
                episodes=episodes,
                reward_scope="group",
                seed=args.seed,
                on_progress=self._beat,
                overlap=True,
            )
            self._run(self._stack.enter_async_context(self.scheduler))
        except BaseException:
            self.stop()
            raise

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        assert self._loop is not None, "the rollouts were stopped"
        return self._loop.run(coroutine)

    def _beat(self, scheduler: RolloutScheduler) -> None:
        self._progress = time.monotonic()

    def start(self) -> None:
        """Start generating. TRL calls this after the first weight sync."""
        self._run(self._start())

    async def _start(self) -> None:
        self._progress = time.monotonic()
        self._producer = asyncio.create_task(self._produce(), name="produce rollouts")

    async def _produce(self) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: len(self._batches) < AHEAD)
                self._progress = time.monotonic()
                # Under the lock: a weight sync in the meantime would change how many batches count as in training.
                step = await self.scheduler.next_batch()
                self._hand_over(step.groups)
                if self.episodes is not None:
                    self.episodes.keep(set())
            self.metrics_queue.put({f"april/{name}": value for name, value in step.metrics().items()})

    def _hand_over(self, groups: list[Group]) -> None:
        self._batches.append(groups)
        for group in groups:
            for row in self._rows(group):
                self.rollout_buffer.put(row)

    def _rows(self, group: Group) -> Iterator[RolloutSample]:
        """Yield a group's samples as TRL's, with GRPO's advantages as TRL's own worker computes them."""
        rewards = np.array([sample.reward for sample in group.samples], dtype=float)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
        calls = [_tool_calls(sample) for sample in group.samples]
        for sample, advantage, (made, failed) in zip(group.samples, advantages, calls, strict=True):
            assert group.first_version is not None
            prompt = len(sample.prompt_ids)
            metrics = {f"rewards/{name}": value for name, value in sample.reward_info.items()}
            if any(count for count, _ in calls):
                metrics |= {"tools/call_frequency": float(made), "tools/failure_frequency": failed / max(made, 1)}
            yield RolloutSample(
                prompt=_messages(group.prompt.metadata["prompt"]),
                completion=_messages(self._completion(group.prompt, sample), role="assistant"),
                input_ids=np.array([*sample.prompt_ids, *sample.response_ids], dtype=np.int64),
                completion_mask=np.concatenate([np.zeros(prompt, dtype=np.int64), sample.loss_mask.astype(np.int64)]),
                old_log_probs=np.concatenate([np.zeros(prompt, dtype=np.float32), sample.logprobs]),
                advantage=float(advantage),
                model_version=group.first_version + self._offset,
                group_id=group.id,
                metrics={"reward": float(sample.reward or 0.0), "reward_std": float(rewards.std()), **metrics},
                enqueued_at=time.time(),
            )

    def _completion(self, prompt: Prompt, sample: Sample) -> Any:
        if self.episodes is not None:
            return self.episodes.conversation(sample)
        text = self.tokenizer.decode(sample.response_ids, skip_special_tokens=True)
        conversation = not isinstance(prompt.metadata["prompt"], str)
        return [{"role": "assistant", "content": text}] if conversation else text

    async def _score(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        """Return the sum of the reward functions for each sample, and their values. A value of None does not count."""
        row = prompt.metadata
        given: dict[str, Any] = {name: [value] * len(samples) for name, value in row.items()}
        given["completions"] = [self._completion(prompt, sample) for sample in samples]
        given["completion_ids"] = [
            [id for id, own in zip(sample.response_ids, sample.loss_mask, strict=True) if own] for sample in samples
        ]
        given["prompts"] = given.pop("prompt")
        columns = await asyncio.gather(*(_call(function, given) for function in self.reward_funcs))
        names = [getattr(function, "__name__", type(function).__name__) for function in self.reward_funcs]
        values = [dict(zip(names, rewards, strict=True)) for rewards in zip(*columns, strict=True)]
        counted = [{name: float(value) for name, value in each.items() if value is not None} for each in values]
        return [Reward(sum(each.values()), each) for each in counted]

    def stop(self) -> None:
        """Stop generating, and close the engine. TRL calls this when training ends."""
        if self._loop is not None:
            self._run(self._stop())
            self._loop.close()
            self._loop = None

    async def _stop(self) -> None:
        if self._producer is not None:
            self._producer.cancel()
            await asyncio.wait([self._producer])
        await self._stack.aclose()

    def update_model_version(self, model_version: int) -> None:
        """Set TRL's number of the engine's present weights."""
        self._offset = model_version - self.scheduler.engine_version

    def check_health(self, stale_after_s: float) -> None:
        """Check the worker.

        Args:
            stale_after_s: seconds without a sampled token after which the worker counts as hung.

        Raises:
            RuntimeError: generation has stopped or hangs; the cause is attached.
        """
        producer = self._producer
        if producer is not None and producer.done() and not producer.cancelled():
            error = producer.exception()
            raise RuntimeError(f"the rollouts have stopped: {error}") from error
        silent = time.monotonic() - self._progress
        # With enough batches handed over, the producer waits for the trainer and samples nothing.
        if silent > stale_after_s and len(self._batches) < AHEAD:
            raise RuntimeError(f"nothing was sampled for {silent:.0f} s (heartbeat_stale_after_s = {stale_after_s:g})")

    def init_weight_transfer(self) -> None:
        """Do nothing: `send_weights` copies the weights."""

    def pause(self) -> None:
        """Do nothing: `send_weights` pauses generation itself."""

    def resume(self) -> None: ...

    def destroy(self) -> None: ...

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Copy the trainer's weights: a new policy version, except for the first call."""
        self._run(self._copy_weights(iterator))

    async def _copy_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        async with self._changed, self.scheduler.pause():  # the embedded engine generates with `self.model`
            self._transfer.withdraw()
            own = dict(self.model.named_parameters())
            with torch.no_grad():
                for name, tensor in weights:
                    own[name].copy_(tensor)
            version = self.scheduler.engine_version
            if self._synced:
                # The trainer has trained on the oldest batch since the last sync.
                if self._batches:
                    self._batches.popleft()
                await self.scheduler.update_weights(self._transfer.offer(version + 1))
            else:
                await self.scheduler.update_weights(self._transfer.offer(version), version=version)
                self._synced = True
            self._changed.notify_all()

    def state_dict(self) -> dict[str, Any]:
        """Return the buffer, and the batches that were handed over and not trained on."""
        state: dict[str, Any] = self._run(self._state())
        return state

    async def _state(self) -> dict[str, Any]:
        async with self._changed, self.scheduler.pause():
            batches = [[group.to_dict() for group in batch] for batch in self._batches]
            return {"scheduler": self.scheduler.state_dict(), "batches": batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`. Call it before `start`."""
        self.scheduler.load_state_dict(state["scheduler"])
        self._offset = 1 - self.scheduler.engine_version
        for batch in state["batches"]:
            self._hand_over([Group.from_dict(saved) for saved in batch])


def _trainer_view(
    tools: Sequence[Callable[..., Any]], args: Any, dataset: Any, tokenizer: Any, stops: Sequence[int]
) -> Any:
    """Return the attributes of TRL's trainer that `TRLEpisodes` reads, for the asynchronous trainer."""
    exact, most = is_chat_template_prefix_preserving(tokenizer), args.max_tool_calling_iterations
    return SimpleNamespace(
        tools=list(tools),
        environment_factories=None,
        _multi_environment=False,
        _standalone_tools=tools,
        max_tool_calling_iterations=sys.maxsize if most is None else most,
        processing_class=tokenizer,
        chat_template=None if exact else get_training_chat_template(tokenizer),
        chat_template_kwargs=args.chat_template_kwargs or {},
        eos_token_ids=stops,
        train_dataset=dataset,
    )


def _tool_calls(sample: Sample) -> tuple[int, int]:
    """Return the number of tool calls of a sample, and of failed ones."""
    steps = [transition.info for transition in sample.transitions]
    return sum(len(info.get("messages", ())) for info in steps), sum(info.get("failures", 0) for info in steps)


def _messages(text: Any, role: str = "user") -> list[dict[str, str]]:
    return [{"role": role, "content": text}] if isinstance(text, str) else text


async def _call(function: Any, given: Mapping[str, Any]) -> Sequence[float | None]:
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        value: Sequence[float | None] = await function(**given)
        return value
    return await asyncio.to_thread(function, **given)
