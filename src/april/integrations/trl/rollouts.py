"""Rollouts for TRL's synchronous trainer.

Invariants:
- the scheduler is in process 0, and has all groups of the job (`trainer_ranks.py`); every process gets the number of
  rows that it requested, and the rows of a group are adjacent once TRL has gathered them;
- the engine has the weights of the optimizer step that requests rollouts; a generation batch after an update is a new
  policy version.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.utils import is_peft_model
from transformers import ProcessorMixin

from april.config.recipe import Recipe
from april.config.settings.model_settings import ModelSettings
from april.engines.job import JobEngine, JobOrder, LocalEngineWorker, Reply
from april.engines.weight_transfer import SharedParameters
from april.images.store import ImageStore, NoImages
from april.integrations.adapter import RolloutAdapter
from april.integrations.trainer_ranks import TrainerRanks
from april.integrations.trl.colocate import ColocatedVLLM
from april.integrations.trl.episodes import Row, TRLEpisodes
from april.integrations.trl.policy_images import policy_images
from april.integrations.trl.prompts import dataset_prompts, encoder, image_encoder
from april.integrations.trl.settings import PartialRollouts, sampling_of
from april.integrations.trl.stored_images import StoredImages
from april.integrations.trl.whole_model import WholeModel
from april.reporting.totals import Totals
from april.rollout.engine import Engine
from april.rollout.event_loop import EventLoop
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt
from april.training.engine_builder import open_engine
from april.training.lora import Adapters
from april.training.weight_transfer import model_transfer

logger = logging.getLogger(__name__)


class TRLRollouts:
    """Engine, scheduler and weight transfer for TRL's model and rows.

    All processes of the job call every method but `close` together.

    Args:
        colocated: whether each process drives TRL's own vLLM (`vllm_mode = "colocate"`).
    """

    def __init__(self, trainer: Any, settings: PartialRollouts, colocated: bool = False) -> None:
        args, model, processing = trainer.args, trainer.model, trainer.processing_class
        adapters = Adapters.of(model) if is_peft_model(model) else None
        if adapters is not None:
            model = model.get_base_model()
        dtype: Any = str(model.dtype).removeprefix("torch.")
        policy = ModelSettings(path=model.config._name_or_path, dtype=dtype, compute_dtype=dtype)
        recipe = Recipe(model=policy, engine=settings)
        directory = Path(args.output_dir)
        self.job = TrainerRanks()
        self.episodes: TRLEpisodes | None = None
        if trainer.tools or trainer.environment_factories:
            if settings.on_update == "redraft":
                raise ValueError('on_update = "redraft": results of tools cannot be drafts; leave it out')
            self.episodes = TRLEpisodes(trainer, self.job.size == 1)
        self.images = StoredImages(directory / "images") if isinstance(processing, ProcessorMixin) else None
        self._policy_images = policy_images(trainer) if self.images else NoImages("it was given no processor")
        template = trainer.chat_template, trainer.chat_template_kwargs
        self.encode: Callable[[Mapping[str, Any]], Prompt]
        if self.episodes is not None:
            self.encode = self.episodes.encode
        elif self.images is not None:
            self.encode = image_encoder(processing, *template, self.images, self._policy_images)
        else:
            self.encode = encoder(processing, *template)
        self.group_size: int = trainer.num_generations
        self.whole: WholeModel | None = None
        self.colocated: ColocatedVLLM | None = None
        # Engines and transfers need whole parameters, which these trainers shard. TRL gathers them for its own vLLM.
        if not colocated and (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
            generates = settings.engine == "embedded"
            computed = generates or settings.weight_transfer == "broadcast"
            device = trainer.accelerator.device if computed else model.device
            self.whole = WholeModel(model, self.job.leads or generates, device)
            model = self.whole.copy
        self.transfer = (
            SharedParameters()
            if colocated or model is None
            else model_transfer(settings, model, processing, directory, adapters)
        )
        self.rows: Sequence[Row] = ()
        """Rows of the last call, in the order in which TRL receives them in this process."""
        self.groups: Sequence[Group] = ()
        """Groups of the last call, in process 0."""
        self.metrics: list[dict[str, float]] = []
        self.loaded: int | None = None
        """Optimizer step of the engine's weights; None if it is unknown."""
        self.trained: int | None = None
        """Optimizer step of the latest generation batch for training."""
        self._loop = EventLoop("april rollouts")
        self._stack = AsyncExitStack()
        self._worker: LocalEngineWorker | None = None
        try:
            merged = adapters is not None and settings.engine == "embedded"
            if colocated:
                self.colocated = self._colocated(trainer, recipe)
            self.engine = self._engine(recipe, adapters.merged_model() if adapters and merged else model, directory)
            if self.job.leads:
                assert self.engine is not None
                batch_size = args.generation_batch_size // trainer.num_generations
                sampling = sampling_of(args, tuple(sorted(trainer.eos_token_ids)))
                episodes = None
                if self.episodes is not None:
                    turns = self.episodes.most_calls + 1
                    sampling = replace(sampling, max_turns=turns, observations_count=True)
                    episodes = self.episodes.episodes(self.engine.capacity.context_length)
                self.adapter = RolloutAdapter(
                    self.engine,
                    settings.params(batch_size, trainer.num_generations, settings.max_staleness),
                    extra=dataset_prompts(trainer.train_dataset, self.encode, args.seed),
                    sampling=sampling,
                    seed=args.seed,
                    episodes=episodes,
                )
                self._loop.run(self._stack.enter_async_context(self.adapter))
        except BaseException:
            self.close()
            raise

    def _colocated(self, trainer: Any, recipe: Recipe) -> ColocatedVLLM:
        slots, args = recipe.slots, trainer.args
        if recipe.engine.max_num_seqs == "auto":
            # At least as many as TRL itself allows: the samples that one engine generates for a batch.
            slots = max(slots, args.generation_batch_size // self.job.size * args.vllm_tensor_parallel_size)
        return ColocatedVLLM(trainer, slots, recipe.engine.steps_per_poll)

    def _engine(self, recipe: Recipe, model: Any, directory: Path) -> Engine | None:
        """Return the engine: servers, which only process 0 drives, or the engines of all processes as one."""

        def enter() -> Engine:
            if self.colocated is not None:
                self._stack.push_async_callback(self.colocated.close)
                return self.colocated
            images = self._policy_images if isinstance(self._policy_images, ImageStore) else None
            opening = open_engine(recipe, model, directory, images=images)
            return self._loop.run(self._stack.enter_async_context(opening))

        if self.job.size == 1:
            return enter()
        if recipe.engine.engine == "vllm-inproc" and self.colocated is None:
            raise ValueError(
                f'engine = "vllm-inproc" in {self.job.size} processes: one LLM each takes use_vllm=True with '
                'vllm_mode="colocate"; or use "embedded" or "vllm"'
            )
        if recipe.engine.engine not in ("embedded", "vllm-inproc"):
            made: list[Engine] = []

            def start() -> Sequence[None]:
                made.append(enter())
                return [None] * self.job.size

            # Followers wait in `together`, so that an error while the leader starts servers ends them.
            self.job.together(start, self._follow)
            return made[0] if made else None
        own = enter()
        self._worker = LocalEngineWorker(own)
        capacities = self.job.gather(own.capacity)
        if not self.job.leads:
            return None
        together = 1 if self.colocated is None else self.colocated.ranks_per_engine
        keeps = recipe.engine.on_update == "keep"
        return JobEngine(self.job, self._worker, capacities, keeps, ranks_per_engine=together)

    def _follow(self, order: JobOrder) -> Reply:
        assert self._worker is not None, "there are no engines but the leader's"
        offer = self.transfer.offer(order.version) if order.what == "update" else None
        return self._loop.run(self._worker.execute(order, offer))

    def train(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Generate a batch under the weights of optimizer step `step`.

        Args:
            rows: rows that this process requests. As in TRL, each row is repeated for every completion of its prompt.
        """
        # A new policy version, unless this is the first batch or another batch of the same optimizer step.
        newer = self.trained is not None and not step == self.trained == self.loaded
        # The first row of each group of the job, of which this process has the rows from `rank * len(rows)` on.
        heads = rows[-self.job.rank * len(rows) % self.group_size :: self.group_size]
        requested = [row for mine in self.job.gather(self._stored(heads)) for row in mine]

        def collect() -> list[list[Row]]:
            if newer:
                self._loop.run(self.adapter.update_weights(self.transfer.offer(self.adapter.version + 1)))
                self.loaded = step
            self._load(step)
            collected = self._loop.run(self.adapter.rollout([self.encode(row) for row in requested]))
            self.metrics.append(collected.metrics())
            return self._rows_of(collected.groups, [len(rows)] * self.job.size)

        with self._weights(newer or step != self.loaded, step):
            self.rows = self.job.together(collect, self._follow)
        self.transfer.withdraw()  # TRL trains next
        self.trained = self.loaded = step

    def evaluate(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Generate one completion for each row. TRL repeats the rows itself."""
        requested = self.job.gather(self._stored(rows))

        def generate() -> list[list[Row]]:
            self._load(step)
            prompts = [self.encode(row) for mine in requested for row in mine]
            return self._rows_of(self._loop.run(self.adapter.evaluate(prompts)), [len(mine) for mine in requested])

        with self._weights(step != self.loaded, step):
            self.rows = self.job.together(generate, self._follow)
        self.loaded = step

    def _stored(self, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        return list(rows) if self.images is None else [self.images.store(row) for row in rows]

    def inputs(self) -> list[dict[str, Any]]:
        """Return the dataset's rows of the last call, as TRL takes them."""
        rows = [row for row, _ in self.rows]
        return [dict(row) for row in rows] if self.images is None else self.images.load(rows)

    def show(self, trainer: Any) -> None:
        """Pass the environments of the last call's completions to TRL."""
        if self.episodes is not None:
            self._loop.run(self._show(self.episodes, trainer))

    async def _show(self, episodes: TRLEpisodes, trainer: Any) -> None:
        await episodes.show(trainer, self.rows)
        if self.job.leads:
            buffer = self.adapter.scheduler.buffer
            episodes.keep({sample.id for group in buffer for sample in group.samples})

    def _rows_of(self, groups: Sequence[Group], counts: Sequence[int]) -> list[list[Row]]:
        """Return the samples of `groups` as rows, split into `counts` rows per process."""
        self.groups = groups
        rows = [(group.prompt.metadata, sample) for group in groups for sample in group.samples]
        assert len(rows) == sum(counts)
        stops = np.cumsum(counts).tolist()
        return [rows[stop - count : stop] for stop, count in zip(stops, counts, strict=True)]

    @contextmanager
    def _weights(self, stale: bool, step: int) -> Iterator[None]:
        """Have the weights of optimizer step `step` at hand for engines; if they are `stale`, they are gathered."""
        if self.colocated is not None:
            with self.colocated.generating(stale, step, self._loop):
                yield
            return
        if stale and self.whole is not None:
            self.whole.gather()
        yield

    def _load(self, step: int) -> None:
        """Load the weights of `step` into the engine, without a new policy version: only `train` decides on that."""
        if step != self.loaded:
            version = self.adapter.version
            self._loop.run(self.adapter.update_weights(self.transfer.offer(version), version))
            self.loaded = step

    def take_metrics(self) -> dict[str, float]:
        """In process 0, the metrics of the generation batches since the last call, aggregated as over a run (`Totals`).
        Rates are left out if nothing was sampled."""
        taken, self.metrics = self.metrics, []
        measured = {name for metrics in taken for name in metrics}
        totals = Totals.of(taken)
        return {name: value for name, value in totals.values().items() if name in measured}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the whole job, in process 0. It does not depend on the number of processes."""
        # A resumed run has no KV cache. Drop it here too, so that both runs sample the same tokens.
        assert self.engine is not None
        self.engine.forget()
        return {"trained": self.trained, **self.adapter.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore `state_dict` in process 0; None starts without rollouts in flight."""
        # A tuple around `trained`, which may be None itself, distinguishes a state from no state.
        found = self.job.scatter([state is not None and (state["trained"],)] * self.job.size)
        if found:
            (self.trained,), self.loaded = found, None
        if state is not None and self.job.leads:
            self.adapter.load_state_dict(state)
        if self.episodes is not None:
            self._loop.run(self._keep_none(self.episodes))

    async def _keep_none(self, episodes: TRLEpisodes) -> None:
        episodes.keep(set())

    def close(self) -> None:
        if self._stack is not None:
            stack, self._stack = self._stack, None  # type: ignore[assignment]
            self._loop.run(stack.aclose())
            self._loop.close()
