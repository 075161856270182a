"""TRL's `GRPOTrainer` with active partial rollouts.

Invariants:
- a training batch is N complete groups; the loss, the reward functions and the logs see the prompt and the columns of
  the row that a completion belongs to, never those of the row that the dataloader asked for;
- the policy ratio divides by the log-probabilities that tokens were drawn with, whichever version drew them;
- evaluation generates for exactly the rows asked for, past what waits;
- a checkpoint of TRL's holds everything that waits, and a run resumed from it trains on what the saved one would have.

Of TRL's private interface only `_generate_and_score_completions` is overridden, to give it the rows and to add the
log-probabilities to what it returns.
"""

from __future__ import annotations

import inspect
import json
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from april.config.checking import check_engine
from april.config.error import ConfigError
from april.config.recipe import Recipe
from april.config.settings import EngineSettings, ModelSettings
from april.integrations.adapter import RolloutAdapter
from april.integrations.requirement import require
from april.rollout.disk import write_whole
from april.rollout.event_loop import EventLoop
from april.rollout.params import MAX_STALENESS, RolloutParams
from april.rollout.trajectory import Group, Prompt, SamplingParams
from april.training.engines import engine_of
from april.training.weights import transfer_of

require("trl", "1.16", extra="trl")

import trl  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import PreTrainedTokenizerBase, TrainerCallback  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint  # noqa: E402

logger = logging.getLogger(__name__)

STATE = "april.json"
"""The file of a TRL checkpoint that holds what waits."""
FORMAT = 1


@dataclass(kw_only=True)
class PartialRollouts(EngineSettings):
    """How rollouts are generated: these settings, and all of `EngineSettings` (`engine`, `max_running`,
    `on_update`, `urls`, …).

    Args:
        over_sampling_batch_size: Prompts under way (N'); auto: chosen every generation batch from what was observed.
        max_staleness: The most generation batches between a group's first token and the update that trains on it.
    """

    over_sampling_batch_size: int | Literal["auto"] = "auto"
    max_staleness: int = MAX_STALENESS

    def __post_init__(self) -> None:
        try:
            check_engine(self)
        except ConfigError as error:
            raise ValueError(f"PartialRollouts: {error}") from None

    def params(self, batch_size: int, group_size: int, bound: int, bound_name: str = "max_staleness") -> RolloutParams:
        """How many groups of TRL's batches are under way, and how old they may be.

        Raises:
            ValueError: fewer than a batch, or more than the bound allows.
        """
        return RolloutParams(
            rollout_batch_size=batch_size,
            n_samples_per_prompt=group_size,
            over_sampling_batch_size=self.over_sampling_batch_size,
            max_staleness=bound,
            names={"rollout_batch_size": "N (prompts a batch)", "max_staleness": bound_name},
        )


class GRPOTrainer(trl.GRPOTrainer):  # type: ignore[name-defined,misc]
    """TRL's trainer; everything `trl.GRPOTrainer` takes, and how rollouts are generated.

    Args:
        partial_rollouts: unset: the defaults of `PartialRollouts`, with the embedded engine.

    Raises:
        ValueError: a setting of TRL's does not go with partial rollouts; the message names it and the remedy.
    """

    def __init__(self, *args: Any, partial_rollouts: PartialRollouts | None = None, **kwargs: Any) -> None:
        settings = partial_rollouts_of(partial_rollouts)
        _refuse_arguments(inspect.signature(super().__init__).bind(*args, **kwargs).arguments)
        super().__init__(*args, **kwargs)
        _refuse_model(self)
        self._rollouts = _Rollouts(self, settings)
        self.rollout_func = self._completions
        self.add_callback(Checkpoint(self._rollouts))
        weakref.finalize(self, self._rollouts.close)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        training, rollouts = self.model.training, self._rollouts
        if training:
            rollouts.train(inputs[:: self.num_generations], self.state.global_step)
            inputs = [dict(group.prompt.metadata) for group in rollouts.groups for _ in group.samples]
        else:
            rollouts.evaluate(inputs, self.state.global_step)
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if training:
            output["old_per_token_logps"] = output["sampling_per_token_logps"]
        return output

    def _completions(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """TRL's `rollout_func`: the groups that were just collected, a row per sample."""
        samples = [sample for group in self._rollouts.groups for sample in group.samples]
        assert len(samples) == len(prompts), "TRL asked for completions of other rows than it was given"
        return {
            "prompt_ids": [list(sample.prompt_ids) for sample in samples],
            "completion_ids": [sample.response_ids for sample in samples],
            "logprobs": [sample.logprobs.tolist() for sample in samples],
        }

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As TRL's; a checkpoint brings back what waited when it was written."""
        state = read_state(resume_from_checkpoint, self.args.output_dir)
        if state is not None:
            self._rollouts.load_state_dict(state)
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self._rollouts.loaded = None  # TRL may have gone back to the best checkpoint, or a step may be counted anew

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As TRL's, with april's metrics of the rollouts since the last call under `april/`."""
        if self.model.training:
            logs.update(self._rollouts.take_metrics())
        super().log(logs, start_time)

    def close(self) -> None:
        """Stop the engine, and the servers that april started. It happens by itself when the program ends."""
        self._rollouts.close()


class _Rollouts:
    """The engine, what waits, and the weights between them. It knows TRL's model and rows, not its trainer."""

    def __init__(self, trainer: Any, settings: PartialRollouts) -> None:
        args, model, tokenizer = trainer.args, trainer.model, trainer.processing_class
        encode = encoder(tokenizer, trainer.chat_template, trainer.chat_template_kwargs)
        batch_size = args.generation_batch_size // trainer.num_generations
        dtype: Any = str(model.dtype).removeprefix("torch.")
        recipe = Recipe(model=ModelSettings(path=model.config._name_or_path, dtype=dtype), engine=settings)
        directory = Path(args.output_dir)
        self.encode = encode
        self.transfer = transfer_of(recipe, model, tokenizer, directory)
        self.groups: Sequence[Group] = ()
        """The groups of the last call, in the order of the rows that TRL gets."""
        self.metrics: list[dict[str, float]] = []
        self.loaded: int | None = None
        """The optimizer step whose weights the engine has; None if it has others, or nobody knows."""
        self.trained: int | None = None
        """The optimizer step at which groups were last collected for training."""
        self._loop = EventLoop("april rollouts")
        self._stack = AsyncExitStack()
        try:
            self.engine = self._loop.run(self._stack.enter_async_context(engine_of(recipe, model, directory)))
            self.adapter = RolloutAdapter(
                self.engine,
                settings.params(batch_size, trainer.num_generations, settings.max_staleness),
                extra=ShuffledRows(trainer.train_dataset, encode, args.seed),
                sampling=sampling_of(args, tuple(sorted(trainer.eos_token_ids))),
                seed=args.seed,
            )
        except BaseException:
            self.close()
            raise

    def train(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Collect a generation batch under the weights of optimizer step `step`, asking for `rows`."""
        if self.trained is not None and not step == self.trained == self.loaded:
            self._loop.run(self.adapter.update_weights(self.transfer.offer(self.adapter.version + 1)))
            self.loaded = step
        self._load(step)
        self.trained = step
        collected = self._loop.run(self.adapter.rollout([self.encode(row) for row in rows]))
        self.transfer.withdraw()  # from here on TRL trains
        self.groups = collected.groups
        self.metrics.append(collected.metrics())

    def evaluate(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Generate one completion for each of `rows`, which TRL repeats itself."""
        self._load(step)
        self.groups = self._loop.run(self.adapter.evaluate([self.encode(row) for row in rows]))

    def _load(self, step: int) -> None:
        """Bring the engine to the weights of `step`. Whether that makes a new version, `train` alone decides."""
        if step != self.loaded:
            version = self.adapter.version
            self._loop.run(self.adapter.load_weights(self.transfer.offer(version)))
            self.loaded = step

    def take_metrics(self) -> dict[str, float]:
        """Means over the generation batches since the last call; of maxima, the maximum."""
        taken, self.metrics = self.metrics, []
        if not taken:
            return {}
        means = {f"april/{name}": fmean(metrics[name] for metrics in taken) for name in taken[0]}
        return means | {"april/staleness_max": max(metrics["staleness_max"] for metrics in taken)}

    def state_dict(self) -> dict[str, Any]:
        # A run resumed from here finds no KV cache; dropping it keeps the run that goes on equal to it.
        self.engine.forget()
        return {"trained": self.trained, "rollout": self.adapter.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.adapter.load_state_dict(state["rollout"])
        self.trained, self.loaded = state["trained"], None

    def close(self) -> None:
        if self._stack is not None:
            stack, self._stack = self._stack, None  # type: ignore[assignment]
            self._loop.run(stack.aclose())
            self._loop.close()


class ShuffledRows(Iterator[Prompt]):
    """A dataset's rows as prompts, epoch after epoch, in an order that follows from (seed, epoch).

    These are the prompts that bring what is under way from N to N'; the dataloader asks for its own.
    """

    def __init__(self, dataset: Any, encode: Callable[[Mapping[str, Any]], Prompt], seed: int) -> None:
        self.dataset = dataset
        self.encode = encode
        self.seed = seed
        self.drawn = 0
        self._epoch = 0
        self._order = self._permutation()

    def _permutation(self) -> NDArray[np.int64]:
        return np.random.default_rng((self.seed, self._epoch)).permutation(len(self.dataset))

    def __next__(self) -> Prompt:
        epoch, position = divmod(self.drawn, len(self.dataset))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = self._permutation()
        self.drawn += 1
        return self.encode(self.dataset[int(self._order[position])])

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.drawn = state["drawn"]


class Checkpoint(TrainerCallback):
    """Puts what waits into each checkpoint that TRL writes.

    Args:
        rollouts: has `state_dict`.
    """

    def __init__(self, rollouts: Any) -> None:
        self.rollouts = rollouts

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        write_whole(checkpoint / STATE, json.dumps({"format": FORMAT, **self.rollouts.state_dict()}))


def read_state(resume_from_checkpoint: str | bool | None, output_dir: Any) -> dict[str, Any] | None:
    """What `Checkpoint` wrote into the checkpoint that TRL is to resume from; None if there is none."""
    checkpoint = get_last_checkpoint(output_dir) if resume_from_checkpoint is True else resume_from_checkpoint
    if not checkpoint:
        return None
    path = Path(checkpoint) / STATE
    if not path.exists():
        logger.warning("%s holds no %s: training goes on with no rollouts under way", path.parent, STATE)
        return None
    state: dict[str, Any] = json.loads(path.read_text())
    if state["format"] != FORMAT:
        raise ValueError(f"{path}: format {state['format']}, but this version of april reads {FORMAT}")
    return state


def encoder(tokenizer: Any, template: str | None, options: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Prompt]:
    """How TRL tokenizes the prompt of a row, with the whole row as the prompt's metadata."""

    def encode(row: Mapping[str, Any]) -> Prompt:
        prompt = row["prompt"]
        if isinstance(prompt, str):
            token_ids = tokenizer(text=prompt)["input_ids"]
        else:
            token_ids = tokenizer.apply_chat_template(
                conversation=prompt,
                chat_template=template,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                **options,
            )["input_ids"]
        return Prompt(tuple(token_ids), metadata=dict(row))

    return encode


def sampling_of(args: Any, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """How TRL's arguments say that tokens are drawn; either of its trainers'."""
    return SamplingParams(
        max_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k or 0,
        min_p=args.min_p or 0.0,
        stop_token_ids=stop_token_ids,
    )


def partial_rollouts_of(given: Any) -> PartialRollouts:
    if given is not None and not isinstance(given, PartialRollouts):
        raise ValueError(f"partial_rollouts is a {type(given).__name__}: pass PartialRollouts(...)")
    return given or PartialRollouts()


def _refuse_arguments(arguments: Mapping[str, Any]) -> None:
    """What `trl.GRPOTrainer` takes and partial rollouts cannot serve yet, before anything is loaded."""
    for name in ("tools", "environment_factory", "peft_config", "rollout_func"):
        if arguments.get(name) is not None:
            reason = "april generates the completions" if name == "rollout_func" else "not supported with april yet"
            raise ValueError(f"{name}: {reason}; leave it out, or use trl.GRPOTrainer")
    if (dataset := arguments.get("train_dataset")) is not None:
        check_rows(dataset)
    if (args := arguments.get("args")) is not None:
        check_arguments(args)
        if args.use_vllm:
            raise ValueError('use_vllm = True: leave it out, and pass PartialRollouts(engine="vllm")')
        if args.generation_kwargs:
            raise ValueError("generation_kwargs: april does not know them; leave them out")
        if args.remove_unused_columns:
            raise ValueError("remove_unused_columns = True: it takes the answers out of the rows; leave it at False")


def check_arguments(args: Any) -> None:
    """Settings of either trainer under which rollouts would not be what TRL's own would be."""
    if args.repetition_penalty != 1.0:
        raise ValueError(
            f"repetition_penalty = {args.repetition_penalty}: april draws from the policy itself; leave it at 1"
        )
    if args.world_size != 1:
        raise ValueError(f"{args.world_size} processes: april's trainers for TRL run in one process so far")
    if args.n_gpu > 1:
        raise ValueError(
            f"{args.n_gpu} GPUs: april's trainers for TRL train on one so far; show them one, by CUDA_VISIBLE_DEVICES=0"
        )


def _refuse_model(trainer: Any) -> None:
    if not isinstance(trainer.processing_class, PreTrainedTokenizerBase):
        raise ValueError(
            "processing_class: april's GRPOTrainer handles text; images and other modalities are not supported yet"
        )
    if hasattr(trainer.model, "peft_config"):
        raise ValueError("model: adapters (PEFT) are not supported with april yet; merge them, or use trl.GRPOTrainer")


def check_rows(dataset: Any) -> None:
    """Refuse a dataset whose rows could not be saved with a checkpoint, or not be drawn from."""
    if not isinstance(dataset, Dataset):
        raise ValueError("train_dataset: a streamed dataset is not supported yet: pass a datasets.Dataset")
    if "prompt" not in dataset.column_names:
        raise ValueError(
            f'train_dataset: there is no column "prompt", only {", ".join(dataset.column_names) or "none"}'
        )
    if len(dataset) == 0:
        raise ValueError("train_dataset: it has no rows")
    for column, value in dataset[0].items():
        try:
            json.dumps(value)
        except TypeError:
            raise ValueError(
                f"train_dataset: column {column!r} holds a {type(value).__name__}, which cannot be saved with a "
                "checkpoint; turn it into text or numbers, or remove the column"
            ) from None
