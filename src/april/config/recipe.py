"""A recipe: every setting of a run, from a TOML file and the flags that override it.

Invariants:
- a recipe is checked whole before anything is loaded, and every error names the setting, where it was set and the
  remedy;
- a setting has one name, in the file and as a flag: `[rollout] max_staleness` is `--max-staleness`, `[task] name` is
  `--task.name`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints
from urllib.parse import urlsplit

import tyro
from pydantic import TypeAdapter, ValidationError

from april.algorithms.catalogue import CORRECTIONS, UNBOUNDED, algorithm
from april.engines.servers.address import is_loopback
from april.reporting.metrics import check_trackers
from april.rollout.admission.fixed import FixedAdmission
from april.rollout.trajectory import SamplingParams
from april.tasks.task import TaskSpec

API_KEY = "APRIL_ENGINE_API_KEY"
"""The environment variable that holds the key of servers that want one."""
FLAT: Any = tyro.conf.OmitArgPrefixes
"""Flags of this section carry no prefix."""


class ConfigError(Exception):
    """Settings that cannot be run, one line for each."""


@dataclass(kw_only=True)
class ModelSettings:
    """The policy.

    Args:
        path: Policy: a Hugging Face causal LM, as a directory or a hub name. Relative to the recipe's folder
            first.
        dtype: Precision of the parameters that are trained.
        device: Where to train and, with the embedded engine, to generate: auto, cpu, cuda, cuda:1, …
    """

    path: str = ""
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "auto"


@dataclass(kw_only=True)
class RolloutSettings:
    """How responses are generated.

    Args:
        partial_rollout: Active partial rollouts: start more groups than a step needs, interrupt the rest once
            enough are complete, and go on with them first in the next step. Off: synchronous, every sample
            on-policy.
        policy: april, or the reference's for comparison (april-paper): a fixed N', no staleness bound, the groups that
            are complete first, in the order of their arrival.
        rollout_batch_size: Groups a step trains on (N).
        over_sampling_batch_size: Groups under way at a step's start (N'), from N to N × (max_staleness + 1). auto:
            the fewest that are expected to come within 3 % of the best throughput that the bound allows, chosen
            anew as lengths and speeds drift.
        n_samples_per_prompt: Samples in a group (G).
        max_staleness: The most weight updates between a group's first token and the step that trains on it. A
            guarantee.
        order: Which unfinished samples get a slot first.
        max_prompt_length: Leave out prompts of more tokens than this; unset: what the context has room for
            beside a full response.
        max_response_length: Response budget of a sample, in tokens.
        temperature: Sampling temperature.
        top_p: Nucleus sampling; 1 is off. Truncated sampling makes corrections take fresh tokens for stale ones
            (docs/algorithms.md).
        top_k: Sample among the k most probable tokens; 0 is off.
        min_p: Sample among tokens at least this times as probable as the best one; 0 is off.
        stop_token_ids: Tokens that end a response, beside the model's end-of-sequence tokens.
        dynamic_sampling: Replace groups whose rewards are all equal, one for one. Unset: as the algorithm
            publishes it.
        max_rejected_groups: Groups of one step that dynamic sampling may turn away before the run stops; 20 N
            if unset.
        on_reward_error: When a reward function fails: stop the run, score the sample 0, or leave its group out.
        reward_timeout: Seconds a reward may take.
        reward_workers: Processes that compute rewards beside generation; 0 computes them in the run's own
            process, which suits quick functions that cannot hang.
        reward_memory_gb: Memory a reward process may take beyond what it holds after loading, in GB (on Linux);
            unset: no limit.
        reward_env: Environment variables that reward processes get although their names look like secrets; all
            other such variables are kept from them.
    """

    partial_rollout: bool = True
    policy: Literal["april", "april-paper"] = "april"
    rollout_batch_size: int = 32
    over_sampling_batch_size: int | Literal["auto"] = "auto"
    n_samples_per_prompt: int = 8
    max_staleness: int = 5
    order: Literal["oldest", "most-complete", "nearest", "longest", "shortest"] = "oldest"
    max_prompt_length: int | None = None
    max_response_length: int = 1024
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    dynamic_sampling: bool | None = None
    max_rejected_groups: int | None = None
    on_reward_error: Literal["raise", "zero", "reject"] = "raise"
    reward_timeout: float | None = 30.0
    reward_workers: int = 1
    reward_memory_gb: float | None = 4.0
    reward_env: tuple[str, ...] = ()


@dataclass(kw_only=True)
class EngineSettings:
    """What generates them.

    Args:
        engine: april's own engine on the policy being trained (embedded), vLLM in this process (vllm-inproc), or
            servers (vllm, sglang).
        max_running: Samples that decode together: engine slots, of each server.
        context_length: Prompt and response tokens of a sample together; unset: what the model allows.
        on_update: What becomes of an unfinished sample's KV cache when the weights change: computed anew under the
            new weights, or kept. The recorded log-probabilities are exact in both.
        kv_cache_gb: embedded: memory for the KV cache, in GB; samples wait when it is full. Unset: 40 % of what is
            free.
        stream_interval: embedded: decode steps between two looks at what was sampled; finished samples show at once.
        urls: vllm, sglang: running servers; unset: april starts them and ends them with the run.
        replicas: vllm, sglang: servers to start.
        server_python: vllm, sglang: the interpreter of the environment the server is installed in; unset: april's.
        server_args: vllm, sglang: more options of the servers that april starts.
        server_host: vllm, sglang: the address on which they listen. Other machines reach them only if it is none of
            this machine's own; then they ask for the key in the environment variable APRIL_ENGINE_API_KEY.
        weight_transfer: vllm, sglang: new weights by a directory the servers can read (disk), or over a process group
            (broadcast: gloo on CPUs, nccl on GPUs).
        ready_timeout: vllm, sglang: seconds a server may take to start.
    """

    engine: Literal["embedded", "vllm", "sglang", "vllm-inproc"] = "embedded"
    max_running: int = 64
    context_length: int | None = None
    on_update: Literal["recompute", "keep"] = "recompute"
    kv_cache_gb: float | None = None
    stream_interval: int = 8
    urls: tuple[str, ...] = ()
    replicas: int = 1
    server_python: str | None = None
    server_args: tuple[str, ...] = ()
    server_host: str = "127.0.0.1"
    weight_transfer: Literal["disk", "broadcast"] = "disk"
    ready_timeout: float = 900.0


@dataclass(kw_only=True)
class AlgorithmSettings:
    """What is optimised.

    Args:
        algorithm: Published defaults to start from; `april algorithms` lists them.
        correction: How tokens of older policies are corrected for; `april algorithms` lists the choices.
        correction_cap: Weights above are cut down to it; unset: as published. Kinds with a weight only.
        correction_low: Tokens (or sequences) of a smaller weight are dropped; unset: as published.
        correction_high: Tokens (or sequences) of a larger weight are dropped; unset: as published.
        correction_tau: m2po: the second moment that the tokens trained on may have; unset: as published.
        correction_max_age: Tokens sampled more weight updates ago carry no gradient; unset: no limit.
        eps_low: Lower clip range; unset: as published.
        eps_high: Upper clip range; unset: as published.
        dual_clip: Bound of the loss for negative advantages, above 1 (3 is usual); unset: as published.
        loss_aggregation: How token losses become one number; unset: as published.
        kl_coef: Weight of the KL penalty to the initial policy; unset: as published.
        entropy_coef: Weight of an entropy bonus.
        gamma: ppo: discount; unset: as published.
        gae_lambda: ppo: λ of generalised advantage estimation; unset: as published.
        value_clip: ppo: how far a value may move from its estimate before the update; inf is no bound.
    """

    algorithm: str = "grpo"
    correction: str = "behaviour"
    correction_cap: float | None = None
    correction_low: float | None = None
    correction_high: float | None = None
    correction_tau: float | None = None
    correction_max_age: int | None = None
    eps_low: float | None = None
    eps_high: float | None = None
    dual_clip: float | None = None
    loss_aggregation: Literal["token-mean", "sequence-mean", "constant"] | None = None
    kl_coef: float | None = None
    entropy_coef: float = 0.0
    gamma: float | None = None
    gae_lambda: float | None = None
    value_clip: float = 0.2

    @property
    def correction_bounds(self) -> dict[str, float]:
        """The bounds that are set, by the names `corrections.correct` gives them."""
        names = ("cap", "low", "high", "tau", "max_age")
        bounds = {name: getattr(self, f"correction_{name}") for name in names}
        return {name: value for name, value in bounds.items() if value is not None}


@dataclass(kw_only=True)
class LoraSettings:
    """Low-rank adapters instead of all parameters (needs the extra `lora`).

    Args:
        rank: Rank of the adapters; 0 trains all parameters.
        alpha: The adapters' output counts alpha / rank; unset: twice the rank.
        target_modules: Names of the modules that get adapters; unset: every linear layer but the head.
    """

    rank: int = 0
    alpha: int | None = None
    target_modules: tuple[str, ...] = ()

    @property
    def scale_alpha(self) -> int:
        """Alpha with its default filled in."""
        return 2 * self.rank if self.alpha is None else self.alpha


@dataclass(kw_only=True)
class TrainingSettings:
    """How it is optimised.

    Args:
        steps: Training steps: rollout batches to collect and train on.
        updates_per_step: Optimizer updates a rollout batch is divided into, by whole groups.
        learning_rate: Peak learning rate of AdamW.
        critic_learning_rate: ppo: that of the critic.
        lr_schedule: How the learning rates go from their peaks to zero at the last step.
        warmup_steps: Steps of linear warm-up.
        betas: AdamW's decay rates.
        weight_decay: AdamW's decoupled weight decay.
        max_grad_norm: Gradients are clipped to this norm.
        max_tokens_per_micro_batch: Tokens of one forward and backward pass, padding included where the model's
            architecture needs any. Lower it when memory runs out; it is halved then by itself.
        max_skipped_updates: Updates in a row that may be skipped because loss or gradient is not finite; then the
            run stops. Their batches are kept in the run's folder `skipped`.
        gradient_checkpointing: Recompute activations in the backward pass: less memory, more time.
        seed: Everything random follows from it: data order, samples, initialisation.
        threads: CPU threads of PyTorch; unset: as PyTorch chooses.
        eval_interval: Steps between evaluations on held-out problems; 0 evaluates before and after training
            only.
        eval_samples: Samples per held-out problem; accuracy is their mean.
        eval_temperature: Temperature of evaluation; unset: the rollouts'.
        save_interval: Steps between checkpoints; 0 saves at the end only.
        keep_checkpoints: Checkpoints kept on disk, the newest ones.
        journal_delay: Seconds of rollouts that a crash may lose at most; between checkpoints the journal is written as
            often as that. 0 writes every token before the next is waited for.
    """

    steps: int = 100
    updates_per_step: int = 1
    learning_rate: float = 1e-6
    critic_learning_rate: float = 1e-5
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    max_tokens_per_micro_batch: int = 8192
    max_skipped_updates: int = 3
    gradient_checkpointing: bool = False
    seed: int = 0
    threads: int | None = None
    eval_interval: int = 10
    eval_samples: int = 4
    eval_temperature: float | None = None
    save_interval: int = 50
    keep_checkpoints: int = 2
    journal_delay: float = 1.0


@dataclass(kw_only=True)
class ReportingSettings:
    """What is written, and where.

    Args:
        output: The run's directory: metrics, checkpoints, report.
        if_exists: When a run is there already: stop, or keep it under another name (DIR.1, DIR.2, …).
        trackers: Where metrics go beside metrics.jsonl.
        project: Project name for wandb and trackio.
    """

    output: str = "runs/april"
    if_exists: Literal["error", "rename"] = "error"
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ("tensorboard",)
    project: str = "april"


@dataclass(kw_only=True)
class Recipe:
    """Every setting of a run, by section."""

    model: ModelSettings = field(default_factory=ModelSettings)
    """What is trained."""
    task: TaskSpec = field(default_factory=lambda: TaskSpec("reasoning_gym", name="gcd"))
    """Problems and rewards."""
    rollout: Annotated[RolloutSettings, FLAT] = field(default_factory=RolloutSettings)
    """How responses are generated."""
    engine: Annotated[EngineSettings, FLAT] = field(default_factory=EngineSettings)
    """What generates them."""
    algorithm: Annotated[AlgorithmSettings, FLAT] = field(default_factory=AlgorithmSettings)
    """What is optimised."""
    training: Annotated[TrainingSettings, FLAT] = field(default_factory=TrainingSettings)
    """How it is optimised."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    """Low-rank adapters."""
    reporting: Annotated[ReportingSettings, FLAT] = field(default_factory=ReportingSettings)
    """What is written, and where."""

    @property
    def over_sampling_batch_size(self) -> int | Literal["auto"]:
        """N' as the policy takes it: the reference's has no way to choose it, and takes 2 N unless it is set."""
        rollout = self.rollout
        if self.first_come and rollout.over_sampling_batch_size == "auto":
            return 2 * rollout.rollout_batch_size
        return rollout.over_sampling_batch_size

    @property
    def max_staleness(self) -> int | None:
        """The bound, which the reference's policy does not have."""
        return None if self.first_come else self.rollout.max_staleness

    @property
    def first_come(self) -> bool:
        """Whether the reference's policy chooses what a step trains on: the groups that are complete first."""
        return self.rollout.policy == "april-paper"

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
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: no text in UTF-8: {error.reason} at byte {error.start}") from None
    try:
        settings = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: no valid TOML: {error}") from None
    if unknown := list(_unknown(path, text, settings)):
        raise ConfigError("\n".join(unknown))
    try:
        recipe: Recipe = TypeAdapter(Recipe).validate_python(settings)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(path, text, problems) for problems in _by_setting(error))) from None
    recipe.model.path = _beside(path, recipe.model.path)
    data, held_out = (value and _beside(path, value) for value in (recipe.task.path, recipe.task.eval_path))
    recipe.task = dataclasses.replace(recipe.task, path=data, eval_path=held_out)
    return recipe


def _beside(recipe: Path, name: str) -> str:
    """A path in a recipe: relative to the recipe's folder if it exists there, else as it is."""
    beside = recipe.parent / name
    return str(beside.resolve()) if name and beside.exists() else name


def recipe_from_dict(settings: Mapping[str, Any]) -> Recipe:
    """The inverse of `Recipe.to_dict`, for a run that is resumed."""
    return TypeAdapter(Recipe).validate_python(settings)


def _unknown(path: Path, text: str, settings: Mapping[str, Any]) -> Iterator[str]:
    """A line for each section or key that no recipe has, with the nearest one that it has."""
    keys = {f.name: [k.name for k in dataclasses.fields(getattr(Recipe(), f.name))] for f in dataclasses.fields(Recipe)}
    for section, values in settings.items():
        if section not in keys:
            home = [f"[{name}]" for name, known in keys.items() if section in known]
            hint = f"it belongs into {home[0]}" if home else _nearest(section, list(keys))
            yield f"{_where(path, text, [section])}: unknown section or setting {section}; {hint}"
        elif isinstance(values, Mapping):
            for key in set(values) - set(keys[section]):
                home = [f"[{name}]" for name, known in keys.items() if key in known]
                hint = f"it belongs into {home[0]}" if home else _nearest(key, keys[section])
                yield f"{_where(path, text, [section, key])}: unknown setting {section}.{key}; {hint}"


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"


def _by_setting(error: ValidationError) -> list[list[Any]]:
    """pydantic's findings; those about the types one setting may have are together."""
    found: dict[tuple[Any, ...], list[Any]] = {}
    for problem in error.errors():
        found.setdefault(problem["loc"][:2], []).append(problem)
    return list(found.values())


def _messages(problems: list[Any]) -> str:
    """What pydantic found about one value, in one line."""
    return "; or: ".join(problem["msg"].removeprefix("Value error, ") for problem in problems)


def _explain(path: Path, text: str, problems: list[Any]) -> str:
    """One line for what pydantic found about a setting: file, line, setting, what is wrong."""
    problem = problems[0]
    location = [str(part) for part in (problem["loc"] if len(problems) == 1 else problem["loc"][:2])]
    message = _messages(problems)
    if problem["type"] == "value_error":
        return f"{_where(path, text, location)}: {'.'.join(location)}.{message}"
    return f"{_where(path, text, location)}: {'.'.join(location)} = {problem['input']!r}: {message}"


def _where(path: Path, text: str, location: list[str]) -> str:
    line = _line(text, location)
    return f"{path}:{line}" if line else str(path)


def setting_line(path: Path, name: str) -> int | None:
    """The line of a recipe on which the setting `section.key` stands, counted from 1; None if it does not."""
    return _line(path.read_text(), name.split("."))


def _line(text: str, location: list[str]) -> int | None:
    """The line of a recipe on which a setting stands, counted from 1."""
    section: str | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[([^\[\]]+)\]", line):
            section = header[1].strip()
            if [section] == location or section.split(".") == location[:2]:
                return number
        elif (key := re.match(r"\s*([\w-]+)\s*=", line)) and [section, key[1]] == location[:2]:
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


def check_engine(settings: EngineSettings) -> None:
    """Bring settings that come from Python, not from a recipe, to their types, and check them.

    Raises:
        ConfigError: with a line for each that is wrong.
    """
    problems = []
    for name, kind in get_type_hints(type(settings)).items():
        try:
            setattr(settings, name, TypeAdapter(kind).validate_python(getattr(settings, name)))
        except ValidationError as error:
            problems.append(f"{name} = {getattr(settings, name)!r}: {_messages(error.errors())}")
    if not problems:
        broken = (*_range_problems("engine", settings), *_engine_problems(settings), *_exposed(settings))
        problems = [line.removeprefix("engine.") for line in broken]
    if problems:
        raise ConfigError("\n".join(problems))


def _problems(recipe: Recipe) -> Iterator[str]:
    rollout, training, task, engine = recipe.rollout, recipe.training, recipe.task, recipe.engine

    for section in dataclasses.fields(recipe):
        yield from _range_problems(section.name, getattr(recipe, section.name))
    batch_size, bound = rollout.rollout_batch_size, recipe.max_staleness
    over_sampling = recipe.over_sampling_batch_size if rollout.partial_rollout else batch_size
    if batch_size > 0 and over_sampling != "auto":
        try:
            FixedAdmission.within(batch_size, over_sampling, bound)
        except ValueError as error:
            yield f"rollout.{error}"
    if rollout.policy == "april-paper" and engine.on_update == "keep":
        yield (
            'rollout.policy = "april-paper" computes unfinished samples anew when the weights change: set '
            'engine.on_update = "recompute"'
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
    for name in ("path", "eval_path"):
        if (value := getattr(task, name)) and not Path(value).is_file():
            yield f"task.{name} = {value!r}: no such file"
    try:
        algorithm(recipe.algorithm.algorithm)
        check_trackers(recipe.reporting.trackers)
    except (ValueError, ModuleNotFoundError) as error:
        yield str(error)
    yield from _correction_problems(recipe.algorithm)
    yield from _engine_problems(engine)
    yield from _exposed(engine)
    for name in ("gamma", "gae_lambda"):
        if (value := getattr(recipe.algorithm, name)) is not None and value > 1:
            yield f"algorithm.{name} = {value}: must lie in [0, 1]"
    if recipe.lora.rank and find_spec("peft") is None:
        yield f'lora.rank = {recipe.lora.rank} needs peft: pip install "april-rl[lora]"'
    if not all(0 <= beta < 1 for beta in training.betas):
        yield f"training.betas = {training.betas}: each must lie in [0, 1)"


def _range_problems(section: str, values: Any) -> Iterator[str]:
    for setting in dataclasses.fields(values):
        name, value = setting.name, getattr(values, setting.name)
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{section}.{name} = {value}: must be a finite number"
        if name in POSITIVE and value not in (None, "auto") and value <= 0:
            yield f"{section}.{name} = {value}: must be positive"
        if name in NOT_NEGATIVE and value is not None and value < 0:
            yield f"{section}.{name} = {value}: must not be negative"


def _engine_problems(engine: EngineSettings) -> Iterator[str]:
    servers = engine.engine in ("vllm", "sglang")
    if engine.urls and not servers:
        yield f'engine.urls is set but engine = "{engine.engine}": choose "vllm" or "sglang", or remove urls'
    for url in engine.urls:
        if not re.fullmatch(r"https?://[^/\s]+/?", url):
            yield f'engine.urls has {url!r}: write each as "http://host:port"'
    if servers and not engine.urls and engine.server_python and shutil.which(engine.server_python) is None:
        yield f"engine.server_python = {engine.server_python!r}: no such interpreter"
    if engine.engine == "vllm-inproc":
        if engine.on_update == "keep":
            yield 'engine.on_update = "keep": vLLM in this process computes anew only; use "recompute"'
        if find_spec("vllm") is None:
            yield (
                'engine.engine = "vllm-inproc" needs vLLM in this environment: install it here, or use "vllm", whose '
                "server may have an environment of its own (engine.server_python)"
            )


def _correction_problems(settings: AlgorithmSettings) -> Iterator[str]:
    name = settings.correction
    if name not in CORRECTIONS:
        yield f"algorithm.correction = {name!r}: {_nearest(name, list(CORRECTIONS))}"
        return
    rule, own = CORRECTIONS[name], settings.correction_bounds
    for bound in own:
        if bound not in rule.bounds and bound != "max_age":
            having = ", ".join(kind for kind, other in CORRECTIONS.items() if bound in other.bounds)
            yield (
                f"algorithm.correction_{bound} does not apply to correction = {name!r}: remove it, or choose one of "
                f"{having}"
            )
    bounds = rule.bounds | own
    if "low" in bounds and bounds["low"] > bounds.get("high", UNBOUNDED):
        yield (
            f"algorithm.correction_low = {bounds['low']:g} is above correction_high = {bounds['high']:g}: nothing "
            "would be left to train on"
        )


def _exposed(engine: EngineSettings) -> Iterator[str]:
    """What would show a server or a key to those it is not meant for."""
    for url in engine.urls:
        if "@" in urlsplit(url).netloc:
            yield f"engine.urls holds a password: leave it out, and put the servers' key into {API_KEY} instead"
    for option in (argument.partition("=")[0] for argument in engine.server_args):
        if option == "--host":
            yield "engine.server_args names --host: set engine.server_host instead"
        elif re.fullmatch(r"--(\w+-)?api-key|--hf-token|--.*password", option):
            yield (
                f"engine.server_args names {option}: everybody on the machine sees the options of a process; put the "
                f"key into the environment (the servers' own as {API_KEY})"
            )
    if not is_loopback(engine.server_host) and not os.environ.get(API_KEY):
        yield (
            f"engine.server_host = {engine.server_host!r} can be reached from other machines: set the environment "
            f'variable {API_KEY} to a key that the servers ask for, or server_host to "127.0.0.1"'
        )


POSITIVE = {
    "rollout_batch_size",
    "over_sampling_batch_size",
    "n_samples_per_prompt",
    "max_response_length",
    "max_prompt_length",
    "reward_timeout",
    "reward_memory_gb",
    "max_running",
    "context_length",
    "kv_cache_gb",
    "stream_interval",
    "replicas",
    "ready_timeout",
    "steps",
    "updates_per_step",
    "learning_rate",
    "critic_learning_rate",
    "correction_cap",
    "correction_high",
    "dual_clip",
    "value_clip",
    "max_grad_norm",
    "max_tokens_per_micro_batch",
    "max_skipped_updates",
    "alpha",
    "threads",
    "eval_samples",
    "keep_checkpoints",
    "max_rejected_groups",
}
NOT_NEGATIVE = {
    "max_staleness",
    "reward_workers",
    "weight_decay",
    "warmup_steps",
    "eval_interval",
    "save_interval",
    "journal_delay",
    "eval_temperature",
    "seed",
    "kl_coef",
    "eps_low",
    "eps_high",
    "correction_low",
    "correction_tau",
    "correction_max_age",
    "gamma",
    "gae_lambda",
    "rank",
}
