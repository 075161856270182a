"""`april simulate RECIPE`: predict throughput and staleness of a recipe in virtual time."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from april.commands.arguments import read_options, read_recipe, ready_for_output
from april.commands.assumed import Shape
from april.config.error import ConfigError
from april.config.recipe import Recipe
from april.simulation.cluster import Cluster, gpu_cluster, least_training_gpus
from april.simulation.cost_model import CostModel, CostModelError
from april.simulation.hardware import GPUS, LORA_TRAINER_BYTES, MODELS, OFFLOADED_BYTES, TRAINER_BYTES
from april.simulation.layouts import Layout, compare, sentence
from april.simulation.model_shape import shape_of
from april.simulation.page import about_rates, print_points, simulation_page
from april.simulation.plan import (
    Point,
    advice,
    arms,
    cut_off,
    explore,
    kept_caches,
    overlapping_rate,
    quantiles,
    recommended,
    workload_of,
)
from april.simulation.price import price
from april.simulation.recorded import Recorded, read_recorded
from april.simulation.split import Split, best, try_splits
from april.simulation.turn_over import TurnOver
from april.simulation.turns import Turns
from april.simulation.workload import WORKLOADS, Workload


@dataclass(kw_only=True)
class SimulateOptions:
    """Predict a recipe's throughput and staleness in virtual time: the scheduler of real runs drives engines that
    follow a cost model. The command simulates synchronous rollouts and several N', plots throughput against staleness,
    and recommends the least stale setting within 3 % of the best, after dividing each rate by the additional steps that
    staleness costs.

    Engine costs come from a measurement (--cost-model FILE, written by april calibrate) or from a roofline model of a
    GPU and the recipe's model. Response lengths come from a run (--lengths-from) or a named distribution (--workload).
    Engines and training alternate on the same GPUs or have GPUs of their own (--training-gpus). If the recipe allows
    overlap (--overlap), both layouts are simulated, with the split of the GPUs that trains on most tokens. The baseline
    is synchronous rollouts on all GPUs, which then all train, if they fit."""

    cost_model: Path | None = None
    """Cost model with the number of slots, written by april calibrate."""
    lengths_from: Path | None = None
    """Run that provides the response lengths and, without --hardware, the training time."""
    workload: str | None = None
    """Distribution of response lengths without --lengths-from: light, lognormal (default), heavy, bimodal, …"""
    prompt_tokens: int = 200
    """Median prompt length."""
    turn_tokens: float | None = None
    """Mean number of the policy's tokens in a turn, for multi-turn episodes. Unset: as in the run of --lengths-from, or
    a single turn."""
    observation_tokens: int = 0
    """Tokens of each observation of the environment, which are prefilled."""
    environment_seconds: float = 0.0
    """Mean time of an environment step in seconds, during which the sample holds no slot."""
    environment_sigma: float = 0.0
    """Standard deviation of the logarithm of that time: 0 for constant, 1.5 for a heavy tail."""
    hardware: Literal["a100", "h100", "h200", "b200", "mi300x"] | None = None
    """GPU model. Unset: h100, or none with a cost model."""
    model: Shape | None = None
    """Model shape that replaces the recipe's model."""
    gpus: int | None = None
    """Total number of GPUs. Each GPU that does not only train holds an engine, or a part of one if the recipe's servers
    are split. Unset: the GPUs of the recipe's processes and servers, otherwise 8; with a cost model, the recipe's
    engines."""
    training_gpus: int | None = None
    """GPUs that only train. Unset: the recipe's processes if it has servers, the best split if it overlaps, otherwise
    0."""
    layouts: bool = False
    """Compare GPUs that generate and train in turn (shared) with GPUs of which some only train (split), instead of
    several N'."""
    sleep_seconds: float = TurnOver.sleep_seconds
    """Seconds in which sleeping engines release their memory, with --layouts or trainer.layout = shared."""
    wake_seconds: float = TurnOver.wake_seconds
    """Seconds in which engines allocate their memory again."""
    host_bandwidth: float = TurnOver.host_bandwidth / 1e9
    """GB/s between host memory and each GPU, for the trainer's state."""
    price: float | None = None
    """Price of a GPU hour, for the price of a million tokens."""
    steps: int = 40
    """Simulated steps per setting."""
    warm_up: int = 10
    """First steps that the figures leave out while the buffer fills."""
    output: Path = Path("runs/simulation")
    """Output directory of simulation.html and simulation.json."""

    def __post_init__(self) -> None:
        for name in ("gpus", "price", "steps", "prompt_tokens", "host_bandwidth"):
            if (value := getattr(self, name)) is not None and not 0 < value < float("inf"):
                raise ConfigError(f"--{name.replace('_', '-')} {value}: must be positive")
        if self.turn_tokens is None and (self.observation_tokens or self.environment_seconds or self.environment_sigma):
            raise ConfigError(
                "--turn-tokens: set the length of a turn; --observation-tokens and the environment times need it"
            )
        if not 0 <= self.warm_up < self.steps:
            raise ConfigError(f"--warm-up {self.warm_up}: must leave at least one of --steps {self.steps}")
        if self.workload is not None and self.workload not in WORKLOADS:
            raise ConfigError(f"--workload {self.workload}: there are {', '.join(WORKLOADS)}")
        if self.workload is not None and self.lengths_from is not None:
            raise ConfigError("--workload and --lengths-from: choose one")
        if min(self.sleep_seconds, self.wake_seconds) < 0:
            raise ConfigError("--sleep-seconds and --wake-seconds: must not be negative")
        if self.cost_model is not None and self.hardware is None and (self.price or self.training_gpus or self.layouts):
            raise ConfigError("--price, --training-gpus and --layouts are those of GPUs: name them by --hardware")

    @property
    def turn_over(self) -> TurnOver:
        return TurnOver(
            sleep_seconds=self.sleep_seconds,
            wake_seconds=self.wake_seconds,
            host_bandwidth=self.host_bandwidth * 1e9,
        )


@dataclass(frozen=True)
class Simulation:
    """Inputs of a simulation."""

    recipe: Recipe
    cluster: Cluster
    workload: Workload
    recorded: Recorded | None
    options: SimulateOptions
    splits: Sequence[Split] = ()
    """Simulated splits of the GPUs between engines and trainer."""
    baseline: Cluster | None = None
    """The same GPUs in both roles, if the recipe splits them and both fit."""
    no_baseline: str = ""
    """Reason for a missing baseline, if the recipe splits its GPUs."""

    @property
    def turns(self) -> Turns | None:
        """Turns of episodes: from the options, otherwise from the run."""
        return turns_of(self.options, self.recorded)

    @property
    def hint(self) -> str:
        """Reason why the figures are unreliable; "" if there is none."""
        return cut_off(workload_of(self.recipe, self.workload))

    @property
    def subtitle(self) -> str:
        rollout = self.recipe.rollout
        lengths = f"lengths of {self.workload.name}" if self.recorded else f"{self.workload.name} lengths"
        return f"{rollout.rollout_batch_size} prompts × {rollout.n_samples_per_prompt} samples, {lengths}"

    @property
    def assumptions(self) -> str:
        """Return the assumptions behind the figures as sentences."""
        cost, price = self.cluster.cost, self.options.price
        return " ".join(
            (
                f"Costs: {cost.source or self.options.cost_model}; {cost.slots} slots and {cost.kv_tokens:,} tokens of "
                "KV cache an engine.",
                *self._episodes,
                f"{self._lengths}, cut off at {self.recipe.rollout.max_response_length:,} tokens: "
                f"{quantiles(workload_of(self.recipe, self.workload))}; prompts of "
                f"{self.options.prompt_tokens:,} tokens in the middle.",
                self.cluster.training,
                *([f"No baseline on all GPUs: {self.no_baseline}."] if self.no_baseline else []),
                *self._split,
                *([f"A GPU costs {price:g} an hour."] if price else []),
            )
        )

    @property
    def _split(self) -> Iterator[str]:
        if self.splits:
            tried = ", ".join(f"{split.training_gpus} ({split.tokens_per_second:,.0f})" for split in self.splits)
            yield f"GPUs that train, and tokens/s trained on beside generation at about N' = 2 N: {tried}."
        if self.recipe.overlaps and not self.cluster.separate:
            yield "Nothing overlaps: training has no time, or no devices of its own."

    @property
    def _episodes(self) -> Iterator[str]:
        if self.turns is not None:
            yield (
                f"Episodes: turns of {self.turns.tokens:,.0f} tokens on average, answered with "
                f"{self.turns.observation_tokens:,} tokens in {self.turns.seconds:g} s on average "
                f"(sigma {self.turns.sigma:g}); a sample that waits holds no slot and no room in the KV cache."
            )

    @property
    def _lengths(self) -> str:
        if self.recorded is None:
            return f"Lengths: the workload {self.workload.name}"
        cut = f" ({self.recorded.truncated:.0%} of which its own budget cut off)" if self.recorded.truncated else ""
        return f"Lengths: the {len(self.workload.observed):,} responses of {self.workload.name}{cut}"


def run(args: list[str]) -> int:
    """`april simulate RECIPE [OPTIONS] [FLAGS OF april train]`."""
    path, options, flags = read_options(SimulateOptions, "april simulate", args)
    recipe = read_recipe([path, *flags], "april simulate")
    if options.layouts:
        return _compare_layouts(recipe, options)
    try:
        simulation = simulation_of(recipe, options)
        ready_for_output(options.output)
        points = _explore(simulation)
    except (CostModelError, ValueError) as error:
        raise ConfigError(str(error)) from None
    _write(f"{Path(path).stem}: {simulation.cluster.name}", simulation, points, args)
    return 0


def simulation_of(recipe: Recipe, options: SimulateOptions) -> Simulation:
    """Return the inputs of the simulation: machine, engine costs and lengths.

    Raises:
        CostModelError, ValueError: a file holds no cost model or no run, or a model does not fit its GPUs.
    """
    recorded = None if options.lengths_from is None else read_recorded(options.lengths_from)
    workload = recorded.workload if recorded else WORKLOADS[options.workload or "lognormal"]
    lengths = dataclasses.replace(workload, prompt_tokens=options.prompt_tokens)
    measured = None if options.cost_model is None else CostModel.load(options.cost_model)
    if measured is not None and options.hardware is None:
        cluster = _measured(recipe, options, measured)
        if recorded and recorded.train_token_seconds:
            cluster = cluster.trained_as_in(workload.name, recorded.train_token_seconds)
        return Simulation(recipe, cluster, lengths, recorded, options)
    hardware = _Hardware(recipe, options, measured)
    # Without overlap, engines and trainer alternate on the same GPUs, so there is no split to choose.
    given = hardware.training_gpus is not None or not recipe.overlaps
    splits = () if given else hardware.splits(lengths, turns_of(options, recorded))
    training_gpus = best(splits).training_gpus if splits else hardware.training_gpus or 0
    cluster, baseline, reason = hardware.cluster(training_gpus), None, ""
    if training_gpus:
        try:
            # GPUs that train and generate need more memory: the model may not fit them in both roles.
            baseline = hardware.cluster(0)
        except ValueError as error:
            reason = str(error)
    return Simulation(recipe, cluster, lengths, recorded, options, splits, baseline, reason)


def _measured(recipe: Recipe, options: SimulateOptions, cost: CostModel) -> Cluster:
    engines = options.gpus or recipe.engines_inside or len(recipe.engine.urls) or recipe.engine.replicas
    name = f"{engines} engine{'s' * (engines > 1)} as in {options.cost_model}"
    return Cluster(name=name, engines=engines, cost=cost)


def turns_of(options: SimulateOptions, recorded: Recorded | None) -> Turns | None:
    """Return the turns of episodes; None for single-turn responses."""
    if options.turn_tokens is None:
        return None if recorded is None else recorded.turns
    try:
        return Turns(
            options.turn_tokens, options.observation_tokens, options.environment_seconds, options.environment_sigma
        )
    except ValueError as error:
        raise ConfigError(f"--turn-tokens and what goes with it: {error}") from None


class _Hardware:
    """Return the number of GPUs, independent of their split between engines and trainer."""

    def __init__(self, recipe: Recipe, options: SimulateOptions, measured: CostModel | None) -> None:
        self.recipe, self.options, self.measured = recipe, options, measured
        self.gpu = GPUS[options.hardware or "h100"]
        self.shape = MODELS[options.model] if options.model else shape_of(recipe.model.path)
        self.engine_gpus = max(recipe.gpus_per_engine, 1)
        self.gpus, self.training_gpus = options.gpus or 8, options.training_gpus
        if (processes := recipe.trainer.processes) > 1:
            engines = recipe.engines_beside * self.engine_gpus
            if engines and self.training_gpus is None:
                self.training_gpus = processes
            self.gpus = options.gpus or (self.training_gpus or processes) + engines
        if not 0 <= (self.training_gpus or 0) < self.gpus:
            raise ConfigError(f"--training-gpus {self.training_gpus}: must leave at least one of --gpus {self.gpus}")
        self.trainer_bytes = LORA_TRAINER_BYTES if recipe.lora.rank else TRAINER_BYTES
        if recipe.trainer.cpu_offload:
            self.trainer_bytes = OFFLOADED_BYTES

    def cluster(self, training_gpus: int, turns: bool | None = None) -> Cluster:
        """Return the cluster of which `training_gpus` GPUs only train.

        Args:
            turns: whether engines and trainer on the same GPUs release their memory in turn; by default as the recipe.
        """
        in_turns = self.recipe.shares_devices if turns is None else turns
        return gpu_cluster(
            self.gpu,
            self.shape,
            self.gpus,
            slots=self.recipe.slots,
            training_gpus=training_gpus,
            engine_gpus=self.engine_gpus,
            trainer_bytes=self.trainer_bytes,
            price=self.options.price,
            measured=self.measured,
            turn_over=self.options.turn_over if in_turns else None,
        )

    def layouts(self, lengths: Workload, report: Callable[[str], None]) -> list[Layout]:
        """Simulate shared and split layouts, with a quarter, a half and three quarters of the GPUs that train."""
        shares = (round(self.gpus * part / self.engine_gpus) * self.engine_gpus for part in (0.25, 0.5, 0.75))
        training = sorted({count for count in shares if 0 < count <= self.gpus - self.engine_gpus})
        if self.training_gpus:
            training = [self.training_gpus]
        steps, warm_up = self.options.steps, self.options.warm_up

        def cluster(training_gpus: int) -> Cluster:
            return self.cluster(training_gpus, turns=True)

        return compare(self.recipe, lengths, cluster, self.gpus, training, steps, warm_up, report)

    def splits(self, lengths: Workload, turns: Turns | None) -> Sequence[Split]:
        """Simulate splits of the GPUs, with a progress display."""
        least = least_training_gpus(self.gpu, self.shape, self.gpus, self.trainer_bytes, self.engine_gpus)
        with watched("splits") as report:

            def measure(training_gpus: int) -> float:
                cluster = self.cluster(training_gpus)
                rate = overlapping_rate(self.recipe, lengths, cluster, self.options.steps, self.options.warm_up, turns)
                report(f"{training_gpus} of {self.gpus} GPUs train: {rate:,.0f} tokens/s trained on")
                return rate

            return try_splits(self.gpus - self.engine_gpus + 1, least, measure)


def _compare_layouts(recipe: Recipe, options: SimulateOptions) -> int:
    """Print each layout of the GPUs at its best N', and write all of them with their assumptions."""
    try:
        hardware = _Hardware(recipe, options, None)
        recorded = None if options.lengths_from is None else read_recorded(options.lengths_from)
        workload = recorded.workload if recorded else WORKLOADS[options.workload or "lognormal"]
        lengths = dataclasses.replace(workload, prompt_tokens=options.prompt_tokens)
        ready_for_output(options.output)
        with watched("layouts") as report:
            found = hardware.layouts(lengths, report)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    for layout in found:
        if layout.point is None:
            print(f"{layout.name:<14}{layout.reason}")
            continue
        point = layout.point
        print(
            f"{layout.name:<14}{point.overall_tokens_per_second:>10,.0f} tokens/s{layout.ratio:>7.2f} ×"
            f"{point.step_seconds:>9.1f} s a step  N' = {point.over_sampling_batch_size:<6,}"
            f"staleness {point.mean_staleness:.2f}{layout.worth:>8.2f} × after its price"
        )
    words = sentence(found, hardware.gpus)
    Console().print(f"\n{words}", markup=False, highlight=False)
    document = {
        "gpus": hardware.gpus,
        "engine_gpus": hardware.engine_gpus,
        "hardware": hardware.gpu.name,
        "model": hardware.shape.name,
        "turn_over": dataclasses.asdict(options.turn_over),
        "layouts": [layout.to_dict() for layout in found],
        "sentence": words,
    }
    path = options.output / "layouts.json"
    path.write_text(json.dumps(document, indent=2) + "\n")
    print(f"written: {path}")
    return 0


@contextmanager
def watched(what: str) -> Iterator[Callable[[str], None]]:
    """Progress display; one line per item where there is no terminal."""
    console = Console(stderr=True)
    with console.status(f"simulating {what}") as status:

        def report(done: str) -> None:
            status.update(done)
            if not console.is_terminal:
                print(done, file=sys.stderr, flush=True)

        yield report


def _explore(simulation: Simulation) -> list[Point]:
    """Simulate every setting, with a progress display."""
    points: list[Point] = []
    recipe, options, cluster = simulation.recipe, simulation.options, simulation.cluster
    count = len(arms(recipe, recipe.overlaps and cluster.separate)) + (simulation.baseline is not None)
    simulated = explore(
        recipe,
        simulation.workload,
        cluster,
        options.steps,
        options.warm_up,
        simulation.turns,
        simulation.baseline,
    )
    with watched(f"{count} settings") as report:
        for point in simulated:
            points.append(point)
            rate = f"{point.name}: {point.consumed_tokens_per_second:,.0f} consumed tokens/s"
            report(f"{len(points)} of {count} settings simulated; {rate}")
    return points


def _write(title: str, simulation: Simulation, points: Sequence[Point], args: Sequence[str]) -> None:
    """Print the table and the recommendation, and write both with their assumptions."""
    chosen, fastest, output = recommended(points), recommended(points, more_steps=0.0), simulation.options.output
    slots = simulation.cluster.cost.slots
    kept = kept_caches(simulation.recipe, chosen)
    hints = simulation.hint, advice(points, chosen, slots), kept, price(chosen.mean_staleness)
    hint = " ".join(filter(None, hints))
    page = simulation_page(title, simulation.subtitle, points, chosen, hint, simulation.assumptions)
    (output / "simulation.html").write_text(page, encoding="utf-8")
    document: dict[str, Any] = {
        "command": " ".join(["april", "simulate", *args]),
        "assumptions": simulation.assumptions,
        "hint": hint,
        "cost_model": dataclasses.asdict(simulation.cluster.cost),
        "training_gpus": simulation.cluster.training_gpus,
        "splits": [split._asdict() for split in simulation.splits],
        "settings": [point.to_dict() for point in points],
        "recommended": chosen.to_dict(),
        "by_throughput_alone": fastest.to_dict(),
    }
    (output / "simulation.json").write_text(json.dumps(document, indent=2) + "\n")
    print(f"{title}\n{simulation.subtitle}")
    print_points(points, chosen)
    lines = ["", f"{about_rates(points)}.", simulation.assumptions, *([f"\n{hint}"] if hint else [])]
    lines.append(f"\nrecommended: {chosen.name}")
    if fastest is not chosen:
        lines.append(f"by throughput alone: {fastest.name}. {price(fastest.mean_staleness)}")
    for line in lines:
        Console().print(line, markup=False, highlight=False)
    print(f"written: {output / 'simulation.html'}")
