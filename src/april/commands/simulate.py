"""`april simulate RECIPE`: what a recipe would do on a cluster, in virtual time."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from april.commands.arguments import read_options, read_recipe, ready_for_output
from april.config.error import ConfigError
from april.config.recipe import Recipe
from april.simulation.cluster import Cluster, gpu_cluster
from april.simulation.cost_model import CostModel, CostModelError
from april.simulation.hardware import GPUS, MODELS
from april.simulation.model_shape import shape_of
from april.simulation.page import PRICED, print_points, simulation_page
from april.simulation.plan import Point, advice, arms, cut_off, explore, recommended, workload_of
from april.simulation.recorded import Recorded, read_recorded
from april.simulation.workload import WORKLOADS, Workload


@dataclass(kw_only=True)
class Options:
    """What a recipe would do on a cluster, in virtual time: the scheduler that real runs use, over engines that follow
    a cost model. Tries synchronous rollouts and several N', draws throughput against staleness, and recommends the
    smallest N' that comes within 3 % of the best.

    What an engine's work costs comes from a measurement (--cost-model takes a file that april calibrate wrote), or from
    a roofline of a GPU and the recipe's own model. How long responses are comes from a run (--lengths-from), or is one
    of a few named shapes (--workload). Engines and training share the GPUs, or have GPUs of their own
    (--training-gpus); they take turns, whatever --overlap says."""

    cost_model: Path | None = None
    """What an engine's work costs, slots included, as april calibrate measured it."""
    lengths_from: Path | None = None
    """A run whose response lengths are taken, and its training time where no hardware is named."""
    workload: str | None = None
    """How long responses are if no run says it: light, lognormal (unset), heavy, bimodal, truncated, drifting, …"""
    prompt_tokens: int = 200
    """Median prompt length."""
    hardware: Literal["h100", "h200", "mi300x"] | None = None
    """The GPU. Unset: an h100, or with a cost model none."""
    model: Literal["qwen3-4b", "qwen3-8b", "r1-distill-1.5b", "glm4-9b"] | None = None
    """Another model's shape than that of the recipe's own."""
    gpus: int | None = None
    """GPUs in all, an engine on each that does not only train. Unset: 8, or as many engines as the recipe has."""
    training_gpus: int = 0
    """GPUs that only train, so that engines have more room for KV caches. 0: generation and training take turns."""
    price: float | None = None
    """Of a GPU for an hour, to see what a million tokens cost."""
    steps: int = 40
    """Steps to simulate of each setting."""
    warm_up: int = 10
    """Steps that figures leave out, while the buffer fills."""
    output: Path = Path("runs/simulation")
    """Where simulation.html and simulation.json are written."""

    def __post_init__(self) -> None:
        for name in ("gpus", "price", "steps", "prompt_tokens"):
            if (value := getattr(self, name)) is not None and not 0 < value < float("inf"):
                raise ConfigError(f"--{name.replace('_', '-')} {value}: must be positive")
        if not 0 <= self.training_gpus < (gpus := self.gpus or 8):
            raise ConfigError(f"--training-gpus {self.training_gpus}: must leave at least one of --gpus {gpus}")
        if not 0 <= self.warm_up < self.steps:
            raise ConfigError(f"--warm-up {self.warm_up}: must leave at least one of --steps {self.steps}")
        if self.workload is not None and self.workload not in WORKLOADS:
            raise ConfigError(f"--workload {self.workload}: there are {', '.join(WORKLOADS)}")
        if self.workload is not None and self.lengths_from is not None:
            raise ConfigError("--workload and --lengths-from: choose one")
        if self.cost_model is not None and self.hardware is None and (self.price or self.training_gpus):
            raise ConfigError("--price and --training-gpus are those of GPUs: name them by --hardware")


@dataclass(frozen=True)
class Simulation:
    """All that a simulation goes by."""

    recipe: Recipe
    cluster: Cluster
    workload: Workload
    recorded: Recorded | None
    options: Options

    @property
    def hint(self) -> str:
        """What makes its figures say little; "" for nothing."""
        return cut_off(workload_of(self.recipe, self.workload))

    @property
    def subtitle(self) -> str:
        rollout = self.recipe.rollout
        lengths = f"lengths of {self.workload.name}" if self.recorded else f"{self.workload.name} lengths"
        return f"{rollout.rollout_batch_size} prompts × {rollout.n_samples_per_prompt} samples, {lengths}"

    @property
    def assumptions(self) -> str:
        """What the figures rest on, in plain sentences."""
        cost, price = self.cluster.cost, self.options.price
        return " ".join(
            (
                f"Costs: {cost.source or self.options.cost_model}; {cost.slots} slots and {cost.kv_tokens:,} tokens of "
                "KV cache an engine.",
                f"{self._lengths}, cut off at {self.recipe.rollout.max_response_length:,} tokens; prompts of "
                f"{self.options.prompt_tokens:,} tokens in the middle.",
                self.cluster.training,
                *([f"A GPU costs {price:g} an hour."] if price else []),
            )
        )

    @property
    def _lengths(self) -> str:
        if self.recorded is None:
            return f"Lengths: the workload {self.workload.name}"
        cut = f" ({self.recorded.truncated:.0%} of which its own budget cut off)" if self.recorded.truncated else ""
        return f"Lengths: the {len(self.workload.observed):,} responses of {self.workload.name}{cut}"


def run(args: list[str]) -> int:
    """`april simulate RECIPE [OPTIONS] [FLAGS OF april train]`."""
    path, options, flags = read_options(Options, "april simulate", args)
    recipe = read_recipe([path, *flags], "april simulate")
    try:
        simulation = simulation_of(recipe, options)
        ready_for_output(options.output)
        points = _explore(simulation)
    except (CostModelError, ValueError) as error:
        raise ConfigError(str(error)) from None
    _write(f"{Path(path).stem}: {simulation.cluster.name}", simulation, points, args)
    return 0


def simulation_of(recipe: Recipe, options: Options) -> Simulation:
    """What the recipe is simulated on, and with which lengths.

    Raises:
        CostModelError, ValueError: a file holds no cost model or no run, or a model does not fit its GPUs.
    """
    recorded = None if options.lengths_from is None else read_recorded(options.lengths_from)
    workload = recorded.workload if recorded else WORKLOADS[options.workload or "lognormal"]
    cluster = _cluster(recipe, options)
    if recorded and recorded.train_token_seconds and not cluster.gpus:
        cluster = cluster.trained_as_in(workload.name, recorded.train_token_seconds)
    lengths = dataclasses.replace(workload, prompt_tokens=options.prompt_tokens)
    return Simulation(recipe, cluster, lengths, recorded, options)


def _cluster(recipe: Recipe, options: Options) -> Cluster:
    measured = None if options.cost_model is None else CostModel.load(options.cost_model)
    if measured is not None and options.hardware is None:
        engines = options.gpus or len(recipe.engine.urls) or recipe.engine.replicas
        name = f"{engines} engine{'s' * (engines > 1)} as in {options.cost_model}"
        return Cluster(name=name, engines=engines, cost=measured)
    return gpu_cluster(
        GPUS[options.hardware or "h100"],
        MODELS[options.model] if options.model else shape_of(recipe.model.path),
        options.gpus or 8,
        slots=recipe.engine.max_running,
        training_gpus=options.training_gpus,
        lora=bool(recipe.lora.rank),
        price=options.price,
        measured=measured,
    )


def _explore(simulation: Simulation) -> list[Point]:
    """Every setting, simulated while one watches."""
    points: list[Point] = []
    recipe, options = simulation.recipe, simulation.options
    console, count = Console(stderr=True), len(arms(recipe))
    with console.status(f"0 of {count} settings simulated") as status:
        for point in explore(recipe, simulation.workload, simulation.cluster, options.steps, options.warm_up):
            points.append(point)
            rate = f"{point.name}: {point.consumed_tokens_per_second:,.0f} consumed tokens/s"
            done = f"{len(points)} of {count} settings simulated; {rate}"
            status.update(done)
            if not console.is_terminal:  # where nobody sees a status
                print(done, file=sys.stderr, flush=True)
    return points


def _write(title: str, simulation: Simulation, points: Sequence[Point], args: Sequence[str]) -> None:
    """Print the table and the recommendation, and write both with what they rest on."""
    chosen, output = recommended(points), simulation.options.output
    hint = " ".join(filter(None, (simulation.hint, advice(chosen))))
    page = simulation_page(title, simulation.subtitle, points, chosen, hint, simulation.assumptions)
    (output / "simulation.html").write_text(page, encoding="utf-8")
    document: dict[str, Any] = {
        "command": " ".join(["april", "simulate", *args]),
        "assumptions": simulation.assumptions,
        "hint": hint,
        "cost_model": dataclasses.asdict(simulation.cluster.cost),
        "settings": [point.to_dict() for point in points],
        "recommended": chosen.to_dict(),
    }
    (output / "simulation.json").write_text(json.dumps(document, indent=2) + "\n")
    print(f"{title}\n{simulation.subtitle}")
    print_points(points, chosen)
    rates = f"Tokens per second of rollout{PRICED if simulation.options.price else ''}."
    for line in ("", rates, simulation.assumptions, hint and f"\n{hint}", f"\nrecommended: {chosen.name}"):
        Console().print(line, markup=False, highlight=False)
    print(f"written: {output / 'simulation.html'}")
