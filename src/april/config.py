"""A recipe: every setting of a run, from a TOML file and the flags that override it.

Invariants:
- a recipe is checked whole before anything is loaded, and every error names the setting, where it was set and the
  remedy;
- a setting has one name, in the file and as a flag: `[rollout] max_staleness` is `--max-staleness`.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from pydantic import ConfigDict, TypeAdapter, ValidationError

from april.admission import largest_target
from april.trajectory import SamplingParams

FORBID = ConfigDict(extra="forbid")


class ConfigError(Exception):
    """Settings that cannot be run, one line for each."""


@dataclass(kw_only=True)
class ModelSettings:
    __pydantic_config__ = FORBID
    path: str = ""
    """Policy: a Hugging Face causal LM, as a directory or a hub name. Relative to the recipe's folder first."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the parameters that are trained."""
    device: str = "auto"
    """Where to train and, with the embedded engine, to generate: auto, cpu, cuda, cuda:1, …"""


@dataclass(kw_only=True)
class TaskSettings:
    __pydantic_config__ = FORBID
    kind: Literal["reasoning_gym", "records"] = "reasoning_gym"
    """Problems from the reasoning-gym package, or records of prompts and answers from a file."""
    name: str = ""
    """reasoning_gym: the dataset's name, for example gcd."""
    params: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
    """reasoning_gym: the dataset's own parameters, as a table in the recipe."""
    size: int = 10_000
    """reasoning_gym: training problems in an epoch."""
    path: str = ""
    """records: a .jsonl or .parquet file. Relative to the recipe's folder first."""
    eval_path: str = ""
    """records: a file of held-out problems; without it, eval_size problems of the file are held out."""
    prompt_column: str = "prompt"
    """records: the column with the prompt, a text or a list of chat messages."""
    answer_column: str = "answer"
    """records: the column with the reference answer."""
    id_column: str | None = None
    """records: the column that names a record in reports; its line number if unset."""
    reward: str = "task"
    """How responses are scored: task (reasoning-gym's own scorer), math-verify, or package.module:function."""
    reward_scope: Literal["sample", "group"] = "sample"
    """Whether the reward function gets one response or all responses to a prompt at once."""
    answer_tag: str = "answer"
    """reasoning_gym: the tag that encloses the final answer in a response, <answer>…</answer>."""
    extract: Literal["tag", "whole"] = "tag"
    """reasoning_gym: score what the tag encloses, or the whole response."""
    eval_size: int = 128
    """Held-out problems of an evaluation."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """Wrap prompts in the tokenizer's chat template: if they are messages (auto), always, or never."""
    system_prompt: str | None = None
    """A system message put before every prompt that goes through the chat template."""
    max_prompt_length: int | None = None
    """Leave out prompts of more tokens than this; unset: a prompt that does not fit the context is an error."""


@dataclass(kw_only=True)
class RolloutSettings:
    __pydantic_config__ = FORBID
    partial_rollout: bool = True
    """Active partial rollouts: start more groups than a step needs, interrupt the rest once enough are complete, and
    go on with them first in the next step. Off: synchronous, every sample on-policy."""
    rollout_batch_size: int = 32
    """Groups a step trains on (N)."""
    over_sampling_batch_size: int | None = None
    """Groups under way at a step's start (N'), from N to N × (max_staleness + 1); 2 N if unset."""
    n_samples_per_prompt: int = 8
    """Samples in a group (G)."""
    max_staleness: int = 5
    """The most weight updates between a group's first token and the step that trains on it. A guarantee."""
    max_response_length: int = 1024
    """Response budget of a sample, in tokens."""
    temperature: float = 1.0
    """Sampling temperature."""
    top_p: float = 1.0
    """Nucleus sampling; 1 is off."""
    top_k: int = 0
    """Sample among the k most probable tokens; 0 is off."""
    min_p: float = 0.0
    """Sample among tokens at least this times as probable as the best one; 0 is off."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, beside the model's end-of-sequence tokens."""
    dynamic_sampling: bool | None = None
    """Replace groups whose rewards are all equal, one for one. Unset: as the algorithm publishes it."""
    max_rejected_groups: int | None = None
    """Groups of one step that dynamic sampling may turn away before the run stops; 20 N if unset."""
    on_reward_error: Literal["raise", "zero", "reject"] = "raise"
    """When a reward function fails: stop the run, score the sample 0, or leave its group out."""
    reward_timeout: float | None = 30.0
    """Seconds a reward may take."""
    reward_workers: int = 1
    """Processes that compute rewards beside generation; 0 computes them in the run's own process, which suits quick
    functions that cannot hang."""


@dataclass(kw_only=True)
class EngineSettings:
    __pydantic_config__ = FORBID
    engine: Literal["embedded", "vllm", "sglang"] = "embedded"
    """What generates: april's own engine on the policy being trained, or servers."""
    urls: tuple[str, ...] = ()
    """vllm, sglang: running servers; unset: april starts one itself."""
    max_running: int = 64
    """embedded: samples that decode together (engine slots)."""
    context_length: int | None = None
    """Prompt and response tokens of a sample together; unset: what the model allows."""
    kv_cache_gb: float | None = None
    """embedded: memory for the KV cache, in GB; samples wait when it is full. Unset: enough for every slot."""
    on_update: Literal["recompute", "keep"] = "recompute"
    """What becomes of an unfinished sample's KV cache when the weights change: computed anew under the new weights, or
    kept. The recorded log-probabilities are exact in both."""


@dataclass(kw_only=True)
class AlgorithmSettings:
    __pydantic_config__ = FORBID
    algorithm: str = "grpo"
    """Published defaults to start from; `april algorithms` lists them."""
    correction: str = "behaviour"
    """How tokens of older policies are corrected for; `april algorithms` lists the choices."""
    eps_low: float | None = None
    """Lower clip range; unset: as published."""
    eps_high: float | None = None
    """Upper clip range; unset: as published."""
    kl_coef: float | None = None
    """Weight of the KL penalty to the initial policy; unset: as published."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus."""


@dataclass(kw_only=True)
class TrainingSettings:
    __pydantic_config__ = FORBID
    steps: int = 100
    """Training steps: rollout batches to collect and train on."""
    updates_per_step: int = 1
    """Optimizer updates a rollout batch is divided into, by whole groups."""
    learning_rate: float = 1e-6
    """Peak learning rate of AdamW."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes from its peak to zero at the last step."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm."""
    max_tokens_per_micro_batch: int = 8192
    """Tokens, padding included, of one forward and backward pass. Lower it when memory runs out."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    seed: int = 0
    """Everything random follows from it: data order, samples, initialisation."""
    threads: int | None = None
    """CPU threads of PyTorch; unset: as PyTorch chooses."""
    eval_interval: int = 10
    """Steps between evaluations on held-out problems; 0 evaluates before and after training only."""
    eval_samples: int = 4
    """Samples per held-out problem; accuracy is their mean."""
    eval_temperature: float | None = None
    """Temperature of evaluation; unset: the rollouts'."""
    save_interval: int = 50
    """Steps between checkpoints; 0 saves at the end only."""
    keep_checkpoints: int = 2
    """Checkpoints kept on disk, the newest ones."""


@dataclass(kw_only=True)
class ReportingSettings:
    __pydantic_config__ = FORBID
    output: str = "runs/april"
    """The run's directory: metrics, checkpoints, report."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ("tensorboard",)
    """Where metrics go beside metrics.jsonl."""
    project: str = "april"
    """Project name for wandb and trackio."""


@dataclass(kw_only=True)
class Recipe:
    """Every setting of a run, by section."""

    __pydantic_config__ = FORBID
    model: ModelSettings = field(default_factory=ModelSettings)
    """What is trained."""
    task: TaskSettings = field(default_factory=TaskSettings)
    """Problems and rewards."""
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    """How responses are generated."""
    engine: EngineSettings = field(default_factory=EngineSettings)
    """What generates them."""
    algorithm: AlgorithmSettings = field(default_factory=AlgorithmSettings)
    """What is optimised."""
    training: TrainingSettings = field(default_factory=TrainingSettings)
    """How it is optimised."""
    reporting: ReportingSettings = field(default_factory=ReportingSettings)
    """What is written, and where."""

    @property
    def over_sampling_batch_size(self) -> int:
        """N' with its default filled in: what the staleness bound allows of 2 N, or N for synchronous rollouts."""
        rollout = self.rollout
        if not rollout.partial_rollout:
            return rollout.rollout_batch_size
        if rollout.over_sampling_batch_size is not None:
            return rollout.over_sampling_batch_size
        largest = largest_target(rollout.rollout_batch_size, rollout.max_staleness)
        return min(2 * rollout.rollout_batch_size, largest or 2 * rollout.rollout_batch_size)

    def sampling(self, stop_token_ids: tuple[int, ...] = ()) -> SamplingParams:
        rollout = self.rollout
        return SamplingParams(
            max_tokens=rollout.max_response_length,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            stop_token_ids=tuple(sorted({*rollout.stop_token_ids, *stop_token_ids})),
        )

    def to_dict(self) -> dict[str, Any]:
        """The resolved recipe as JSON types."""
        return dataclasses.asdict(self)


def load_recipe(path: Path) -> Recipe:
    """Read a TOML recipe; paths in it that exist beside it become absolute.

    Raises:
        ConfigError: the file is missing or is no TOML, or a key or a value is wrong; each with its line.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"{path}: cannot read this recipe: {error.strerror}") from None
    try:
        settings = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: no valid TOML: {error}") from None
    try:
        recipe = TypeAdapter(Recipe).validate_python(settings)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(path, text, problem) for problem in error.errors())) from None
    for section, key in (("model", "path"), ("task", "path"), ("task", "eval_path")):
        beside = path.parent / getattr(getattr(recipe, section), key)
        if getattr(getattr(recipe, section), key) and beside.exists():
            setattr(getattr(recipe, section), key, str(beside.resolve()))
    return recipe


def recipe_from_dict(settings: Mapping[str, Any]) -> Recipe:
    """The inverse of `Recipe.to_dict`, for a run that is resumed."""
    return TypeAdapter(Recipe).validate_python(settings)


def _explain(path: Path, text: str, problem: Any) -> str:
    """One line for one of pydantic's findings: file, line, setting, what is wrong, what to do."""
    location = [str(part) for part in problem["loc"]]
    name = ".".join(location)
    where = f"{path}:{line}" if (line := _line(text, location)) else str(path)
    if problem["type"] != "unexpected_keyword_argument":
        return f"{where}: {name} = {problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}"
    sections = {f.name: getattr(Recipe(), f.name) for f in dataclasses.fields(Recipe)}
    siblings = sections if len(location) == 1 else {f.name: None for f in dataclasses.fields(sections[location[0]])}
    near = difflib.get_close_matches(location[-1], siblings, n=1)
    elsewhere = [s for s, values in sections.items() if len(location) > 1 and hasattr(values, location[-1])]
    hint = (
        f"did you mean {near[0]}?"
        if near
        else f"it belongs into [{elsewhere[0]}]"
        if elsewhere
        else f"known here: {', '.join(siblings)}"
    )
    return f"{where}: unknown setting {name}; {hint}"


def _line(text: str, location: list[str]) -> int | None:
    """The line of a recipe on which a setting stands, counted from 1."""
    section: str | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[([^\[\]]+)\]", line):
            section = header[1].strip()
            if [section] == location or section.split(".") == location[:2]:
                return number
        elif (key := re.match(r"\s*([\w-]+)\s*=", line)) and [*([section] if section else []), key[1]] == location[:2]:
            return number
    return None


def check_recipe(recipe: Recipe) -> None:
    """Every rule that involves more than one setting's type, before anything is loaded.

    Raises:
        ConfigError: with a line for each rule that is broken.
    """
    problems = list(_problems(recipe))
    if problems:
        raise ConfigError("\n".join(problems))


def _problems(recipe: Recipe) -> Iterator[str]:
    rollout, training, task, engine = recipe.rollout, recipe.training, recipe.task, recipe.engine

    for section in dataclasses.fields(recipe):
        values = getattr(recipe, section.name)
        for name in POSITIVE & {f.name for f in dataclasses.fields(values)}:
            if (value := getattr(values, name)) is not None and value <= 0:
                yield f"{section.name}.{name} = {value}: must be positive"
        for name in NOT_NEGATIVE & {f.name for f in dataclasses.fields(values)}:
            if (value := getattr(values, name)) is not None and value < 0:
                yield f"{section.name}.{name} = {value}: must not be negative"

    batch_size, over_sampling = rollout.rollout_batch_size, recipe.over_sampling_batch_size
    if over_sampling < batch_size:
        yield (
            f"rollout.over_sampling_batch_size = {over_sampling} is less than rollout_batch_size = {batch_size}: raise "
            f"it to {batch_size} or more, or use --no-partial-rollout for synchronous rollouts"
        )
    largest = batch_size * (rollout.max_staleness + 1)
    if rollout.partial_rollout and over_sampling > largest:
        yield (
            f"rollout.over_sampling_batch_size = {over_sampling} cannot keep max_staleness = {rollout.max_staleness}: "
            f"at most rollout_batch_size × (max_staleness + 1) = {largest} groups may be under way; lower it, or raise "
            f"max_staleness to {-(-over_sampling // batch_size) - 1}"
        )
    if batch_size > 0 and training.updates_per_step > 0 and batch_size % training.updates_per_step:
        yield (
            f"training.updates_per_step = {training.updates_per_step} does not divide rollout_batch_size = "
            f"{batch_size}: each optimizer update takes the same number of whole groups"
        )
    if training.max_tokens_per_micro_batch < rollout.max_response_length:
        yield (
            f"training.max_tokens_per_micro_batch = {training.max_tokens_per_micro_batch} is less than "
            f"rollout.max_response_length = {rollout.max_response_length}: one sample would not fit; raise it"
        )
    try:
        recipe.sampling()
    except ValueError as error:
        yield f"rollout.{error}"
    if not recipe.model.path:
        yield "model.path is not set: name a Hugging Face model, as a directory or a hub name"
    elif recipe.model.path.startswith((".", "/", "~")) and not Path(recipe.model.path).expanduser().is_dir():
        yield f"model.path = {recipe.model.path!r}: no such directory"
    if task.kind == "reasoning_gym" and not task.name:
        yield 'task.name is not set: name a reasoning-gym dataset, for example "gcd"'
    if task.kind == "records":
        if not task.path:
            yield "task.path is not set: name a .jsonl or .parquet file of prompts and answers"
        if task.reward == "task":
            yield 'task.reward = "task": records have no scorer of their own; use "math-verify" or a function of yours'
        for name in ("path", "eval_path"):
            if (value := getattr(task, name)) and not Path(value).is_file():
                yield f"task.{name} = {value!r}: no such file"
    if engine.urls and engine.engine == "embedded":
        yield 'engine.urls is set but engine = "embedded": choose "vllm" or "sglang", or remove urls'
    if not all(0 <= beta < 1 for beta in training.betas):
        yield f"training.betas = {training.betas}: each must lie in [0, 1)"


POSITIVE = {
    "rollout_batch_size",
    "over_sampling_batch_size",
    "n_samples_per_prompt",
    "max_response_length",
    "max_prompt_length",
    "reward_timeout",
    "max_running",
    "context_length",
    "kv_cache_gb",
    "steps",
    "updates_per_step",
    "learning_rate",
    "max_grad_norm",
    "max_tokens_per_micro_batch",
    "threads",
    "eval_samples",
    "keep_checkpoints",
    "size",
    "max_rejected_groups",
}
NOT_NEGATIVE = {
    "max_staleness",
    "reward_workers",
    "weight_decay",
    "warmup_steps",
    "eval_interval",
    "save_interval",
    "eval_size",
    "eval_temperature",
    "seed",
    "kl_coef",
    "eps_low",
    "eps_high",
}
