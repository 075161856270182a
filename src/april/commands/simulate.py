"""`april simulate RECIPE`: what a recipe would do on a cluster, in virtual time."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console

from april.commands.arguments import read_options, read_recipe, ready_for_output
from april.config.error import ConfigError
from april.config.recipe import Recipe
from april.simulation import hardware
from april.simulation.cost_model import CostModel, CostModelError
from april.simulation.page import print_points, simulation_page
from april.simulation.plan import Cluster, Point, advice, arms, explore, recommended
from april.simulation.workload import WORKLOADS


@dataclass(kw_only=True)
class Options:
    """What a recipe would do on a cluster, in virtual time: the scheduler that real runs use, over engines that follow
    a cost model. Tries synchronous rollouts and several N', draws throughput against staleness, and recommends the
    smallest N' that comes within 3 % of the best.

    Engines and training share the GPUs and take turns (colocated), or have GPUs of their own (--training-gpus). Costs
    come from a roofline of GPU and model, or from a measurement: --cost-model takes a file that april calibrate
    wrote."""

    gpus: int = 8
    """GPUs in all, one engine on each that is not set aside for training."""
    training_gpus: int = 0
    """GPUs that only train, while the engines wait; their memory leaves the engines more room for KV caches. 0: the
    GPUs take turns."""
    hardware: Literal["h100", "h200", "mi300x"] = "h100"
    """The GPU."""
    model: Literal["qwen3-4b", "qwen3-8b", "r1-distill-1.5b"] = "qwen3-8b"
    """The model's shape."""
    cost_model: Path | None = None
    """A measured cost model, slots included, in place of the roofline's. Training time still comes from hardware and
    model."""
    workload: str = "lognormal"
    """How long responses are: light, lognormal, heavy, bimodal, truncated, drifting or group-correlated."""
    price: float = 2.0
    """Of a GPU for an hour."""
    steps: int = 40
    """Steps to simulate of each setting."""
    warm_up: int = 10
    """Steps that figures leave out, while the buffer fills."""
    output: Path = Path("runs/simulation")
    """Where simulation.html and simulation.json are written."""

    def __post_init__(self) -> None:
        for name in ("gpus", "price", "steps"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"--{name} {getattr(self, name)}: must be positive")
        if not 0 <= self.training_gpus < self.gpus:
            raise ConfigError(f"--training-gpus {self.training_gpus}: must leave at least one of --gpus {self.gpus}")
        if not 0 <= self.warm_up < self.steps:
            raise ConfigError(f"--warm-up {self.warm_up}: must leave at least one of --steps {self.steps}")
        if self.workload not in WORKLOADS:
            raise ConfigError(f"--workload {self.workload}: there are {', '.join(WORKLOADS)}")


def run(args: list[str]) -> int:
    """`april simulate RECIPE [OPTIONS] [FLAGS OF april train]`."""
    path, options, flags = read_options(Options, "april simulate", args)
    recipe = read_recipe([path, "--model.path", options.model, *flags], "april simulate")
    try:
        cluster = cluster_of(options, recipe)
        ready_for_output(options.output)
        points = _explore(recipe, options, cluster)
    except (CostModelError, ValueError) as error:
        raise ConfigError(str(error)) from None
    title = f"{Path(path).stem}: {options.model} on {options.gpus} × {options.hardware}"
    _write(title, recipe, options, cluster, points, args)
    return 0


def cluster_of(options: Options, recipe: Recipe) -> Cluster:
    """What the recipe is simulated on.

    Raises:
        CostModelError: the file holds no cost model.
        ValueError: model and trainer do not fit the GPUs.
    """
    gpu, shape = hardware.GPUS[options.hardware], hardware.MODELS[options.model]
    training = hardware.training_seconds_per_token(gpu, shape, options.training_gpus or options.gpus)
    return Cluster(
        gpus=options.gpus,
        engines=options.gpus - options.training_gpus,
        cost=_cost(options, recipe),
        train_token_seconds=training,
        price=options.price,
    )


def _cost(options: Options, recipe: Recipe) -> CostModel:
    gpu, shape = hardware.GPUS[options.hardware], hardware.MODELS[options.model]
    state = hardware.LORA_TRAINER_BYTES if recipe.lora.rank else hardware.TRAINER_BYTES
    if options.training_gpus:
        hardware.check_trainer(gpu, shape, options.training_gpus, state)
    if options.cost_model is not None:
        return CostModel.load(options.cost_model)
    given, shared = hardware.Roofline(slots=recipe.engine.max_running), 0 if options.training_gpus else options.gpus
    return hardware.roofline(gpu, shape, given, trainer_gpus=shared, trainer_bytes=state)


def _explore(recipe: Recipe, options: Options, cluster: Cluster) -> list[Point]:
    """Every setting, simulated while one watches."""
    points: list[Point] = []
    console, count = Console(stderr=True), len(arms(recipe))
    with console.status(f"0 of {count} settings simulated") as status:
        for point in explore(recipe, WORKLOADS[options.workload], cluster, options.steps, options.warm_up):
            points.append(point)
            rate = f"{point.name}: {point.consumed_tokens_per_second:,.0f} consumed tokens/s"
            done = f"{len(points)} of {count} settings simulated; {rate}"
            status.update(done)
            if not console.is_terminal:  # where nobody sees a status
                print(done, file=sys.stderr, flush=True)
    return points


def _write(
    title: str, recipe: Recipe, options: Options, cluster: Cluster, points: Sequence[Point], args: Sequence[str]
) -> None:
    """Print the table and the recommendation, and write both with what they rest on."""
    rollout, chosen = recipe.rollout, recommended(points)
    subtitle = (
        f"{rollout.rollout_batch_size} prompts × {rollout.n_samples_per_prompt} samples, {options.workload} lengths"
    )
    assumptions, hint = _assumptions(recipe, options, cluster), advice(chosen)
    page = simulation_page(title, subtitle, points, chosen, f"{hint} {assumptions}".strip())
    (options.output / "simulation.html").write_text(page, encoding="utf-8")
    document = {
        "command": " ".join(["april", "simulate", *args]),
        "assumptions": assumptions,
        "cost_model": dataclasses.asdict(cluster.cost),
        "settings": [point.to_dict() for point in points],
        "recommended": chosen.to_dict(),
    }
    (options.output / "simulation.json").write_text(json.dumps(document, indent=2) + "\n")
    print(f"{title}\n{subtitle}")
    print_points(points, chosen)
    said = f"\n{assumptions}\n\nTokens per second of rollout; cost of a million consumed tokens, training included."
    for line in (said, f"recommended: {chosen.name}", hint):
        if line:
            Console().print(line, markup=False, highlight=False)
    print(f"written: {options.output / 'simulation.html'}")


def _assumptions(recipe: Recipe, options: Options, cluster: Cluster) -> str:
    cost = cluster.cost
    place = f"{options.training_gpus} GPUs of its own" if options.training_gpus else "the same GPUs"
    return (
        f"Costs: {cost.source or options.cost_model}; {cost.slots} slots and {cost.kv_tokens:,} tokens of KV cache an "
        f"engine. Lengths: the workload {options.workload}, cut off at {recipe.rollout.max_response_length:,} tokens. "
        f"Training takes {cluster.train_token_seconds * 1e6:.3g} s for a million tokens and alternates with rollouts, "
        f"on {place}. A GPU costs {options.price:g} an hour."
    )
