"""Builder of a trainer and its parts."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from april.algorithms.catalogue import algorithm
from april.algorithms.dapo import informative_groups
from april.config.error import ConfigError
from april.config.recipe import Recipe
from april.engines.device_turns import SleepingEngine
from april.engines.start_gate import StartGate
from april.images.kept import KeptImages
from april.images.store import ImageStore, NoImages
from april.rendering.conversation import decoder
from april.reporting.progress import Progress
from april.reporting.run_log import RunLog
from april.rollout.engine import Engine
from april.rollout.episodes.episodes import Episodes
from april.rollout.gc_tuning import raise_gc_thresholds
from april.rollout.journal.journal import Journal
from april.rollout.scheduler import RolloutScheduler
from april.rollout.stop_strings import Decode
from april.rollout.trajectory.features import PromptImages
from april.rollout.trajectory.group import Group
from april.secrets import texts
from april.tasks.build import build_task, in_recipe
from april.tasks.prompts import PromptStream
from april.tasks.task import Task
from april.training.canary import Canary, canary_tokens, least_band
from april.training.context import prompt_limit, room_for_prompt
from april.training.device_map import device_map, device_rows
from april.training.distributed import open_distributed_learner
from april.training.distributed_learner import DistributedLearner
from april.training.engine_builder import open_engine
from april.training.environment_setup import EnvironmentSetup, prompt_encoder
from april.training.episode_reward import EpisodeRewards
from april.training.held_out_evaluation import HeldOutEvaluation
from april.training.learner import Learner
from april.training.learner_objective import build_objective, check_checkpoint_of
from april.training.learner_settings import LearnerSettings
from april.training.local import LocalLearner
from april.training.memory_check import check_memory, planned
from april.training.offload import Part
from april.training.offload_plan import parts_away
from april.training.policy import gpu_bytes, load_policy
from april.training.program_setup import ProgramSetup
from april.training.resume import JOURNAL, newest_checkpoint, note_beginning
from april.training.run_directory import lock_directory
from april.training.run_images import run_images
from april.training.run_prompts import RunPrompts
from april.training.run_state import RunState, load
from april.training.shared_devices import SharedDevices
from april.training.shared_layout import check_server_version, freed_memory, keeps_own_weights
from april.training.stop import StopSignals
from april.training.task_reward import TaskRewards
from april.training.trainer import Trainer
from april.training.training_thread import TrainingThread
from april.training.utilisation import build_utilisation

log = logging.getLogger(__name__)


async def train(
    recipe: Recipe,
    resume: bool = False,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.perf_counter,
    signals: StopSignals | None = None,
) -> dict[str, Any] | None:
    """Build the trainer of a recipe and run it; see `open_trainer` and `Trainer.run`."""
    async with open_trainer(recipe, resume, progress, clock, signals) as trainer:
        return await trainer.run()


@asynccontextmanager
async def open_trainer(
    recipe: Recipe,
    resume: bool = False,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.perf_counter,
    signals: StopSignals | None = None,
) -> AsyncIterator[Trainer]:
    """Open the trainer of a run and all its parts; they are closed after the block.

    Args:
        recipe: a checked recipe.
        resume: resume the run in the recipe's directory from its newest checkpoint and its journal.
        progress: display of the run's progress; None for no display.
        clock: monotonic clock in seconds.
        signals: requests of the user to stop or to save.

    Raises:
        ConfigError: the recipe does not match its model or its task.
        CheckpointError, JournalError: the run cannot be resumed.
    """
    directory, training, reporting = Path(recipe.reporting.output), recipe.training, recipe.reporting
    if training.threads:
        torch.set_num_threads(training.threads)
    torch.manual_seed(training.seed)
    raise_gc_thresholds(recipe.rollout.rollout_batch_size * recipe.rollout.n_samples_per_prompt)
    task = _task(recipe)
    checkpoint = newest_checkpoint(directory) if resume else None
    async with AsyncExitStack() as stack:
        # Before the model is loaded: loading takes long, and the plan needs only the model's configuration.
        size, plan = gpu_bytes(recipe.model), None
        if size is not None or recipe.shares_devices:
            plan = planned(recipe)
        if plan is not None:
            check_memory(recipe, plan, size)
        if recipe.shares_devices:
            check_server_version(recipe)
        images = run_images(recipe, checkpoint)
        store = images if isinstance(images, ImageStore) else None
        learner: Learner
        if recipe.trainer.sharded:
            learner, tokenizer = stack.enter_context(open_distributed_learner(recipe, directory, checkpoint, store))
        else:
            learner, tokenizer = _learner(recipe, directory, checkpoint, store)
        _warn_of_clipping(recipe)
        _warn_of_redacted_secrets(recipe)
        limit = prompt_limit(recipe.rollout, recipe.engine, learner.context_length)
        environment = build_environment(recipe, tokenizer, learner.stop_token_ids, images)
        starting = progress.phase if progress else log.info
        starting("checking prompts")
        # Prompts are checked before engines start: bad records end the run early, and engines take minutes.
        usable = build_prompts(recipe, task, tokenizer, environment, images)
        prompts, evaluated = usable.to_train_on(limit), usable.held_out(limit)
        # Locked before the journal is opened, so that the journal has one writer.
        stack.enter_context(lock_directory(directory))
        journal = stack.enter_context(closing(Journal(directory / JOURNAL, training.journal_flush_seconds)))
        rewards = _rewards(recipe, task, tokenizer)
        await stack.enter_async_context(rewards)
        # Engines on the trainer's devices start before the trainer's state is there, and after it was restored.
        gate = StartGate()
        restored = checkpoint if recipe.shares_devices else None
        if restored:
            learner.load(restored)
        devices, memory, moved = device_map(recipe), None, frozenset[Part]()
        if recipe.shares_devices:
            moved = parts_away(recipe, plan, size)
            learner.to_host(moved)
            memory = freed_memory(recipe, plan, devices, moved, learner)
            await memory.alone()
        keeps_weights = recipe.shares_devices and keeps_own_weights(recipe, learner.left_out, plan, size)
        tasks = device_rows(recipe, devices) if devices else []
        if progress and tasks:
            progress.note("; ".join(f"{gpu} {task}" for gpu, task in tasks))
        engine = await stack.enter_async_context(
            open_engine(
                recipe,
                learner.served,
                directory,
                starting,
                beside_trainer=True,
                gate=gate,
                keeps_weights=keeps_weights,
                images=store,
            )
        )
        if isinstance(learner, DistributedLearner):
            engine = stack.enter_context(learner.generating(engine))
        room = room_for_prompt(recipe.rollout.max_response_length, engine.capacity.context_length)
        if limit is None or room < limit:  # the engine's context is shorter than the model's
            prompts, evaluated = usable.to_train_on(room), usable.held_out(room)
        kept = None if environment is None else KeptImages(directory, images)
        episodes = await _episodes(stack, environment, engine.capacity.context_length, directory, kept)
        # Also without stop strings: groups of a resumed run may have some.
        decode = decoder(tokenizer)
        scheduler = _scheduler(recipe, learner, engine, prompts, rewards, journal, progress, episodes, decode)
        await stack.enter_async_context(scheduler)
        state = load(checkpoint, None if restored else learner, scheduler) if checkpoint else None
        run_log = RunLog(
            directory,
            recipe.redacted(),
            reporting.trackers,
            reporting.project,
            resume,
            state,
            progress,
            clock,
            tokenizer.decode,
            reporting.show_completions,
            devices=tasks,
        )
        stack.enter_context(run_log)
        # Only now: the recipe file marks the run as resumable, and a run that fails to start must not leave one.
        note_beginning(directory, recipe)
        worker = await stack.enter_async_context(TrainingThread())
        shared = None
        if memory is not None:
            assert isinstance(engine, SleepingEngine), "checked with the recipe"
            canary = None
            if recipe.engine.engine != "embedded":  # that engine computes in this process, with the trainer's tensors
                tokens = canary_tokens(min(len(tokenizer), tokenizer.vocab_size))
                least = least_band(getattr(torch, recipe.compute_dtype))
                canary = Canary(tokens, directory, resumed=state is not None, least=least)
            shared = SharedDevices(engine, learner, gate, memory, canary, worker.run, moved)
        temperature = training.eval_temperature
        sampling = scheduler.sampling if temperature is None else replace(scheduler.sampling, temperature=temperature)
        yield Trainer(
            settings=training,
            learner=learner,
            scheduler=scheduler,
            evaluation=HeldOutEvaluation(scheduler, rewards, evaluated, training.eval_samples, sampling, task.correct),
            state=RunState(
                directory / "checkpoints",
                training.keep_checkpoints,
                recipe.redacted(),
                learner,
                scheduler,
                journal,
                run_log,
                kept,
            ),
            log=run_log,
            worker=worker,
            shared=shared,
            signals=stack.enter_context(signals or StopSignals()),
            progress=progress,
            clock=clock,
            utilisation=build_utilisation(recipe.model, devices),
            releases_cache=recipe.generates_inside and not recipe.keeps_cache_in_training,
        )


async def _episodes(
    stack: AsyncExitStack,
    environment: EnvironmentSetup | ProgramSetup | None,
    context_length: int,
    directory: Path,
    kept: KeptImages | None,
) -> Episodes | None:
    """Open the episodes of the recipe's environment or program."""
    if environment is None or kept is None:
        return None
    if isinstance(environment, ProgramSetup):
        return await stack.enter_async_context(environment.episodes(context_length, directory, kept))
    return stack.enter_context(environment.episodes(context_length, kept))


def build_environment(
    recipe: Recipe, tokenizer: Any, stop_token_ids: tuple[int, ...], images: ImageStore | NoImages
) -> EnvironmentSetup | ProgramSetup | None:
    """Return the setup of the recipe's environment or program; None if a response is a single turn."""
    if not recipe.environment.enabled:
        return None
    if recipe.environment.is_program:
        return ProgramSetup(recipe, tokenizer, recipe.sampling(stop_token_ids).stop_token_ids, images)
    return EnvironmentSetup(
        recipe.environment,
        recipe.task,
        recipe.episode_limits(),
        tokenizer,
        recipe.sampling(stop_token_ids).stop_token_ids,
        images,
        recipe.rollout.stop,
        recipe.cluster.environments == "nodes",
    )


def build_prompts(
    recipe: Recipe,
    task: Task,
    tokenizer: Any,
    environment: EnvironmentSetup | ProgramSetup | None,
    images: PromptImages,
) -> RunPrompts:
    """Return the prompts of the recipe's task."""
    bad = recipe.task.bad_records
    return RunPrompts(
        task,
        prompt_encoder(recipe.task, tokenizer, environment, images),
        recipe.training.seed,
        bad,
        overlong=bad if recipe.rollout.max_prompt_length is None else "skip",
        eval_size_set=recipe.task.eval_size is not None,
    )


def carries_signal(group: Group) -> bool:
    """Whether dynamic sampling keeps a group: its rewards differ."""
    rewards = torch.tensor([[sample.reward for sample in group.outcomes]], dtype=torch.float64)
    return bool(informative_groups(rewards))


def _task(recipe: Recipe) -> Task:
    try:
        return build_task(recipe.task)
    except ValueError as error:
        raise ConfigError(in_recipe(error)) from None


def _learner(
    recipe: Recipe, directory: Path, checkpoint: Path | None, images: ImageStore | None
) -> tuple[Learner, Any]:
    """Return the learner and the policy's tokenizer."""
    settings = LearnerSettings.of(recipe)
    if checkpoint:
        check_checkpoint_of(settings, checkpoint)
    start = None if recipe.lora.rank else checkpoint  # adapters are added to the policy they were trained from
    model, tokenizer = load_policy(recipe.model, start)
    return LocalLearner(model, settings, tokenizer, directory, images), tokenizer


def _warn_of_clipping(recipe: Recipe) -> None:
    objective = build_objective(recipe.algorithm, recipe.rollout.max_response_length)
    if recipe.rollout.partial_rollout and objective.clips_older_policies:
        log.warning(
            "%s clips the ratio of a whole response to a range made for updates within one step (eps_low = %g); with "
            "correction = %r the ratio is against the policy that sampled it, and about 40 %% of the tokens of steps "
            'with older ones are clipped: set correction = "geometric", or eps_low = 0.03 and eps_high = 0.04',
            objective.algorithm.title,
            objective.algorithm.eps_low,
            objective.correction,
        )


def _warn_of_redacted_secrets(recipe: Recipe) -> None:
    given, kept = texts(recipe.to_dict(), ""), texts(recipe.redacted(), "")
    if hidden := dict.fromkeys(name for (name, value), (_, other) in zip(given, kept, strict=True) if value != other):
        log.warning(
            "%s: secrets are written nowhere, so april resume will ask for them: put them into environment "
            'variables, and write "${NAME}" in their place',
            ", ".join(hidden),
        )


def _rewards(recipe: Recipe, task: Task, tokenizer: Any) -> TaskRewards | EpisodeRewards:
    own = recipe.environment

    def of_task() -> TaskRewards:
        return TaskRewards(task.scorer, tokenizer, recipe.rollout, recipe.cluster.rewards == "nodes")

    if not own.enabled or own.reward == "task":
        return of_task()
    return EpisodeRewards(of_task() if own.reward == "sum" else None)


def _scheduler(
    recipe: Recipe,
    learner: Learner,
    engine: Engine,
    prompts: PromptStream,
    rewards: TaskRewards | EpisodeRewards,
    journal: Journal,
    progress: Progress | None,
    episodes: Episodes | None,
    decode: Decode,
) -> RolloutScheduler:
    published = algorithm(recipe.algorithm.algorithm).dynamic_sampling
    dynamic = published if recipe.rollout.dynamic_sampling is None else recipe.rollout.dynamic_sampling
    return RolloutScheduler(
        engine,
        prompts,
        rewards,
        recipe.rollout_params(),
        sampling=recipe.sampling(learner.stop_token_ids),
        faults=recipe.fault_settings(),
        reward_scope=rewards.scope,
        dynamic_filter=carries_signal if dynamic else None,
        seed=recipe.training.seed,
        on_progress=_shown_on(progress) if progress else None,
        journal=journal,
        episodes=episodes,
        overlap=recipe.overlaps,
        decode=decode,
    )


def _shown_on(progress: Progress) -> Callable[[RolloutScheduler], None]:
    def show(scheduler: RolloutScheduler) -> None:
        wanted, engine = scheduler.params.rollout_batch_size, scheduler.engine
        # More groups may be complete than the step takes.
        ready = min(len(scheduler.state.ready), wanted)
        away = 0 if scheduler.episodes is None else len(scheduler.episodes)
        progress.rollout(ready, wanted, engine.running, engine.capacity.slots, scheduler.step_tokens, away)

    return show
