"""TRL's `AsyncGRPOTrainer` with active partial rollouts: generation goes on beside training (`RolloutScheduler.take`).

A batch is what the trainer takes between two weight syncs. TRL's data loader reads into batch k + 1 before it has
trained on batch k, so a batch is taken one sync ahead; generation goes on for those behind it, and is interrupted for
the sync alone. The scheduler's bound counts from the sync at which a batch is trained on, so it is TRL's own, and
nothing is ever dropped for it.

Of several processes (DDP, FSDP2), process 0 alone generates or drives servers, as with TRL's own worker: TRL deals its
rows out, and gathers weights for it. Adapters come merged into the weights, by TRL.

Invariants:
- weights change only while nothing is in flight, and no batch is being taken;
- batches handed over and not trained on are as many as steps that the scheduler counts as in training;
- every group that the scheduler hands over is put on the trainer's queue once, whole, its rows one after the other;
- a worker that has failed is reported by `check_health`, with its cause.
"""

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
from transformers import AutoTokenizer

from april.config.recipe import Recipe
from april.config.settings import ModelSettings
from april.integrations.ranks import Job, last_words
from april.integrations.requirement import require
from april.integrations.trl import check_arguments, check_rows, how_to_go_on
from april.integrations.trl_episodes import TRLEpisodes
from april.integrations.trl_rollouts import (
    Checkpoint,
    PartialRollouts,
    ShuffledRows,
    encoder,
    partial_rollouts_of,
    read_state,
    sampling_of,
)
from april.rollout.event_loop import EventLoop
from april.rollout.scheduler import RolloutScheduler
from april.rollout.trajectory import Group, Prompt, Reward, Sample
from april.training.engines import engine_of
from april.training.policy import load_policy, stop_tokens
from april.training.weights import transfer_of

require("trl", "1.16", extra="trl")

from trl.chat_template_utils import get_training_chat_template, is_chat_template_prefix_preserving  # noqa: E402
from trl.experimental.async_grpo import async_grpo_trainer  # noqa: E402
from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig  # noqa: E402
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample  # noqa: E402

AHEAD = 2
"""Batches handed over and not trained on: the one the trainer works on, and the next."""

NO_TRANSFER: Any = object()
"""What processes other than 0 give TRL, which then asks no vLLM server, in any of them, whether it takes adapters."""


class AsyncGRPOTrainer(async_grpo_trainer.AsyncGRPOTrainer):
    """TRL's asynchronous trainer; what it takes but `rollout_worker`, `weight_transfer` and `environment_factory`.

    Args:
        tools: as TRL's own; they are called in this process, and need not be picklable.
        partial_rollouts: how rollouts are generated; the staleness bound is the config's `max_staleness`. The embedded
            engine generates from a copy of the model of its own.

    Raises:
        ValueError: a setting of TRL's does not go with partial rollouts; the message names it and the remedy.
    """

    def __init__(
        self,
        model: str,
        reward_funcs: Any,
        args: Any = None,
        train_dataset: Any = None,
        processing_class: Any = None,
        *,
        tools: Sequence[Callable[..., Any]] | None = None,
        partial_rollouts: PartialRollouts | None = None,
        **more: Any,
    ) -> None:
        settings = partial_rollouts_of(partial_rollouts)
        args = args or AsyncGRPOConfig(f"{Path(model).name}-AsyncGRPO")
        check_arguments(args)
        if args.deepspeed_plugin is not None:
            raise ValueError(
                "DEEPSPEED: TRL's AsyncGRPOTrainer gathers weights of DDP and FSDP2 only; choose one of them, or "
                "april's GRPOTrainer"
            )
        if more.get("environment_factory") is not None:
            raise ValueError(
                "environment_factory: april's AsyncGRPOTrainer asks no environment for its reward; use tools, april's "
                "GRPOTrainer, or TRL's own"
            )
        adapter = more.get("peft_config")
        if adapter is not None and adapter.peft_type != "LORA":
            raise ValueError(f"peft_config: {adapter.peft_type.value} was not run with april; only LoRA is supported")
        if args.token_budget is not None and args.token_budget > 0:
            raise ValueError(
                f"token_budget = {args.token_budget}: april counts the samples of an update, which a token budget "
                "changes from one to the next; leave it out"
            )
        args.token_budget = 0
        functions = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        tokenizer = processing_class or AutoTokenizer.from_pretrained(model, trust_remote_code=args.trust_remote_code)
        check_rows(train_dataset)
        self.job = Job()
        worker = None
        if self.job.leads:
            worker = AsyncRollouts(model, functions, args, train_dataset, tokenizer, settings, tools or ())
        try:
            super().__init__(
                model,
                reward_funcs,
                args,
                train_dataset,
                tokenizer,
                rollout_worker=worker,
                weight_transfer=worker or NO_TRANSFER,
                **more,
            )
        except BaseException:
            if worker is not None:
                worker.stop()
            raise
        self.rollouts = worker
        if worker is not None:
            self.add_callback(Checkpoint(worker))

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As TRL's; a checkpoint brings back what waited when it was written.

        Raises:
            SystemExit: another process of the job has ended; the first to see it says how to go on.
        """
        with last_words(self.job, lambda what: how_to_go_on(Path(str(self.args.output_dir)), what)):
            if self.rollouts is not None:
                state = read_state(resume_from_checkpoint, self.args.output_dir)
                if state is not None:
                    self.rollouts.load_state_dict(state)
            return super().train(resume_from_checkpoint, *args, **kwargs)


class AsyncRollouts:
    """TRL's rollout worker and its weight transfer in one: `RolloutWorkerProtocol` and `WeightTransferProtocol`."""

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
            raise ValueError("max_staleness = 0: a batch is taken one sync ahead of training here; set it to 1 or more")
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
                raise ValueError('on_update = "redraft": what tools answer cannot become a draft; leave it out')
            self.episodes = TRLEpisodes(_asked(tools, args, dataset, tokenizer, stops), True)
        directory = Path(args.output_dir)
        self._transfer = transfer_of(recipe, self.model, tokenizer, directory)
        self._batches: deque[list[Group]] = deque()
        """Handed over and not trained on: a checkpoint must not lose them."""
        self._synced = False
        self._offset = 1
        """TRL's version of the weights minus the scheduler's."""
        self._turn = asyncio.Condition()
        self._producer: asyncio.Task[None] | None = None
        self._progress = time.monotonic()
        self._loop: EventLoop | None = EventLoop("april rollouts")
        self._stack = AsyncExitStack()
        try:
            self.engine = self._run(self._stack.enter_async_context(engine_of(recipe, self.model, directory)))
            encode = encoder(tokenizer, None, args.chat_template_kwargs or {})
            sampling, episodes = sampling_of(args, stops), None
            if self.episodes is not None:
                encode, episodes = self.episodes.encode, self.episodes.episodes(self.engine.capacity.context_length)
                sampling = replace(sampling, max_turns=self.episodes.most_calls + 1, observations_count=True)
            self.scheduler = RolloutScheduler(
                self.engine,
                ShuffledRows(dataset, encode, args.seed),
                self._score,
                settings.params(batch_size, args.num_generations, args.max_staleness),
                sampling=sampling,
                episodes=episodes,
                reward_scope="group",
                seed=args.seed,
                on_progress=self._beat,
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
        """Begin to generate. TRL calls it after the first weight sync."""
        self._run(self._start())

    async def _start(self) -> None:
        self._progress = time.monotonic()
        self._producer = asyncio.create_task(self._produce(), name="produce rollouts")

    async def _produce(self) -> None:
        while True:
            async with self._turn:
                await self._turn.wait_for(lambda: len(self._batches) < AHEAD)
                self._progress = time.monotonic()
                step = await self.scheduler.take()
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
        """A group as TRL trains on it, with GRPO's advantages as TRL's own worker computes them."""
        rewards = np.array([sample.reward for sample in group.samples], dtype=float)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
        calls = [_calls(sample) for sample in group.samples]
        for sample, advantage, (made, failed) in zip(group.samples, advantages, calls, strict=True):
            assert group.first_version is not None
            prompt = len(sample.prompt_ids)
            said = {f"rewards/{name}": value for name, value in sample.reward_info.items()}
            if any(count for count, _ in calls):
                said |= {"tools/call_frequency": float(made), "tools/failure_frequency": failed / max(made, 1)}
            yield RolloutSample(
                prompt=_messages(group.prompt.metadata["prompt"]),
                completion=_messages(self._completion(group.prompt, sample), role="assistant"),
                input_ids=np.array([*sample.prompt_ids, *sample.response_ids], dtype=np.int64),
                completion_mask=np.concatenate([np.zeros(prompt, dtype=np.int64), sample.loss_mask.astype(np.int64)]),
                old_log_probs=np.concatenate([np.zeros(prompt, dtype=np.float32), sample.logprobs]),
                advantage=float(advantage),
                model_version=group.first_version + self._offset,
                group_id=group.id,
                metrics={"reward": float(sample.reward or 0.0), "reward_std": float(rewards.std()), **said},
                enqueued_at=time.time(),
            )

    def _completion(self, prompt: Prompt, sample: Sample) -> Any:
        if self.episodes is not None:
            return self.episodes.conversation(sample)
        text = self.tokenizer.decode(sample.response_ids, skip_special_tokens=True)
        conversation = not isinstance(prompt.metadata["prompt"], str)
        return [{"role": "assistant", "content": text}] if conversation else text

    async def _score(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        """The sum of the reward functions for each sample, and what each gave; one that returns None does not count."""
        row = prompt.metadata
        given: dict[str, Any] = {name: [value] * len(samples) for name, value in row.items()}
        given["completions"] = [self._completion(prompt, sample) for sample in samples]
        given["completion_ids"] = [
            [id for id, own in zip(sample.response_ids, sample.loss_mask, strict=True) if own] for sample in samples
        ]
        given["prompts"] = given.pop("prompt")
        columns = await asyncio.gather(*(_call(function, given) for function in self.reward_funcs))
        names = [getattr(function, "__name__", type(function).__name__) for function in self.reward_funcs]
        said = [dict(zip(names, rewards, strict=True)) for rewards in zip(*columns, strict=True)]
        counted = [{name: float(value) for name, value in each.items() if value is not None} for each in said]
        return [Reward(sum(each.values()), each) for each in counted]

    def stop(self) -> None:
        """Stop generating, and the engine with it. TRL calls it when training ends."""
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
        """TRL's number for the weights that the engine has now."""
        self._offset = model_version - self.scheduler.version

    def check_health(self, stale_after_s: float) -> None:
        """Raise what stopped the rollouts, or if nothing was sampled for so many seconds."""
        producer = self._producer
        if producer is not None and producer.done() and not producer.cancelled():
            error = producer.exception()
            raise RuntimeError(f"the rollouts have stopped: {error}") from error
        silent = time.monotonic() - self._progress
        if silent > stale_after_s and len(self._batches) < AHEAD:
            raise RuntimeError(f"nothing was sampled for {silent:.0f} s (heartbeat_stale_after_s = {stale_after_s:g})")

    def init_weight_transfer(self) -> None:
        """Nothing to set up: weights are taken over in `send_weights`."""

    def pause(self) -> None:
        """Nothing to pause: `send_weights` waits for its turn."""

    def resume(self) -> None: ...

    def destroy(self) -> None: ...

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Take over the trainer's weights: a new policy version, but for the first time."""
        self._run(self._take_over(iterator))

    async def _take_over(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        async with self._turn, self.scheduler.paused():  # the embedded engine generates with `self.model`
            self._transfer.withdraw()
            own = dict(self.model.named_parameters())
            with torch.no_grad():
                for name, tensor in weights:
                    own[name].copy_(tensor)
            version = self.scheduler.version
            if self._synced:
                if self._batches:
                    self._batches.popleft()
                await self.scheduler.update_weights(self._transfer.offer(version + 1))
            else:
                await self.scheduler.load_weights(self._transfer.offer(version))
                self._synced = True
            self._turn.notify_all()

    def state_dict(self) -> dict[str, Any]:
        """The buffer, and the batches that were handed over and not trained on."""
        state: dict[str, Any] = self._run(self._state())
        return state

    async def _state(self) -> dict[str, Any]:
        async with self._turn, self.scheduler.paused():
            batches = [[group.to_dict() for group in batch] for batch in self._batches]
            return {"rollout": self.scheduler.state_dict(), "batches": batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`, before `start`."""
        self.scheduler.load_state_dict(state["rollout"])
        self._offset = 1 - self.scheduler.version
        for batch in state["batches"]:
            self._hand_over([Group.from_dict(saved) for saved in batch])


def _asked(tools: Sequence[Callable[..., Any]], args: Any, dataset: Any, tokenizer: Any, stops: Sequence[int]) -> Any:
    """What april's episodes ask a trainer of TRL's for, as its asynchronous one has it."""
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


def _calls(sample: Sample) -> tuple[int, int]:
    """Of tools, and how many of them failed."""
    steps = [transition.info for transition in sample.transitions]
    return sum(len(info.get("messages", ())) for info in steps), sum(info.get("failures", 0) for info in steps)


def _messages(text: Any, role: str = "user") -> list[dict[str, str]]:
    return [{"role": role, "content": text}] if isinstance(text, str) else text


async def _call(function: Any, given: Mapping[str, Any]) -> Sequence[float | None]:
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        value: Sequence[float | None] = await function(**given)
        return value
    return await asyncio.to_thread(function, **given)
