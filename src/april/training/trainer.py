"""The training loop: collect, train, hand the weights over; evaluate and save in between.

Invariants:
- each step has one optimizer phase, one weight update and one policy version, in this order; a stop never separates
  them;
- training and saving run in a thread, so the event loop is never blocked; unless generation overlaps with training, no
  sample is in flight while parameters change, so an engine that shares the parameters never reads them half updated;
- a checkpoint is of one moment without samples in flight; it is written while the next step is collected and before the
  next training, so it needs no copy of the parameters;
- a run that stops or dies at any moment and is resumed trains on the same groups as an uninterrupted run;
- no group is trained on twice, and no sampled token is lost: it is in the checkpoint, or in the journal after it;
- an evaluation measures the policy of the last step, and is logged before anything newer is logged or saved.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from april.config.settings.training_settings import TrainingSettings
from april.reporting.progress import Progress
from april.reporting.run_log import RunLog
from april.rollout.batch import RolloutBatch
from april.rollout.journal.journal_file import JournalError
from april.rollout.scheduler import RolloutScheduler
from april.training.checkpoint import CheckpointError
from april.training.engine_stats import EngineStats, bytes_of
from april.training.held_out_evaluation import HeldOutEvaluation
from april.training.learner import Learner
from april.training.memory_metrics import memory_metrics
from april.training.run_state import RunState
from april.training.shared_devices import TRAINING, SharedDevices
from april.training.stop import StopSignals
from april.training.training_thread import TrainingThread
from april.training.utilisation import Utilisation

T = TypeVar("T")


@dataclass(slots=True)
class HandedOver:
    """Weights that the engine was given."""

    bytes: int | None = None
    """Bytes transferred per engine; None if unknown."""
    waited: float = 0.0
    """Seconds that the update waited for an evaluation."""


@dataclass(kw_only=True, eq=False)
class Trainer:
    """One run. `build.open_trainer` constructs its parts from a recipe.

    Args:
        settings: number of steps, and intervals of evaluations and checkpoints.
        learner: trains the policy.
        scheduler: collects rollouts from its engine.
        evaluation: measures the policy on held-out problems.
        state: saves the run.
        log: records the run. A resumed run continues after the steps in its log.
        worker: thread for training and saving.
        signals: requests of the user to stop or to save.
        progress: display of the run's phase; None for no display.
        clock: monotonic clock in seconds.
        releases_cache: free the engine's KV cache before training, because the engine shares the trainer's device and
            recomputes the cache of unfinished samples after each update anyway.
        shared: turns of engine and trainer on the same devices; None if each has its own.
        utilisation: computes MFU; None if the GPUs' peak is not known.
    """

    settings: TrainingSettings
    learner: Learner
    scheduler: RolloutScheduler
    evaluation: HeldOutEvaluation
    state: RunState
    log: RunLog
    worker: TrainingThread
    signals: StopSignals
    progress: Progress | None = None
    clock: Callable[[], float] = time.perf_counter
    releases_cache: bool = False
    shared: SharedDevices | None = None
    utilisation: Utilisation | None = None
    _fleet: EngineStats = field(init=False)
    _evaluating: asyncio.Task[None] | None = field(default=None, init=False)
    """The evaluation that runs. With overlap it runs during training, until the next weight update."""
    _saving: asyncio.Task[None] | None = field(default=None, init=False)
    """The checkpoint that is being written."""

    def __post_init__(self) -> None:
        self._fleet = EngineStats(self.scheduler.engine)
        if self.progress:
            self.progress.engines(self._fleet.members)

    async def run(self) -> dict[str, Any] | None:
        """Train to the last step and return the run's summary; None if the run was stopped earlier.

        SIGINT, SIGTERM and SIGHUP stop the run and save it: during a rollout or an evaluation at the next token, during
        training after the step. SIGUSR1 saves the run without stopping it. A second SIGINT aborts the run, except that
        a checkpoint that has begun is finished. An evaluation that a stop has interrupted runs after the resumption.
        """
        try:
            summary = await self._run()
            if summary is None:
                self.log.report()
            return summary
        except Exception:
            self.log.report()
            raise
        finally:
            await self._cancel_evaluation()
            if self._saving is not None:
                await asyncio.wait((self._saving,))
                self._saving.exception()  # mark it as retrieved: the error that ended the run is reported

    async def _run(self) -> dict[str, Any] | None:
        settings, log = self.settings, self.log
        await self._start()
        if self._evaluation_due():
            await self._evaluate()
        while log.steps < settings.steps:
            step = await self._collect()
            if step is None:
                await self._save()
                await self._saved()
                # Without a request to stop this was SIGUSR1: save, then collect again.
                if self.signals.requested.is_set():
                    return None
                continue
            await self._train_step(step)
            if self._evaluation_due():
                await self._evaluate()
            if self._due(settings.save_interval):
                await self._save()
        await self._evaluated()
        await self._saved()
        # A stop has interrupted the last evaluation: the resumed run repeats it before the summary.
        return None if self._evaluation_due() else log.finish()

    async def _start(self) -> None:
        """Bring the engine to the trained weights: it may have been started with older ones."""
        version = self.scheduler.engine_version

        async def update() -> None:
            await self.scheduler.update_weights(await self._in_thread(self.learner.weights, version), version=version)

        await (self.shared.begin(update) if self.shared else update())

    async def _collect(self) -> RolloutBatch | None:
        """Return the next rollout step; None if the run is to stop or to be saved, with every sampled token kept."""
        signals = self.signals
        if signals.requested.is_set():
            return None
        self._phase("rollout")
        last = self.log.steps + 1 == self.settings.steps
        collecting = asyncio.create_task(self.scheduler.next_batch(last))
        await self._wait_for_any(collecting, signals.requested, signals.saving)
        signals.saving.clear()
        # A batch that is complete is trained on even if a stop is requested: its groups have left the buffer.
        if not collecting.done():
            collecting.cancel()
            await asyncio.wait((collecting,))
        if collecting.cancelled():
            return None
        if collecting.exception() is not None:
            await self._cancel_evaluation()
            with suppress(JournalError, CheckpointError):  # the journal has everything that could be written anyway
                await self._save()
                await self._saved()
        return collecting.result()

    async def _train_step(self, step: RolloutBatch) -> None:
        """Train on a step and update the engine's weights. Both are one step of the run: a stop waits for both."""
        await self._saved()
        self._phase("training")
        if self.releases_cache:
            engine = self.scheduler.engine
            engine.forget()
            await (
                engine.interrupt()
            )  # nothing runs: this waits until engines in other processes have freed their caches
        began = self.clock()
        if self.shared:
            await self.shared.take()
        began_training = self.clock()
        with self.shared.phase(TRAINING) if self.shared else nullcontext():
            learned = await self._in_thread(
                self.learner.train, step, self.log.steps + 1, interrupt=self.learner.interrupt
            )
        offered = self.clock()
        handed = await self._update_engine(step.version + 1)
        measured: dict[str, Any] = {
            **learned,
            "train_seconds": self.clock() - began - handed.waited,
            "update_seconds": self.clock() - offered - handed.waited,
            "update_bytes": handed.bytes,
            **(self.shared.metrics() if self.shared else {}),
            **self._rollout_metrics(),
            **self._fleet.metrics(),
        }
        measured |= memory_metrics(step, self.scheduler.engine)
        if self.utilisation:
            measured |= self.utilisation.of(step, offered - began_training)
        turn = self.shared.take_phases() if self.shared else ()
        self.log.step(step, measured, self.scheduler.engine.capacity.slots, turn)

    async def _update_engine(self, version: int) -> HandedOver:
        """Update the engine to `version`."""
        handed = HandedOver()

        async def update() -> None:
            weights = await self._in_thread(self.learner.weights, version)
            # An evaluation that overlaps with training measures the engine's present weights: it ends before the
            # update.
            began = self.clock()
            await self._evaluated()
            handed.waited = self.clock() - began
            await self.scheduler.update_weights(weights, version=version)
            handed.bytes = bytes_of(weights)

        if self.shared:
            await self.shared.give_back(update)
            self.scheduler.count_update(self.shared.exchange_seconds)
        else:
            await update()
        return handed

    async def _wait_for_any(self, task: asyncio.Task[Any], *events: asyncio.Event) -> None:
        """Wait until the task is done or one of the events is set; cancel the task if the caller is cancelled."""
        waiting = [asyncio.create_task(event.wait()) for event in events]
        try:
            await asyncio.wait((task, *waiting), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait((task,))
            raise
        finally:
            for each in waiting:
                each.cancel()

    def _rollout_metrics(self) -> dict[str, Any]:
        """Metrics of all rollouts so far."""
        buffer = self.scheduler.buffer
        return {
            "epoch": getattr(self.scheduler.prompts, "epoch", 0),
            "response_length_expected": self.scheduler.state.lengths.mean,
            "generated_tokens": buffer.sampled_tokens,
            "discarded_tokens": buffer.discarded_tokens,
            "rejected_tokens": sum(tally.tokens for tally in buffer.rejected.values()),
            "records_skipped": getattr(self.scheduler.prompts, "skipped", 0),
            "responses_unjudged": self.evaluation.rewards.take_unjudged(),
        }

    async def _evaluate(self) -> None:
        """Start an evaluation. Without overlap, wait until it is logged; with overlap, `_evaluated` waits for it."""
        if self.evaluation.prompts:
            self._evaluating = asyncio.create_task(self._measure(), name="evaluation")
            if not self.scheduler.overlap:
                await self._evaluated()

    async def _measure(self) -> None:
        began = self.clock()
        found, groups = await self.evaluation.run()
        self.log.evaluation({**found, "eval_seconds": self.clock() - began}, groups)

    async def _evaluated(self) -> None:
        """Wait until the evaluation that runs is logged, or the run is to stop; raise the error that ended it."""
        if self._evaluating is not None:
            self._phase("evaluating")
            await self._wait_for_any(self._evaluating, self.signals.requested)
            if not self._evaluating.done():
                await self._cancel_evaluation()
                return
            evaluating, self._evaluating = self._evaluating, None
            evaluating.result()

    async def _cancel_evaluation(self) -> None:
        """Cancel the evaluation that runs, after a failure or a stop."""
        evaluating, self._evaluating = self._evaluating, None
        if evaluating is not None:
            evaluating.cancel()
            await asyncio.wait((evaluating,))

    async def _save(self) -> None:
        """Start a checkpoint of this moment; `_saved` waits until it is written."""
        await self._evaluated()
        await self._saved()
        self._phase("saving")
        async with self.scheduler.pause():
            captured = self.state.capture()
        self._saving = asyncio.create_task(self._write(captured))

    async def _write(self, captured: dict[str, Any]) -> None:
        await self.worker.run(self.state.write, captured)
        self.state.prune()
        await self.worker.run(self.state.prune_images)

    async def _saved(self) -> None:
        """Wait until the checkpoint that is being written is on disk.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._saving is not None:
            self._phase("saving")
            with self.signals.held():
                await asyncio.wait((self._saving,))
            saving, self._saving = self._saving, None
            saving.result()

    async def _in_thread(self, work: Callable[..., T], *args: object, interrupt: Callable[[], None] | None = None) -> T:
        """Run `work` in the worker's thread; without overlap, assert that no sample is in flight before or after it."""
        overlap = self.scheduler.overlap
        assert overlap or not self.scheduler.in_flight, "samples are in flight while the policy is trained"
        done = await self.worker.run(work, *args, interrupt=interrupt)
        assert overlap or not self.scheduler.in_flight, "samples were submitted while the policy was trained"
        return done

    def _evaluation_due(self) -> bool:
        """Whether an evaluation of the latest step's policy is due and not done."""
        steps = self.log.steps
        due = steps == 0 or self._due(self.settings.eval_interval)
        return due and bool(self.evaluation.prompts) and all(found["step"] != steps for found in self.log.evaluations)

    def _due(self, interval: int) -> bool:
        """Whether an action of every `interval` steps, and after the last step, is due."""
        steps = self.log.steps
        return steps == self.settings.steps or (interval > 0 and steps % interval == 0)

    def _phase(self, name: str) -> None:
        if self.progress:
            self.progress.phase(name)
