"""`april check RECIPE`: a dry run that shows devices, memory, batches and data before anything is loaded.

Invariant: neither weights nor a tokenizer are read, no process is started, and no GPU is used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from april.commands.arguments import check_context, read_options, read_recipe
from april.commands.assumed import Shape, assume_gpus, configuration, known_model
from april.commands.failure import fail
from april.config.error import ConfigError
from april.config.machine import visible_gpus
from april.config.recipe import Recipe
from april.engines.gpus import Gpu

if TYPE_CHECKING:
    from april.tasks.task import Split, Task
    from april.training.memory_plan import MemoryPlan


@dataclass(kw_only=True)
class CheckOptions:
    """Dry run: print the task of each GPU, the memory of each phase and whether it fits, the engines, the batch shapes
    and the data columns. Only the configuration of the model is read. Files of images must exist, and are not read.

    Exit status 1: a phase does not fit the GPUs. Exit status 2: the recipe is invalid."""

    gpus: int | None = None
    """Number of GPUs of the target machine. Unset: the GPUs of this machine."""
    gpu_memory: float | None = None
    """Memory of each GPU, in GB."""
    model: Shape | None = None
    """Model shape that replaces the recipe's model."""
    data: bool = False
    """Also read data sets of the hub, and download missing ones. Local files are always read."""
    run: Path | None = None
    """Finished run or profile of this recipe. From its share of resumed prefill follows whether engine.on_update = keep
    is advised, which a dry run cannot measure."""

    def __post_init__(self) -> None:
        if (self.gpus is None) != (self.gpu_memory is None):
            raise ConfigError("--gpus and --gpu-memory describe a machine together: name both, or none")
        for name in ("gpus", "gpu_memory"):
            if (value := getattr(self, name)) is not None and not 0 < value < float("inf"):
                raise ConfigError(f"--{name.replace('_', '-')} {value}: must be positive")

    def machine(self) -> list[Gpu]:
        """Return the GPUs of the target machine."""
        if self.gpus is None or self.gpu_memory is None:
            return visible_gpus()
        return [Gpu(str(number), number, total=int(self.gpu_memory * 1e9)) for number in range(self.gpus)]


def run(args: list[str]) -> int:
    """`april check RECIPE [OPTIONS] [FLAGS OF april train]`."""
    path, options, flags = read_options(CheckOptions, "april check", args)
    with configuration(options.model) as shape:
        given = [path, *flags, *(["--model.path", shape] if shape else [])]
        recipe = read_recipe(given, "april check", loads=False)
        gpus = options.machine()
        if gpus:
            assume_gpus(recipe)
        # Filled by `_memory` while its lines are printed.
        misfits: list[str] = []
        from april.training.megatron_package import check_megatron
        from april.training.memory_plan import plan_memory

        check_megatron(recipe.trainer.backend)
        with known_model(recipe):
            check_context(recipe.model, recipe.rollout, recipe.engine)
            plan = plan_memory(recipe)
            for title, lines in (
                ("devices", _devices(recipe, gpus)),
                ("model", _model(recipe, plan)),
                ("memory", _memory(recipe, plan, gpus, misfits)),
                ("engines", _engines(recipe, options.run)),
                ("steps", _steps(recipe)),
                ("data", _data(recipe, options.data)),
            ):
                print(f"{title}:")
                for line in lines:
                    print(f"  {line}")
    if not misfits:
        return 0
    return fail(f"{' and '.join(misfits)} {'do' if len(misfits) > 1 else 'does'} not fit the GPUs", 1)


def _devices(recipe: Recipe, gpus: list[Gpu]) -> Iterator[str]:
    from april.training.device_map import device_map, device_rows

    devices = device_map(recipe, gpus)
    if devices is None:
        yield "a cluster assigns them" if recipe.cluster.enabled else "no GPU: everything computes on the CPU"
        return
    for gpu, task in device_rows(recipe, devices):
        yield f"{gpu:<12}{task}"


def _model(recipe: Recipe, plan: MemoryPlan) -> Iterator[str]:
    computed = f", computed in {recipe.compute_dtype}" * (recipe.compute_dtype != recipe.model.dtype)
    processes = f"{recipe.trainer.processes} process{'es' * (recipe.trainer.processes > 1)}"
    backend = recipe.trainer.backend_name
    yield f"{plan.parameters:,} parameters, {recipe.model.dtype}{computed}; {backend}, {processes}"
    if plan.experts:
        yield f"experts of a layer: {plan.experts}"


def _memory(recipe: Recipe, plan: MemoryPlan, gpus: list[Gpu], misfits: list[str]) -> Iterator[str]:
    from april.training.memory_check import phases, verdict
    from april.training.memory_plan import USABLE

    smallest = min((gpu.total for gpu in gpus), default=0)
    if plan.host:
        every = recipe.trainer.processes * sum(plan.host.values()) / 1e9
        yield f"in the machine's memory: {every:.1f} GB ({', '.join(plan.host)})"
    if not smallest:
        for phase in phases(plan, recipe):
            yield f"{phase.name:<18}{phase.total / 1e9:10.3f} GB"
        yield "no verdict: --gpus and --gpu-memory name the GPUs that the run is for"
        return
    yield from (line.removeprefix("  ") for line in verdict(plan, recipe, smallest))
    yield (
        f"the other {smallest * (1 - USABLE) / 1e9:.1f} GB are for contexts, CUDA graphs, NCCL's buffers and "
        "fragmentation (assumed, not measured)"
    )
    misfits += [phase.name for phase in phases(plan, recipe, smallest) if phase.total > smallest * USABLE]


def _engines(recipe: Recipe, run: Path | None) -> Iterator[str]:
    engine = recipe.engine
    context = f"context {engine.context_length:,}" if engine.context_length else "the model's own context"
    shape = f"{recipe.slots} slots, {context}, on_update = {engine.on_update}"
    if recipe.cluster.enabled:
        yield f"{engine.engine} on the cluster, {recipe.cluster.replicas} engines: {shape}"
    elif engine.urls:
        yield f"{len(engine.urls)} running {engine.engine} servers: {shape}; weights by {engine.weight_transfer}"
    elif names := recipe.engines_here:
        each = f", {recipe.gpus_per_engine} GPU(s) each" * (engine.engine in ("vllm", "sglang"))
        yield f"april starts {', '.join(names)}{each}: {shape}; weights by {engine.weight_transfer}"
    else:
        yield f"{engine.engine} in the trainer's process: {shape}"
    yield f"generation goes on during training: {'yes' if recipe.overlaps else 'no'}"
    if run is not None:
        from april.commands.kept_caches import advice_from

        yield advice_from(recipe, run)


def _steps(recipe: Recipe) -> Iterator[str]:
    rollout, training = recipe.rollout, recipe.training
    size, group, target = rollout.rollout_batch_size, rollout.n_samples_per_prompt, recipe.rollout_params()
    most = target.over_sampling_batch_size
    flight = f"N' = {most}: {most * group:,} samples in flight" if isinstance(most, int) else "N' chosen by the run"
    if not rollout.partial_rollout:
        flight = "synchronous"
    slots = recipe.slots * max(recipe.engines_beside, 1)
    yield f"N = {size} groups of G = {group}: {size * group:,} samples a step; {flight}; {slots:,} engine slots"
    prompt = f"{rollout.max_prompt_length:,}" if rollout.max_prompt_length else "as many as the context leaves room for"
    yield f"prompts of at most {prompt} tokens, responses of at most {rollout.max_response_length:,}"
    data_ranks = recipe.trainer.processes // (recipe.trainer.context_parallel * recipe.trainer.tensor_parallel)
    each = f" on each of {data_ranks} ranks" if data_ranks > 1 else ""
    yield (
        f"micro-batches of at most {training.max_tokens_per_micro_batch:,} tokens{each}; "
        f"{training.updates_per_step} update(s) a step, {training.steps} steps"
    )


def _data(recipe: Recipe, fetch: bool) -> Iterator[str]:
    from april.tasks.bad_records import settle
    from april.tasks.build import build_task, in_recipe
    from april.tasks.images import image_sources

    task = recipe.task
    if task.kind == "records":
        columns = {"prompt": task.prompt_column, "images": task.image_column, "answer": task.answer_column}
        named = [f"{name} from {column!r}" for name, column in columns.items() if column]
        kept = task.metadata_columns
        named.append("all other columns" if kept is None else f"columns {', '.join(map(repr, kept)) or 'none'} beside")
        yield f"{task.path}: {', '.join(named)}"
        if not os.path.exists(task.path or "") and not fetch:
            yield "not read: a data set of the hub (--data reads it, and fetches it if it is not here)"
            return
    try:
        built = build_task(task)
        if task.kind == "records":
            settle(_without_images(built), len(built) + built.eval_size, "prompts", task.bad_records)
    except ValueError as error:
        raise ConfigError(in_recipe(error)) from None
    first = built.problem(0)
    images = len(image_sources(first.prompt))
    yield (
        f"{len(built):,} problems to train on, {built.eval_size} held out; the first begins {first.question[:60]!r}"
        + f", with {images} image{'s' * (images > 1)}" * (images > 0)
    )


def _without_images(task: Task) -> list[str]:
    """Return an error message for each problem whose images are not all there; images inside data sets are not read."""
    from april.tasks.images import image_sources

    found: list[str] = []
    splits: tuple[tuple[Split, int], ...] = (("train", len(task)), ("eval", task.eval_size))
    for split, count in splits:
        for problem in (task.problem(index, split) for index in range(count)):
            missing = (s for s in image_sources(problem.prompt) if "#" not in s and not os.path.isfile(s))
            if source := next(missing, None):
                found.append(f"{task.place(problem, split)}: image {source}: there is no such file")
    return found
