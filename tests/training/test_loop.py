"""The loop over given parts: it knows no model, and its event loop stays free while a learner works."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from april import EngineError, Prompt, RolloutBatch, RolloutScheduler, SamplingParams
from april.config.recipe import Recipe
from april.reporting.run_log import RunLog
from april.rollout.journal.journal import Journal
from april.rollout.params import RolloutParams
from april.rollout.trajectory.reward import Reward
from april.tasks.task import Problem
from april.training.checkpoint import checkpoints
from april.training.held_out_evaluation import HeldOutEvaluation
from april.training.run_state import RunState
from april.training.stop import StopSignals
from april.training.task_reward import TaskRewards
from april.training.trainer import Trainer
from april.training.training_thread import TrainingThread
from tests import tiny
from tests.limits import HANG
from tests.scripted_engine import ScriptedEngine


class Scorer:
    scope, correct_at = "sample", None

    def __call__(self, problem: Problem, responses: list[str], lengths: object = None) -> list[Reward]:
        return [Reward(1.0) for _ in responses]


class Prompts(Iterator[Prompt]):
    def __next__(self) -> Prompt:
        return Prompt((1, 2), "a prompt", {"prompt": "a"})


class Unmoved:
    """A learner without a model, that is done with nothing before the event loop has come by."""

    context_length, stop_token_ids, served = None, (), None

    def __init__(self, scheduler: RolloutScheduler, loop: asyncio.AbstractEventLoop) -> None:
        self.scheduler, self.loop = scheduler, loop
        self.done: list[str] = []
        self.collecting = threading.Event()
        self.threads: set[int] = set()

    def _work(self, what: str) -> None:
        came_by = threading.Event()
        self.loop.call_soon_threadsafe(came_by.set)
        assert came_by.wait(60), f"the event loop waits for {what}"
        assert not self.scheduler.in_flight or what == "save"
        self.done.append(what)
        self.threads.add(threading.get_ident())

    def train(self, step: RolloutBatch, number: int) -> dict[str, float]:
        self._work(f"train {number}")
        return {"loss": 0.0, "grad_norm": 0.0}

    def interrupt(self) -> None:
        raise AssertionError("nobody gives up")

    def weights(self, version: int) -> Any:
        self._work(f"weights {version}")

    def save(self, directory: Path) -> None:
        """In the middle of a run not done before the next step is being collected."""
        if self.done[-1] == "weights 2":
            assert self.collecting.wait(60), "nothing is collected while a checkpoint is written"
        self._work("save")

    def load(self, directory: Path) -> None:
        raise AssertionError("nothing is resumed")


@asynccontextmanager
async def trainer_over(tmp_path: Path, prompts: Sequence[Prompt] = (), overlap: bool = False) -> AsyncIterator[Trainer]:
    """A run of three steps over a scripted engine, that saves after the second."""
    recipe = Recipe()
    recipe.reporting.output = str(tmp_path)
    recipe.training.steps, recipe.training.save_interval, recipe.training.eval_interval = 3, 2, 1
    recipe.rollout.reward_workers = 0
    async with AsyncExitStack() as stack:
        journal = Journal(tmp_path / "journal", 0)
        stack.callback(journal.close)
        rewards = await stack.enter_async_context(TaskRewards(Scorer(), tiny.tokenizer(), recipe.rollout))
        params, sampling = RolloutParams(rollout_batch_size=2), SamplingParams(max_tokens=20)
        scheduler = RolloutScheduler(
            ScriptedEngine(), Prompts(), rewards, params, sampling=sampling, journal=journal, overlap=overlap
        )
        await stack.enter_async_context(scheduler)
        learner = Unmoved(scheduler, asyncio.get_running_loop())
        log = stack.enter_context(RunLog(tmp_path, recipe.to_dict()))
        yield Trainer(
            settings=recipe.training,
            learner=learner,
            scheduler=scheduler,
            evaluation=HeldOutEvaluation(scheduler, rewards, prompts, 1, sampling),
            state=RunState(tmp_path / "checkpoints", 1, recipe.redacted(), learner, scheduler, journal, log),
            log=log,
            worker=await stack.enter_async_context(TrainingThread()),
            signals=stack.enter_context(StopSignals()),
        )


@pytest.mark.parametrize("stop_after", [None, 1])
async def test_a_learner_without_a_model_is_trained(tmp_path: Path, stop_after: int | None) -> None:
    async with trainer_over(tmp_path) as trainer:
        learner, scheduler, signals = trainer.learner, trainer.scheduler, trainer.signals
        assert isinstance(learner, Unmoved)
        next_batch = scheduler.next_batch

        async def collecting(last: bool = False) -> RolloutBatch:
            if learner.done[-1] == "weights 2":
                learner.collecting.set()
            return await next_batch(last)

        scheduler.next_batch = collecting  # type: ignore[method-assign]
        if stop_after:
            train = learner.train

            def stopping(step: RolloutBatch, number: int) -> dict[str, float]:
                learner.loop.call_soon_threadsafe(signals.requested.set)
                return train(step, number)

            learner.train = stopping  # type: ignore[method-assign]
        summary = await trainer.run()
    steps = stop_after or 3
    assert (summary is None) == bool(stop_after)
    trained = [word for n in range(1, steps + 1) for word in (f"train {n}", f"weights {n}")]
    expected = ["weights 0", *(trained if stop_after else [*trained[:4], "save", *trained[4:]]), "save"]
    assert learner.done == expected
    assert len(learner.threads) == 1
    assert threading.get_ident() not in learner.threads
    assert checkpoints(tmp_path / "checkpoints")[-1].name == f"step-{steps:06d}"


HELD_OUT = [Prompt((7, i), f"held out {i}", {"prompt": "a"}) for i in range(2)]


async def test_an_evaluation_runs_during_rollouts_and_training_and_ends_before_the_weights_change(
    tmp_path: Path,
) -> None:
    async with trainer_over(tmp_path, HELD_OUT, overlap=True) as trainer:
        learner, loop = trainer.learner, asyncio.get_running_loop()
        training = {number: asyncio.Event() for number in (1, 2)}

        def train(step: RolloutBatch, number: int) -> dict[str, float]:
            if number in training:
                loop.call_soon_threadsafe(training[number].set)
            return {"loss": 0.0, "grad_norm": 0.0}

        learner.train, learner.weights = train, lambda version: None  # type: ignore[method-assign]
        learner.save = lambda directory: None  # type: ignore[method-assign]
        evaluate = trainer.scheduler.evaluate

        async def beside(*arguments: Any) -> Any:
            if (step := trainer.log.steps + 1) in training:  # the next evaluation is saved before anything is trained
                await training[step].wait()
            return await evaluate(*arguments)

        trainer.scheduler.evaluate = beside  # type: ignore[method-assign]
        await trainer.run()
        assert [one["step"] for one in trainer.log.evaluations] == [0, 1, 2, 3]


async def test_failed_rollouts_cancel_the_evaluation_and_their_state_is_saved(tmp_path: Path) -> None:
    async with trainer_over(tmp_path, HELD_OUT, overlap=True) as trainer:
        learner, begun = trainer.learner, asyncio.Event()
        learner.weights, learner.save = lambda version: None, lambda directory: None  # type: ignore[method-assign]

        async def endless(*_: Any) -> Any:
            begun.set()
            await asyncio.get_running_loop().create_future()

        async def failing(last: bool = False) -> RolloutBatch:
            await begun.wait()
            raise EngineError("the engine is gone")

        trainer.scheduler.evaluate, trainer.scheduler.next_batch = endless, failing  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="the engine is gone"):
            await trainer.run()
    assert [path.name for path in checkpoints(tmp_path / "checkpoints")] == ["step-000000"]


@pytest.mark.parametrize("overlap", [False, True])
async def test_a_stop_cancels_an_evaluation_and_the_resumed_run_repeats_it(tmp_path: Path, overlap: bool) -> None:
    async with trainer_over(tmp_path, HELD_OUT, overlap=overlap) as trainer:
        learner, signals, evaluate = trainer.learner, trainer.signals, trainer.scheduler.evaluate
        learner.train = lambda step, number: {"loss": 0.0, "grad_norm": 0.0}  # type: ignore[method-assign]
        learner.weights, learner.save = lambda version: None, lambda directory: None  # type: ignore[method-assign]

        async def endless(*_: Any) -> Any:
            signals.stop(signal.SIGTERM)
            await asyncio.get_running_loop().create_future()

        trainer.scheduler.evaluate = endless  # type: ignore[method-assign]
        assert await asyncio.wait_for(trainer.run(), HANG) is None
        assert trainer.log.evaluations == []
        assert [path.name for path in checkpoints(tmp_path / "checkpoints")] == ["step-000000"]
        assert (tmp_path / "report.html").exists()
        signals.requested.clear()
        trainer.scheduler.evaluate = evaluate  # type: ignore[method-assign]
        assert await asyncio.wait_for(trainer.run(), HANG) is not None
        assert [one["step"] for one in trainer.log.evaluations] == [0, 1, 2, 3]


async def test_sigusr1_saves_within_a_step_and_the_run_continues(tmp_path: Path) -> None:
    async with trainer_over(tmp_path) as trainer:
        learner, next_batch, asked = trainer.learner, trainer.scheduler.next_batch, 0
        learner.train = lambda step, number: {"loss": 0.0, "grad_norm": 0.0}  # type: ignore[method-assign]
        learner.weights, learner.save = lambda version: None, lambda directory: None  # type: ignore[method-assign]

        async def slow(last: bool = False) -> RolloutBatch:
            nonlocal asked
            asked += 1
            if asked == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
                await asyncio.get_running_loop().create_future()
            if asked == 2:
                assert checkpoints(tmp_path / "checkpoints")[-1].name == "step-000000"
            return await next_batch(last)

        trainer.scheduler.next_batch = slow  # type: ignore[method-assign]
        assert await asyncio.wait_for(trainer.run(), HANG) is not None
    assert asked == 4
