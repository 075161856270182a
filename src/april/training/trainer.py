"""The training loop: collect, train, hand the weights over; evaluate and save in between.

Invariants:
- one optimizer phase, one weight update and one policy version per step, in that order, never torn apart by a stop;
- training and saving run in a thread of their own and the event loop goes on; unless generation overlaps with training,
  nothing is in flight while parameters change, so an engine that shares them computes nothing with them meanwhile;
- what is saved is of one moment, in which nothing was in flight; it is written while the next step is collected, and
  before anything is trained on, so nothing has to be copied for it;
- a run that stops or dies at any moment and is resumed trains on the same groups as one that did not;
- nothing is trained on twice, and nothing sampled is lost: it is in the checkpoint, or in the journal that goes on
  from there;
- an evaluation is of the policy that the last step made, and is logged before anything newer is logged or saved.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from april.config.settings import TrainingSettings
from april.reporting.progress import Progress
from april.reporting.run_log import RunLog
from april.rollout.batch import RolloutBatch
from april.rollout.journal_file import JournalError
from april.rollout.scheduler import RolloutScheduler
from april.training.checkpoint import CheckpointError
from april.training.engine_stats import EngineStats, bytes_of
from april.training.held_out_evaluation import HeldOutEvaluation
from april.training.learner import Learner
from april.training.memory_metrics import memory_metrics
from april.training.run_state import RunState
from april.training.stop import StopSignals
from april.training.training_thread import TrainingThread
from april.training.utilisation import Utilisation

T = TypeVar("T")


@dataclass(kw_only=True, eq=False)
class Trainer:
    """One run, over parts that `build.open_trainer` makes of a recipe, or that are somebody's own.

    Args:
        settings: how many steps, and when to evaluate and to save.
        learner: trains the policy.
        scheduler: collects what it is trained on, from its engine.
        evaluation: what is measured on held-out problems.
        state: saves the run.
        log: records it. A run that is resumed goes on from its steps.
        worker: where training and saving happen.
        signals: how a user stops the run.
        progress: shows what the run is doing; nothing does if None.
        clock: seconds that only ever grow.
        releases_cache: the engine gives up its KV cache before training: it shares the trainer's device, and computes
            the cache of unfinished samples anew after each update.
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
    utilisation: Utilisation | None = None
    _fleet: EngineStats = field(init=False)
    _evaluating: asyncio.Task[None] | None = field(default=None, init=False)
    """Where generation overlaps with training, so does an evaluation, until the next update of the weights."""
    _saving: asyncio.Task[None] | None = field(default=None, init=False)
    """Writes the newest checkpoint, until that is whole."""

    def __post_init__(self) -> None:
        self._fleet = EngineStats(self.scheduler.engine)
        if self.progress:
            self.progress.engines(self._fleet.members)

    async def run(self) -> dict[str, Any] | None:
        """Train to the last step and return the run's summary; None if the run was stopped before.

        SIGINT, SIGTERM and SIGHUP stop the run at the next token, of an evaluation too, or after the training step that
        has begun, and save it; SIGUSR1 saves it and goes on. A second SIGINT gives up. A checkpoint that has begun is
        finished in any case. An evaluation that a stop has cut short is done when the run is resumed.
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
            await self._give_up_evaluation()
            if self._saving is not None:
                await asyncio.wait((self._saving,))
                self._saving.exception()  # seen: what ended the run is what is said

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
                if self.signals.requested.is_set():
                    return None
                continue
            await self._learn(step)
            if self._evaluation_due():
                await self._evaluate()
            if self._due(settings.save_interval):
                await self._save()
        await self._evaluated()
        await self._saved()
        return None if self._evaluation_due() else log.finish()

    async def _start(self) -> None:
        """Bring the engine to the weights that are trained, whatever it was started with."""
        version = self.scheduler.engine_version
        await self.scheduler.update_weights(await self._undisturbed(self.learner.weights, version), version=version)

    async def _collect(self) -> RolloutBatch | None:
        """The next rollout step, or None if the run is to stop or to be saved; what was sampled until then is kept."""
        signals = self.signals
        if signals.requested.is_set():
            return None
        self._phase("rollout")
        last = self.log.steps + 1 == self.settings.steps
        collecting = asyncio.create_task(self.scheduler.next_batch(last))
        await self._done_or(collecting, signals.requested, signals.saving)
        signals.saving.clear()
        if not collecting.done():
            collecting.cancel()
            await asyncio.wait((collecting,))
        if collecting.cancelled():
            return None
        if collecting.exception() is not None:
            await self._give_up_evaluation()
            with suppress(JournalError, CheckpointError):  # the journal has everything that could be written
                await self._save()
                await self._saved()
        return collecting.result()

    async def _learn(self, step: RolloutBatch) -> None:
        """Train on a step and hand the weights over: together one step of the run, not to be torn apart."""
        await self._saved()
        self._phase("training")
        if self.releases_cache:
            engine = self.scheduler.engine
            engine.forget()
            await engine.interrupt()  # nothing runs; engines in other processes have forgotten when it returns
        began_training = began = self.clock()
        learned = await self._undisturbed(
            self.learner.train, step, self.log.steps + 1, interrupt=self.learner.interrupt
        )
        offered = self.clock()
        weights = await self._undisturbed(self.learner.weights, step.version + 1)
        trained = self.clock() - began
        updated = self.clock() - offered
        await self._evaluated()
        began = self.clock()
        await self.scheduler.update_weights(weights)
        swapped = self.clock() - began
        measured: dict[str, Any] = {
            **learned,
            "train_seconds": trained + swapped,
            "update_seconds": updated + swapped,
            "update_bytes": bytes_of(weights),
            **self._rollout_metrics(),
            **self._fleet.metrics(),
        }
        measured |= memory_metrics(step, self.scheduler.engine)
        if self.utilisation:
            measured |= self.utilisation.of(step, offered - began_training)
        self.log.step(step, measured, self.scheduler.engine.capacity.slots)

    async def _done_or(self, task: asyncio.Task[Any], *events: asyncio.Event) -> None:
        """Wait until the task is done, or one of the events is set; the task ends with a caller that is cancelled."""
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
        """What is known of the rollouts so far beside the step itself."""
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
        """Begin an evaluation; `_evaluated` says when it is logged. It stands alone unless generation overlaps."""
        if self.evaluation.prompts:
            self._evaluating = asyncio.create_task(self._measure(), name="evaluation")
            if not self.scheduler.overlap:
                await self._evaluated()

    async def _measure(self) -> None:
        began = self.clock()
        found, groups = await self.evaluation.run()
        self.log.evaluation({**found, "eval_seconds": self.clock() - began}, groups)

    async def _evaluated(self) -> None:
        """Wait until the evaluation that was begun is logged, or the run is to stop; raises what ended it."""
        if self._evaluating is not None:
            self._phase("evaluating")
            await self._done_or(self._evaluating, self.signals.requested)
            if not self._evaluating.done():
                await self._give_up_evaluation()
                return
            evaluating, self._evaluating = self._evaluating, None
            evaluating.result()

    async def _give_up_evaluation(self) -> None:
        """Something has failed, or the run stops: an evaluation that was begun is not waited for."""
        evaluating, self._evaluating = self._evaluating, None
        if evaluating is not None:
            evaluating.cancel()
            await asyncio.wait((evaluating,))

    async def _save(self) -> None:
        """Begin a checkpoint of this moment; `_saved` says when it is whole."""
        await self._evaluated()
        await self._saved()
        self._phase("saving")
        async with self.scheduler.pause():
            captured = self.state.capture()
        self._saving = asyncio.create_task(self._write(captured))

    async def _write(self, captured: dict[str, Any]) -> None:
        await self.worker.run(self.state.write, captured)
        self.state.prune()

    async def _saved(self) -> None:
        """Wait until the checkpoint that was begun is on disk.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._saving is not None:
            self._phase("saving")
            with self.signals.held():
                await asyncio.wait((self._saving,))
            saving, self._saving = self._saving, None
            saving.result()

    async def _undisturbed(
        self, work: Callable[..., T], *args: object, interrupt: Callable[[], None] | None = None
    ) -> T:
        """`work` in the worker's thread; nothing is in flight until it is done, unless generation overlaps with it."""
        overlap = self.scheduler.overlap
        assert overlap or not self.scheduler.in_flight, "samples are in flight while the policy is trained"
        done = await self.worker.run(work, *args, interrupt=interrupt)
        assert overlap or not self.scheduler.in_flight, "samples were submitted while the policy was trained"
        return done

    def _evaluation_due(self) -> bool:
        """Whether the policy of the latest step is to be evaluated, and has not been."""
        steps = self.log.steps
        due = steps == 0 or self._due(self.settings.eval_interval)
        return due and bool(self.evaluation.prompts) and all(found["step"] != steps for found in self.log.evaluations)

    def _due(self, interval: int) -> bool:
        """Whether something that is done every `interval` steps, and after the last one, is to be done now."""
        steps = self.log.steps
        return steps == self.settings.steps or (interval > 0 and steps % interval == 0)

    def _phase(self, name: str) -> None:
        if self.progress:
            self.progress.phase(name)
