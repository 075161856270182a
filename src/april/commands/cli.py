"""The command line: `april train`, `compare`, `calibrate`, `simulate`, `report`, `algorithms`.

Invariant: a user's mistake ends in one clear line on stderr and exit code 2, without a traceback and before anything
expensive has started; a run that fails later says how to go on with it.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import inspect
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from april.config.recipe import ConfigError, Recipe, check_recipe, load_recipe, setting_line

USAGE = """april: active partial rollouts for reinforcement learning of language models

usage: april COMMAND [OPTIONS]

commands:
  train RECIPE         train a policy by reinforcement learning (--resume DIR goes on with a run)
  compare RECIPE       the same recipe synchronous and with partial rollouts, side by side
  calibrate RECIPE     measure the recipe's engine and write a cost model for simulate
  simulate RECIPE      what the recipe would do on a cluster: throughput, staleness, cost, and the setting to take
  report DIR           write a run's HTML report anew
  algorithms           the algorithms and corrections a recipe can name, with settings and sources

april COMMAND --help says more about each.
"""

TRAIN = """Train a causal language model by reinforcement learning, with active partial rollouts (arXiv 2509.18521).

RECIPE is a TOML file; each flag below overrides its setting of the same name, and the defaults shown are the recipe's
where one is given. To go on with a run that was stopped, or died: april train --resume DIR, with flags for what should
change; --salvage leaves out what is damaged, --rewind goes back to the last checkpoint.

The run's directory gets metrics.jsonl, TensorBoard events, checkpoints that transformers loads, report.html and
summary.json. Ctrl-C stops cleanly."""


def main() -> None:
    """Run a command of `sys.argv` and exit with its status."""
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": train,
        "compare": compare,
        "calibrate": calibrate,
        "simulate": simulate,
        "report": report,
        "algorithms": algorithms,
    }
    command, *args = sys.argv[1:] or ["--help"]
    if command in ("-h", "--help"):
        print(USAGE, end="")
        raise SystemExit(0)
    if command == "--version":
        from april import __version__

        print(f"april {__version__}")
        raise SystemExit(0)
    if command not in commands:
        raise SystemExit(_fail(f"there is no command {command!r}; april --help lists the commands"))
    try:
        raise SystemExit(commands[command](args))
    except ConfigError as error:
        raise SystemExit(_fail(str(error))) from None


def _fail(message: str) -> int:
    for line in message.splitlines():
        print(f"april: {line}", file=sys.stderr)
    return 2


def _ready_for_output(directory: Path) -> None:
    """Make the directory and see that it takes a file: before the work, not when its result is lost.

    Raises:
        ConfigError: nothing can be written there.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(f"--output: nothing can be written to {directory}: {error.strerror}") from None


def train(args: list[str]) -> int:
    """`april train RECIPE [FLAGS]` and `april train --resume DIR [FLAGS]`."""
    if args[:1] == ["--resume"]:
        if len(args) < 2:
            return _fail("--resume needs the directory of a run")
        return resume(Path(args[1]), args[2:])
    return run_trainer(read_recipe(args, "april train", TRAIN))


def resume(run: Path, args: Sequence[str]) -> int:
    """`april train --resume DIR [--salvage | --rewind] [FLAGS]`."""
    from april.rollout.journal import JournalError
    from april.training.checkpoint import CheckpointError
    from april.training.resume import Repair, check_run, check_unchanged, saved_recipe

    repair: Repair = "salvage" if "--salvage" in args else "rewind" if "--rewind" in args else "none"
    flags = [flag for flag in args if flag not in ("--salvage", "--rewind")]
    try:
        before = saved_recipe(run)
        before.reporting.output = str(run)
        recipe = _override(copy.deepcopy(before), flags, f"april train --resume {run}", TRAIN)
        check_recipe(recipe)
        for line in check_run(run, repair):
            print(f"april: {line}", file=sys.stderr)
        check_unchanged(run, before, recipe)
    except (CheckpointError, JournalError) as error:
        return _fail(str(error))
    return run_trainer(recipe, resume=True)


def read_recipe(args: list[str], program: str, description: str) -> Recipe:
    """The checked recipe that `RECIPE [FLAGS]` describe."""
    path = Path(args[0]) if args and not args[0].startswith("-") else None
    flags = args[1:] if path else args
    recipe = load_recipe(path) if path else Recipe()
    recipe = _override(recipe, flags, f"{program} {path or 'RECIPE'}", description)
    try:
        check_recipe(recipe)
    except ConfigError as error:
        if path is None:
            raise
        raise ConfigError("\n".join(_located(line, path, flags) for line in str(error).splitlines())) from None
    return recipe


def _override(recipe: Recipe, flags: Sequence[str], program: str, description: str) -> Recipe:
    return tyro.cli(Recipe, prog=program, description=description, args=flags, default=recipe)


def _located(problem: str, path: Path, flags: Sequence[str]) -> str:
    """The problem with the line of the recipe that it stands on, unless a flag has overridden that."""
    name = problem.split(" ")[0].rstrip(":")
    flag = "--" + name.rpartition(".")[2].replace("_", "-")
    line = None if flag in flags else setting_line(path, name)
    return f"{path}:{line}: {problem}" if line else problem


def run_trainer(recipe: Recipe, resume: bool = False) -> int:
    """Train, and say how it ended."""
    from april.reporting.progress import Progress
    from april.rollout.engine import EngineError
    from april.rollout.journal import JournalError
    from april.rollout.rewards import RewardError
    from april.rollout.scheduler import RejectionError
    from april.rollout.staleness import StalenessError
    from april.training.checkpoint import CheckpointError
    from april.training.output import prepare_output
    from april.training.recovery import TrainingError
    from april.training.trainer import Trainer

    directory = Path(recipe.reporting.output)
    if not resume:
        prepare_output(directory, recipe.reporting.if_exists)
    failures = (
        RewardError,
        EngineError,
        RejectionError,
        StalenessError,
        CheckpointError,
        JournalError,
        TrainingError,
        OSError,
        ValueError,
    )
    title = f"{recipe.algorithm.algorithm} on {recipe.task.name or recipe.task.path}"
    try:
        with Progress(recipe.training.steps, title=title) as progress:
            summary = asyncio.run(Trainer(recipe, resume, progress).run())
    except failures as error:
        _fail(f"{type(error).__name__}: {error}")
        _say_how_to_resume(directory)
        return 1
    except KeyboardInterrupt:
        _fail("given up before the run was saved")
        _say_how_to_resume(directory)
        return 130
    if summary is None:
        print(f"Stopped. To go on: april train --resume {directory}")
        return 130
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    if after is not None:
        print(f"accuracy {before:.3f} -> {after:.3f} in {summary['steps']} steps and {summary['seconds']:.0f} s")
    print(f"report: {directory / 'report.html'}")
    return 0


def _say_how_to_resume(directory: Path) -> None:
    from april.training.resume import RECIPE

    if (directory / RECIPE).is_file():
        print(f"april: to go on from what is on disk: april train --resume {directory}", file=sys.stderr)


Settings = TypeVar("Settings")


def _settings(kind: type[Settings], program: str, args: list[str], note: str = "") -> tuple[Settings, list[str]]:
    """The settings of a command, and the flags of april train that follow them after --."""
    own, flags = (args[: args.index("--")], args[args.index("--") + 1 :]) if "--" in args else (args, [])
    description = f"{inspect.getdoc(kind)}\n\nFlags of april train may follow after --{note}."
    return tyro.cli(kind, prog=program, args=own, description=description), flags


@dataclasses.dataclass(kw_only=True)
class Comparison:
    """The same recipe in three arms, interleaved, every seed once per arm: synchronous; with partial rollouts at the
    same number of engine slots; and synchronous with a slot for every sample that the partial arm has under way."""

    recipe: tyro.conf.Positional[Path]
    """The recipe to compare."""
    output: Path = Path("runs/compare")
    """Where the runs and compare.json are kept. Runs that are already complete there are not run again."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds; each is one run per arm."""
    target_accuracy: float = 0.8
    """Held-out accuracy whose time is compared."""
    flags: Annotated[tuple[str, ...], tyro.conf.Suppress] = ()


def compare(args: list[str]) -> int:
    """`april compare RECIPE [OPTIONS] [-- FLAGS OF april train]`."""
    settings, flags = _settings(Comparison, "april compare", args, "; they apply to every arm")
    from april.reporting.comparison import compare_runs

    recipe = read_recipe([str(settings.recipe), *flags], "april compare", "")
    slots = recipe.engine.max_running
    under_way = recipe.over_sampling_batch_size
    groups = 2 * recipe.rollout.rollout_batch_size if under_way == "auto" else under_way
    unlimited = groups * recipe.rollout.n_samples_per_prompt
    arms = {
        "synchronous": ["--no-partial-rollout", "--max-running", str(slots)],
        "partial": ["--partial-rollout", "--max-running", str(slots)],
        "synchronous, unlimited slots": ["--no-partial-rollout", "--max-running", str(unlimited)],
    }
    records = []
    for seed in settings.seeds:
        for arm, own_flags in arms.items():
            directory = settings.output / f"{arm.replace(', ', '-').replace(' ', '-')}-{seed}"
            if not (directory / "summary.json").is_file():
                print(f"{arm}, seed {seed}: {directory}", flush=True)
                run = [*flags, *own_flags, "--seed", str(seed), "--output", str(directory), "--if-exists", "rename"]
                status = _train_in_subprocess(settings.recipe, run)
                if status:
                    return _fail(f"{arm}, seed {seed} ended with status {status}; the other runs are kept") or status
            summary = json.loads((directory / "summary.json").read_text())
            records.append(comparison_record(arm, seed, summary, settings.target_accuracy))
    settings.output.mkdir(parents=True, exist_ok=True)
    table = compare_runs(records)
    machine = {"system": platform.platform(), "processor": platform.processor(), "cores": os.cpu_count()}
    document = {"command": " ".join(["april", "compare", *args]), "machine": machine, "runs": records, "table": table}
    (settings.output / "compare.json").write_text(json.dumps(document, indent=2))
    print(f"written: {settings.output / 'compare.json'}")
    return 0


def _train_in_subprocess(recipe: Path, flags: Sequence[str]) -> int:
    """A run of its own process, so that no arm finds caches, threads or memory of another."""
    command = [sys.executable, "-m", "april", "train", str(recipe), *flags]
    return subprocess.run(command, stdout=subprocess.DEVNULL, env=os.environ, check=False).returncode


def comparison_record(arm: str, seed: int, summary: dict[str, Any], target: float) -> dict[str, Any]:
    """What the comparison keeps of one run."""
    reached = [seconds for _, seconds, accuracy in summary["accuracies"] if accuracy >= target]
    kept = (
        "consumed_tokens_per_second",
        "rollout_seconds",
        "train_seconds",
        "mean_staleness",
        "max_staleness_seen",
        "off_policy_token_share",
        "discarded_tokens",
        "accuracy_before",
    )
    return {
        "arm": arm,
        "seed": seed,
        **{name: summary[name] for name in kept},
        "generated_tokens_per_second": summary["generated_tokens"] / summary["rollout_seconds"],
        "time_to_target": reached[0] if reached else None,
        "final_accuracy": summary["accuracy_after"],
        "slots": summary["recipe"]["engine"]["max_running"],
        "versions": summary["versions"],
    }


@dataclasses.dataclass(kw_only=True)
class SimulationSettings:
    """What a recipe would do on a cluster, in virtual time: the scheduler that real runs use, over engines that follow
    a cost model. Tries synchronous rollouts and several N', draws throughput against staleness, and recommends the
    smallest N' that comes within 3 % of the best.

    Engines and training share the GPUs and take turns (colocated), or have GPUs of their own (--training-gpus). Costs
    come from a roofline of GPU and model, or from a measurement: --cost-model takes a file that april calibrate
    wrote."""

    recipe: tyro.conf.Positional[Path]
    """The recipe. Its N, G, policy, order, max_staleness, max_response_length, max_running, on_update, seed count."""
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


def simulate(args: list[str]) -> int:
    """`april simulate RECIPE [OPTIONS] [-- FLAGS OF april train]`."""
    settings, flags = _settings(SimulationSettings, "april simulate", args)
    from rich.console import Console

    from april.simulation import hardware
    from april.simulation.cost_model import CostModel, CostModelError
    from april.simulation.page import print_points, simulation_page
    from april.simulation.plan import Cluster, advice, arms, explore, recommended
    from april.simulation.workload import WORKLOADS

    recipe = read_recipe([str(settings.recipe), "--model.path", settings.model, *flags], "april simulate", "")
    for name in ("gpus", "price", "steps"):
        if not 0 < getattr(settings, name) < float("inf"):
            return _fail(f"--{name} {getattr(settings, name)}: must be positive")
    if not 0 <= settings.training_gpus < settings.gpus:
        return _fail(f"--training-gpus {settings.training_gpus}: must leave at least one of --gpus {settings.gpus}")
    if not 0 <= settings.warm_up < settings.steps:
        return _fail(f"--warm-up {settings.warm_up}: must leave at least one of --steps {settings.steps}")
    if settings.workload not in WORKLOADS:
        return _fail(f"--workload {settings.workload}: there are {', '.join(WORKLOADS)}")
    gpu, shape = hardware.GPUS[settings.hardware], hardware.MODELS[settings.model]
    colocated = settings.training_gpus == 0
    state = hardware.LORA_TRAINER_BYTES if recipe.lora.rank else hardware.TRAINER_BYTES
    try:
        if not colocated:
            hardware.check_trainer(gpu, shape, settings.training_gpus, state)
        if settings.cost_model is None:
            given, shared = hardware.Roofline(slots=recipe.engine.max_running), settings.gpus * colocated
            cost = hardware.roofline(gpu, shape, given, trainer_gpus=shared, trainer_bytes=state)
        else:
            cost = CostModel.load(settings.cost_model)
    except (CostModelError, ValueError) as error:
        return _fail(str(error))
    training = hardware.training_seconds_per_token(gpu, shape, settings.training_gpus or settings.gpus)
    cluster = Cluster(
        gpus=settings.gpus,
        engines=settings.gpus - settings.training_gpus,
        cost=cost,
        train_token_seconds=training,
        price=settings.price,
    )
    _ready_for_output(settings.output)
    points = []
    count = len(arms(recipe))
    try:
        console = Console(stderr=True)
        with console.status(f"0 of {count} settings simulated") as status:
            for point in explore(recipe, WORKLOADS[settings.workload], cluster, settings.steps, settings.warm_up):
                points.append(point)
                done = (
                    f"{len(points)} of {count} settings simulated; {point.name}: "
                    f"{point.consumed_tokens_per_second:,.0f} consumed tokens/s"
                )
                status.update(done)
                if not console.is_terminal:  # where nobody sees a status
                    print(done, file=sys.stderr, flush=True)
    except ValueError as error:
        return _fail(str(error))
    chosen = recommended(points)
    title = f"{settings.recipe.stem}: {settings.model} on {settings.gpus} × {settings.hardware}"
    rollout = recipe.rollout
    subtitle = (
        f"{rollout.rollout_batch_size} prompts × {rollout.n_samples_per_prompt} samples, {settings.workload} lengths"
    )
    assumptions = (
        f"Costs: {cost.source or settings.cost_model}; {cost.slots} slots and {cost.kv_tokens:,} tokens of KV cache an "
        f"engine. Lengths: the workload {settings.workload}, cut off at {rollout.max_response_length:,} tokens. "
        f"Training takes {training * 1e6:.3g} s for a million tokens and alternates with rollouts, on "
        f"{'the same GPUs' if colocated else f'{settings.training_gpus} GPUs of its own'}. "
        f"A GPU costs {settings.price:g} an hour."
    )
    text = simulation_page(title, subtitle, points, chosen, f"{advice(chosen)} {assumptions}".strip())
    (settings.output / "simulation.html").write_text(text, encoding="utf-8")
    document = {
        "command": " ".join(["april", "simulate", *args]),
        "assumptions": assumptions,
        "cost_model": dataclasses.asdict(cost),
        "settings": [point.to_dict() for point in points],
        "recommended": chosen.to_dict(),
    }
    (settings.output / "simulation.json").write_text(json.dumps(document, indent=2) + "\n")
    print(f"{title}\n{subtitle}")
    print_points(points, chosen)
    explained = (
        f"\n{assumptions}\n\nTokens per second of rollout; cost of a million consumed tokens, training included."
    )
    Console().print(explained, markup=False, highlight=False)
    print(f"recommended: {chosen.name}")
    if hint := advice(chosen):
        Console().print(hint, markup=False, highlight=False)
    print(f"written: {settings.output / 'simulation.html'}")
    return 0


@dataclasses.dataclass(kw_only=True)
class CalibrationSettings:
    """Measure the recipe's engine for some seconds to minutes and write a cost model for april simulate.

    Takes the engine the recipe's [engine] names: embedded, or vLLM and SGLang by their urls, or started for the
    purpose. Nothing else should use it meanwhile."""

    recipe: tyro.conf.Positional[Path]
    """The recipe whose engine and model are measured."""
    output: Path = Path("cost_model.json")
    """Where the cost model is written."""
    longest: int = 512
    """The longest prompt that is prefilled, in tokens."""
    repeats: int = 3
    """Times each measurement is made; the median counts."""


def calibrate(args: list[str]) -> int:
    """`april calibrate RECIPE [OPTIONS] [-- FLAGS OF april train]`."""
    settings, flags = _settings(CalibrationSettings, "april calibrate", args)
    for name in ("longest", "repeats"):
        if getattr(settings, name) < 1:
            return _fail(f"--{name} {getattr(settings, name)}: must be at least 1")
    recipe = read_recipe([str(settings.recipe), *flags], "april calibrate", "")
    if settings.output.is_dir():
        return _fail(f"--output {settings.output}: this is a directory; name a file")
    _ready_for_output(settings.output.parent)
    from april.rollout.engine import EngineError
    from april.simulation.calibration import calibrate_recipe

    try:
        measured = asyncio.run(calibrate_recipe(recipe, settings.longest, settings.repeats))
    except (EngineError, ValueError, OSError) as error:
        return _fail(f"{type(error).__name__}: {error}")
    cost = measured.fit(f"measured: {recipe.engine.engine}, {recipe.model.path}")
    cost.save(settings.output)
    largest = cost.decode_batches[-1]
    print(f"decode step: {1e3 * cost.base()[1]:.3g} ms alone, {1e3 * cost.base()[largest]:.3g} ms at {largest} samples")
    print(f"prefill: {cost.prefill_token_seconds * 1e6:.3g} us a token; a request: {cost.request_seconds * 1e3:.3g} ms")
    print(f"interrupt: {cost.interrupt_seconds * 1e3:.3g} ms; weight update: {cost.update_seconds * 1e3:.3g} ms")
    print(f"mean error of the fit: {', '.join(f'{name} {error:.1%}' for name, error in cost.errors.items())}")
    print(f"written: {settings.output}")
    return 0


def report(args: list[str]) -> int:
    """`april report DIR`."""
    if len(args) != 1 or args[0] in ("-h", "--help"):
        print("usage: april report DIR\n\nWrite report.html of the run in DIR anew, from its metrics and traces.")
        return 0 if args[:1] in (["-h"], ["--help"]) else 2
    from april.reporting.report import write_report

    directory = Path(args[0])
    if not (directory / "metrics.jsonl").is_file():
        return _fail(f"{directory}: no metrics.jsonl there; name the directory of a run")
    print(write_report(directory))
    return 0


def algorithms(args: list[str]) -> int:
    """`april algorithms`."""
    from april.commands.listing import print_algorithms

    if args:
        print("usage: april algorithms\n\nThe algorithms and corrections a recipe can name, with settings and sources.")
        return 0 if args[:1] in (["-h"], ["--help"]) else 2
    print_algorithms()
    return 0
