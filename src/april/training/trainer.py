"""The training loop: collect, train, hand the weights over; evaluate and save in between.

Invariants:
- one optimizer phase, one weight update and one policy version per step, in that order, never torn apart by a stop;
- a run that stops or dies at any moment and is resumed trains on the same groups as one that did not;
- nothing is trained on twice, and nothing sampled is lost: it is in the checkpoint, or in the journal that goes on
  from there.
"""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from april.algorithms.dapo import informative_groups
from april.config.error import ConfigError
from april.config.recipe import Recipe
from april.reporting.progress import Progress
from april.reporting.run_log import RunLog
from april.rollout.disk import write_whole
from april.rollout.journal import Journal, JournalError
from april.rollout.scheduler import RolloutScheduler
from april.rollout.step import Step
from april.rollout.trajectory import Group, Prompt
from april.tasks.build import build_task
from april.tasks.prompts import PromptStream
from april.tasks.task import Task, encode
from april.training.checkpoint import CheckpointError, checkpoints, load_mark, load_state, save_checkpoint
from april.training.local import LocalLearner
from april.training.output import locked
from april.training.policy import load_policy
from april.training.resume import JOURNAL, RECIPE, newest_checkpoint
from april.training.serving import engine_of
from april.training.task_reward import Rewards


class Trainer:
    """One run of a recipe, from the policy it names to a trained one.

    Args:
        recipe: a checked recipe.
        resume: go on with the run in the recipe's directory, from its newest checkpoint and its journal.
        progress: shows the run while it goes on; nothing is shown if None.
    """

    def __init__(self, recipe: Recipe, resume: bool = False, progress: Progress | None = None) -> None:
        self.recipe = recipe
        self.resume = resume
        self.directory = Path(recipe.reporting.output)
        self.progress = progress
        self._stop = asyncio.Event()
        self._clock = time.perf_counter

    async def run(self) -> dict[str, Any] | None:
        """Train to the last step and return the run's summary; None if the run was stopped before.

        SIGINT and SIGTERM stop the run at the next token, and save it; a second SIGINT gives up at once.
        """
        recipe = self.recipe
        if recipe.training.threads:
            torch.set_num_threads(recipe.training.threads)
        torch.manual_seed(recipe.training.seed)
        try:
            task = build_task(recipe.task)
        except ValueError as error:
            raise ConfigError(f"task.{error}") from None
        checkpoint = newest_checkpoint(self.directory) if self.resume else None
        model, self.tokenizer = load_policy(recipe.model, None if recipe.lora.rank else checkpoint)
        self.learner = LocalLearner(model, recipe, self.tokenizer, self.directory)
        prompts = self._prompts(task)
        held_out = self._held_out(task, prompts.max_prompt_length)
        state = load_state(checkpoint) if checkpoint else None
        async with AsyncExitStack() as stack:
            stack.enter_context(locked(self.directory))
            self.journal = stack.enter_context(
                closing(Journal(self.directory / JOURNAL, recipe.training.journal_delay))
            )
            self.rewards = await stack.enter_async_context(Rewards(task.scorer, self.tokenizer, recipe.rollout))
            self.engine = await stack.enter_async_context(
                engine_of(recipe, self.learner.served, self.directory, self._phase)
            )
            self.scheduler = await stack.enter_async_context(self._scheduler(prompts))
            if checkpoint is not None and state is not None:
                self.learner.load(checkpoint)
                self.scheduler.load_state_dict(state["rollout"])
            version = self.scheduler.version
            await self.engine.update_weights(version, self.learner.weights(version))
            config = recipe.to_dict()
            write_whole(self.directory / RECIPE, json.dumps(config, indent=2))  # from here on there is a run to resume
            self.log = stack.enter_context(
                RunLog(
                    self.directory,
                    config,
                    recipe.reporting.trackers,
                    recipe.reporting.project,
                    self.resume,
                    state["log"] if state else None,
                    self.progress,
                    self._clock,
                    self.tokenizer.decode,
                    recipe.reporting.show_completions,
                )
            )
            stack.enter_context(self._stopping_on_signals())
            return await self._train(held_out)

    def _prompts(self, task: Task) -> PromptStream:
        recipe = self.recipe
        settings = (self.tokenizer, recipe.training.seed, recipe.task.chat_template, self._prompt_limit())
        try:
            next(PromptStream(task, *settings))
        except ValueError as error:
            raise ConfigError(f"task: no prompt to train on: {error}") from None
        return PromptStream(task, *settings)

    def _prompt_limit(self) -> int | None:
        """Tokens a prompt may have: what the context has room for beside a full response, or less by the recipe."""
        rollout, engine = self.recipe.rollout, self.recipe.engine
        context = engine.context_length or self.learner.context_length
        if context is None:
            return rollout.max_prompt_length
        room = context - rollout.max_response_length
        if room < 1:
            raise ConfigError(
                f"rollout.max_response_length = {rollout.max_response_length} leaves no room for a prompt in a context "
                f"of {context} tokens: lower it, or raise engine.context_length if the model allows"
            )
        return min(rollout.max_prompt_length or room, room)

    def _held_out(self, task: Task, limit: int | None) -> list[Prompt]:
        template = self.recipe.task.chat_template
        prompts = [encode(task.problem(i, "eval"), self.tokenizer, template) for i in range(task.eval_size)]
        for prompt in prompts:
            if limit is not None and len(prompt.token_ids) > limit:
                raise ConfigError(
                    f"task: held-out problem {prompt.id!r} has a prompt of {len(prompt.token_ids)} tokens, and {limit} "
                    "is the limit: raise engine.context_length or rollout.max_prompt_length, lower "
                    "rollout.max_response_length, or leave the problem out"
                )
        return prompts

    def _scheduler(self, prompts: PromptStream) -> RolloutScheduler:
        rollout, chosen = self.recipe.rollout, self.learner.objective.algorithm
        dynamic = chosen.dynamic_sampling if rollout.dynamic_sampling is None else rollout.dynamic_sampling
        return RolloutScheduler(
            self.engine,
            prompts,
            self.rewards,
            self.recipe.rollout_params(),
            sampling=self.recipe.sampling(self.learner.stop_token_ids),
            faults=self.recipe.fault_policy(),
            reward_scope=self.rewards.scope,
            dynamic_filter=carries_signal if dynamic else None,
            seed=self.recipe.training.seed,
            on_progress=self._show_rollout if self.progress else None,
            journal=self.journal,
        )

    async def _train(self, held_out: Sequence[Prompt]) -> dict[str, Any] | None:
        settings, log = self.recipe.training, self.log
        if log.steps == 0 and not log.evaluations:
            await self._evaluate(held_out)
        while log.steps < settings.steps:
            try:
                step = await self._collect()
            except Exception:
                with suppress(JournalError, CheckpointError):  # the journal has everything that could be written
                    self._save()
                raise
            if step is None:
                self._save()
                return None
            learned = await self._learn(step)
            log.step(step, {**learned, **self._rollout_metrics()}, self.engine.capacity.slots)
            last = log.steps == settings.steps
            if last or (settings.eval_interval and log.steps % settings.eval_interval == 0):
                await self._evaluate(held_out)
            if last or (settings.save_interval and log.steps % settings.save_interval == 0):
                self._save()
        return log.finish()

    async def _collect(self) -> Step | None:
        """The next rollout step, or None if the run is to stop; what was sampled until then is kept."""
        if self._stop.is_set():
            return None
        self._phase("rollout")
        collecting, stopping = asyncio.create_task(self.scheduler.collect()), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((collecting, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            if not collecting.done():
                collecting.cancel()
                await asyncio.wait((collecting,))
        return None if collecting.cancelled() else collecting.result()

    async def _learn(self, step: Step) -> dict[str, Any]:
        """Train on a step and hand the weights over: together one step of the run, not to be torn apart."""
        self._phase("training")
        began = self._clock()
        learned = self.learner.train(step, self.log.steps + 1)
        await self.scheduler.update_weights(self.learner.weights(step.version + 1))
        return {**learned, "train_seconds": self._clock() - began}

    def _rollout_metrics(self) -> dict[str, Any]:
        """What is known of the rollouts so far beside the step itself."""
        buffer = self.scheduler.buffer
        return {
            "epoch": getattr(self.scheduler.prompts, "epoch", 0),
            "response_length_expected": self.scheduler.lengths.mean,
            "generated_tokens": buffer.sampled_tokens,
            "discarded_tokens": buffer.discarded_tokens,
            "rejected_tokens": sum(tally.tokens for tally in buffer.rejected.values()),
        }

    async def _evaluate(self, held_out: Sequence[Prompt]) -> None:
        """Reward on held-out problems, and accuracy: the share of samples with full reward (1 or more)."""
        if not held_out:
            return
        self._phase("evaluating")
        began, settings = self._clock(), self.recipe.training
        sampling = self.scheduler.sampling
        if settings.eval_temperature is not None:
            sampling = replace(sampling, temperature=settings.eval_temperature)
        groups = await self.scheduler.evaluate(held_out, settings.eval_samples, sampling)
        rewards = np.array(await self.rewards.score_groups(groups))
        for group, scores in zip(groups, rewards, strict=True):
            for sample, reward in zip(group.samples, scores, strict=True):
                sample.reward = float(reward)
        self.log.evaluation(
            {
                "eval_reward": float(rewards.mean()),
                "accuracy": float((rewards >= 1).mean()),
                "eval_seconds": self._clock() - began,
            },
            groups,
        )

    def _save(self) -> Path:
        self._phase("saving")
        # A run resumed from here finds no KV cache; dropping it keeps the run that goes on equal to it.
        self.engine.forget()
        directory, keep = self.directory / "checkpoints", self.recipe.training.keep_checkpoints
        with self._holding_off_signals():
            state = {
                "rollout": self.scheduler.state_dict(),
                "log": self.log.state_dict(),
                "recipe": self.recipe.to_dict(),
            }
            self.log.sync()
            path = save_checkpoint(directory, self.log.steps, self.learner.save, state, keep)
            if oldest := load_mark(checkpoints(directory)[0]):
                self.journal.prune(oldest["position"])
        return path

    def _phase(self, name: str) -> None:
        if self.progress:
            self.progress.phase(name)

    def _show_rollout(self, scheduler: RolloutScheduler) -> None:
        assert self.progress is not None
        self.progress.rollout(
            min(len(scheduler.ready), scheduler.params.rollout_batch_size),
            scheduler.params.rollout_batch_size,
            self.engine.running,
            self.engine.capacity.slots,
            scheduler.step_tokens,
        )

    @contextmanager
    def _stopping_on_signals(self) -> Iterator[None]:
        """A first SIGINT or SIGTERM stops the run in good order; the handlers go back to what they were."""
        loop = asyncio.get_running_loop()

        def stop() -> None:
            self._stop.set()
            loop.remove_signal_handler(signal.SIGINT)

        signals = (signal.SIGINT, signal.SIGTERM)
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        for number in signals:
            loop.add_signal_handler(number, stop)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    @contextmanager
    def _holding_off_signals(self) -> Iterator[None]:
        """A checkpoint is finished once it is begun: a further SIGINT, which nobody handles any more, is let pass."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, lambda *_: None)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def carries_signal(group: Group) -> bool:
    """Whether dynamic sampling keeps a group."""
    rewards = torch.tensor([[sample.reward for sample in group.samples]], dtype=torch.float64)
    return bool(informative_groups(rewards))
