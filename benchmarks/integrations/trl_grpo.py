"""The quickstart recipe under TRL's GRPOTrainer, under TRL with april, and under `april train`.

The same policy, problems, rewards, batch, response budget and optimiser settings. Arms:

- `trl`: `trl.GRPOTrainer`, which generates with transformers;
- `trl + april`: `april.integrations.trl.GRPOTrainer` with the recipe's engine, N' and staleness bound;
- `april train`: the recipe.

`speed` runs all three in one process, a step of each in turn, and reports seconds per step, consumed tokens/s (tokens
of the samples a step trained on, over the whole step) and ratios to the `trl` step of the same round. `accuracy` runs
one arm and seed to the end and records the accuracy on held-out problems and the number of steps to a target; other
work may share the machine, so its times are not used: the time is its steps times the seconds per step of `speed`.

In several processes `speed` runs the arms under TRL, and processor time is the sum over all processes; it can be
compared on a shared machine.

    OMP_NUM_THREADS=2 python benchmarks/integrations/trl_grpo.py speed
    accelerate launch --multi_gpu --num_processes 2 --mixed_precision no benchmarks/integrations/trl_grpo.py speed
    python benchmarks/integrations/trl_grpo.py accuracy "trl + april" --seed 0 --steps 16
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib.metadata
import json
import os
import shlex
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trl
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import TrainerCallback

from april.config.reading import load_recipe
from april.config.recipe import Recipe
from april.engines.embedded import EmbeddedEngine
from april.integrations.adapter import RolloutAdapter
from april.integrations.trl import GRPOTrainer, PartialRollouts
from april.rollout.event_loop import EventLoop
from april.rollout.params import RolloutParams
from april.tasks.build import build_task
from april.tasks.encoding import Encoder
from april.tasks.task import Problem
from april.training.build import open_trainer
from april.training.policy import load_policy, stop_tokens
from april.training.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import machine, spread

ARMS = ("trl", "trl + april", "april train")
PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
RESULTS = Path(__file__).with_suffix(".json")
RECIPE = Path("examples/gcd/recipe.toml")


class Turns:
    """Lets one arm run at a time, in a fixed order, a step each, once all of them are set up."""

    def __init__(self, arms: tuple[str, ...]) -> None:
        self.arms = list(arms)
        self.ready: set[str] = set()
        self.turn = 0
        self.changed = threading.Condition()

    def set_up(self, arm: str, thread: threading.Thread) -> None:
        """Start an arm and wait until it requests its first turn: models cannot be loaded in two threads at once."""
        thread.start()
        with self.changed:
            self.changed.wait_for(lambda: arm in self.ready)

    def take(self, arm: str) -> None:
        with self.changed:
            self.ready.add(arm)
            self.changed.notify_all()
            self.changed.wait_for(lambda: len(self.ready) == len(self.arms) and self.arms[self.turn] == arm)

    def give(self) -> None:
        with self.changed:
            self.turn = (self.turn + 1) % len(self.arms)
            self.changed.notify_all()


class Step:
    """What one step took and brought."""

    def __init__(self, seconds: float, processor: float, tokens: float, off_policy: float) -> None:
        self.seconds, self.processor, self.tokens, self.off_policy = seconds, processor, tokens, off_policy


class Watch(TrainerCallback):
    """Times TRL's steps, from before generation to after the update."""

    def __init__(self, begin: Callable[[], None], end: Callable[[int], None], samples: int) -> None:
        self.begin, self.end, self.samples = begin, end, samples
        self.steps: list[Step] = []
        self.began = self.began_processor = 0.0
        self.seconds = self.processor = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begin()
        self.began, self.began_processor = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds = time.perf_counter() - self.began
        self.processor = sum(gather_object([time.process_time() - self.began_processor]))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "completions/mean_length" in logs:
            tokens = logs["completions/mean_length"] * self.samples
            off_policy = logs.get("april/off_policy_token_share", 0.0)
            self.steps.append(Step(self.seconds, self.processor, tokens, off_policy))
            self.end(state.global_step)


class Accuracy:
    """The share of right answers to the recipe's held-out problems, sampled as training samples."""

    def __init__(self, recipe: Recipe, task: Any, model: Any, tokenizer: Any) -> None:
        self.task, self.tokenizer = task, tokenizer
        self.prompts = [Encoder(tokenizer)(task.problem(i, "eval")) for i in range(task.eval_size)]
        self.samples = recipe.training.eval_samples
        self.engine = EmbeddedEngine(
            model,
            max_num_seqs=recipe.engine.max_num_seqs,
            context_length=recipe.engine.context_length,
            stream_interval=32,
        )
        self.loop = EventLoop("accuracy")
        self.adapter = RolloutAdapter(
            self.engine,
            RolloutParams(rollout_batch_size=1, partial_rollout=False),
            sampling=recipe.sampling(stop_tokens(model, tokenizer)),
        )

    def __call__(self) -> float:
        self.loop.run(self.engine.update_weights(0))
        groups = self.loop.run(self.adapter.evaluate(self.prompts, self.samples))
        self.engine.forget()
        right = [
            self.task.score(Problem.of(group.prompt), self.tokenizer.decode(s.response_ids, skip_special_tokens=True))
            >= 1
            for group in groups
            for s in group.samples
        ]
        return sum(right) / len(right)


def trl_arm(arm: str, recipe: Recipe, task: Any, folder: str, begin: Any, end: Any) -> None:
    """Train an arm that runs under TRL; `end(step, trainer, watch)` after each step."""
    rollout, training = recipe.rollout, recipe.training
    model, tokenizer = load_policy(recipe.model)
    tokenizer.padding_side = "left"
    problems = [task.problem(i) for i in range(len(task))]
    data = Dataset.from_dict(
        {
            "prompt": [problem.prompt for problem in problems],
            "answer": [problem.answer for problem in problems],
            "metadata": [json.dumps(problem.metadata) for problem in problems],
        }
    )

    def reward(prompts: Any, completions: Any, answer: Any, metadata: Any, **_: Any) -> list[float]:
        rows = zip(prompts, completions, answer, metadata, strict=True)
        return [task.score(Problem("", p, a, json.loads(m)), completion) for p, completion, a, m in rows]

    samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    config = trl.GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=32 // PROCESSES,
        gradient_accumulation_steps=samples // 32,
        num_generations=rollout.n_samples_per_prompt,
        max_completion_length=rollout.max_response_length,
        temperature=1.0,
        loss_type="dapo",  # a mean over tokens, as the recipe's
        epsilon=0.2,
        beta=0.0,
        learning_rate=training.learning_rate,
        lr_scheduler_type=training.lr_schedule,
        adam_beta1=training.betas[0],
        adam_beta2=training.betas[1],
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
        max_steps=training.steps,
        seed=training.seed,
        use_cpu=True,
        bf16=False,
        activation_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    engine = recipe.engine
    own = {
        "partial_rollouts": PartialRollouts(
            over_sampling_batch_size=rollout.over_sampling_batch_size,
            max_staleness=rollout.max_staleness,
            max_num_seqs=engine.max_num_seqs // PROCESSES,
            context_length=engine.context_length,
            on_update=engine.on_update,
            stream_interval=engine.stream_interval,
        )
    }
    watch = Watch(begin, lambda step: end(step, trainer, watch), samples)
    kind, more = (GRPOTrainer, own) if arm == "trl + april" else (trl.GRPOTrainer, {})
    trainer = kind(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[watch],
        **more,
    )
    trainer.train()


@dataclasses.dataclass(kw_only=True, eq=False)
class Timed(Trainer):
    """`april train`, telling when a step begins and ends."""

    begin: Any
    end: Any
    steps: list[Step] = dataclasses.field(default_factory=list)

    async def _collect(self) -> Any:
        self.begin()
        self.began, self.began_processor = time.perf_counter(), time.process_time()
        return await super()._collect()

    async def _learn(self, step: Any) -> None:
        await super()._learn(step)
        seconds, processor = time.perf_counter() - self.began, time.process_time() - self.began_processor
        self.steps.append(Step(seconds, processor, step.consumed_tokens, step.off_policy_token_share))
        self.end(self.log.steps, self, self)


async def april_train(recipe: Recipe, begin: Any, end: Any) -> None:
    async with open_trainer(recipe) as made:
        parts = {part.name: getattr(made, part.name) for part in dataclasses.fields(made)}
        await Timed(**parts, begin=begin, end=end).run()


def scaled(prompts: int) -> Recipe:
    """The recipe at another batch size N; N' and the engine's slots go with it."""
    recipe = load_recipe(RECIPE)
    rollout, engine = recipe.rollout, recipe.engine
    assert isinstance(rollout.over_sampling_batch_size, int)
    scale = prompts / rollout.rollout_batch_size
    rollout.over_sampling_batch_size = round(rollout.over_sampling_batch_size * scale)
    rollout.rollout_batch_size = prompts
    engine.max_num_seqs = round(engine.max_num_seqs * scale)
    return recipe


def run(arm: str, recipe: Recipe, task: Any, begin: Any, end: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if arm == "april train":
            recipe.reporting.output = folder
            recipe.reporting.trackers = ()
            recipe.training.eval_interval = recipe.training.save_interval = 0
            asyncio.run(april_train(recipe, begin, end))
        else:
            trl_arm(arm, recipe, task, folder, begin, end)


def speed(args: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> None:
    """Measure; `keep` is given the figures after every round, so that a run cut short has those of its rounds."""
    steps = args.warm_up + args.rounds
    arms = ARMS if PROCESSES == 1 else ARMS[:2]
    turns = Turns(arms)
    measured: dict[str, list[Step]] = {arm: [] for arm in arms}

    def start(arm: str) -> None:
        recipe = scaled(args.prompts)
        recipe.task = dataclasses.replace(recipe.task, size=2000, eval_size=0)
        recipe.training.steps = steps + 1  # the last one is never run

        def end(step: int, trainer: Any, watch: Any) -> None:
            measured[arm] = watch.steps
            if arm == arms[-1] and step > args.warm_up and PartialState().is_main_process:
                keep(compare({arm: measured[arm][args.warm_up :] for arm in arms}))
            turns.give()
            if step == steps:
                raise SystemExit  # ends this arm's thread, before another turn

        run(arm, recipe, build_task(recipe.task), lambda: turns.take(arm), end)

    threads = {arm: threading.Thread(target=start, args=(arm,), name=arm, daemon=True) for arm in arms}
    for arm, thread in threads.items():
        turns.set_up(arm, thread)
    for thread in threads.values():
        thread.join()


def compare(measured: dict[str, list[Step]]) -> dict[str, Any]:
    """The figures of each arm, and its ratios to the `trl` step of the same round."""
    base = measured["trl"]
    return {
        arm: {
            "seconds_per_step": spread([s.seconds for s in own]),
            "processor_seconds_per_step": spread([s.processor for s in own]),
            "consumed_tokens_per_second": spread([s.tokens / s.seconds for s in own]),
            "times_less_processor_time": spread([b.processor / s.processor for b, s in zip(base, own, strict=True)]),
            "times_faster_per_step": spread([b.seconds / s.seconds for b, s in zip(base, own, strict=True)]),
            "times_consumed_tokens_per_second": spread(
                [s.tokens / s.seconds / (b.tokens / b.seconds) for b, s in zip(base, own, strict=True)]
            ),
            "off_policy_token_share": statistics.fmean(s.off_policy for s in own),
        }
        for arm, own in measured.items()
    }


def accuracy(args: argparse.Namespace) -> dict[str, Any]:
    recipe = scaled(args.prompts)
    recipe.training.seed, recipe.training.steps = args.seed, args.steps
    task = build_task(recipe.task)
    seen: list[tuple[int, float]] = []
    measure: Any = None

    def end(step: int, trainer: Any, watch: Any) -> None:
        nonlocal measure
        if step % args.every:
            return
        if measure is None:
            learner = trainer.learner if arm == "april train" else None
            model, tokenizer = (learner or trainer).model, learner.tokenizer if learner else trainer.processing_class
            measure = Accuracy(recipe, task, model, tokenizer)
        seen.append((step, measure()))
        print(arm, args.seed, seen[-1], flush=True)

    arm = args.arm
    run(arm, recipe, task, lambda: None, end)
    reached = next((step for step, value in seen if value >= args.target), None)
    return {
        "arm": arm,
        "seed": args.seed,
        "prompts": args.prompts,
        "steps": args.steps,
        "target": args.target,
        "steps_to_target": reached,
        "final_accuracy": seen[-1][1],
        "accuracies": seen,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(dest="what", required=True)
    timing = what.add_parser("speed")
    timing.add_argument("--rounds", type=int, default=10)
    timing.add_argument("--warm-up", type=int, default=2, help="steps of each arm before the first round")
    learning = what.add_parser("accuracy")
    learning.add_argument("arm", choices=ARMS)
    learning.add_argument("--seed", type=int, default=0)
    for measurement in (timing, learning):
        measurement.add_argument(
            "--prompts", type=int, default=8, help="N; N' and the engine's slots are scaled with it"
        )
    learning.add_argument("--steps", type=int, default=30)
    learning.add_argument("--every", type=int, default=4, help="steps between measurements")
    learning.add_argument("--target", type=float, default=0.85)
    args = parser.parse_args()
    versions = {name: importlib.metadata.version(name) for name in ("trl", "accelerate", "datasets")}
    launched = f"accelerate launch --multi_gpu --num_processes {PROCESSES} --mixed_precision no"
    launcher = "python" if PROCESSES == 1 else launched
    command = f"{launcher} benchmarks/integrations/trl_grpo.py {' '.join(map(shlex.quote, sys.argv[1:]))}"
    about = {"command": command, "machine": machine() | versions}
    if args.what == "speed":
        about |= {"warm_up_steps": args.warm_up, "processes": PROCESSES}
        section = f"speed, {args.prompts} prompts" + (f", {PROCESSES} processes" if PROCESSES > 1 else "")
        speed(
            args,
            lambda arms: write(section, {**about, "arms": arms}),
        )
    else:
        write(f"accuracy, {args.arm}, seed {args.seed}", {**about, **accuracy(args)})


def summary(found: dict[str, Any], target: float = 0.75) -> dict[str, Any] | None:
    """Combined results of `accuracy`, over the seeds that every arm has run; None if there is none yet.

    Seconds to the target are its steps, by the evaluations, times the median seconds per step of `speed`, once that is
    measured: rollouts and training, without evaluations.
    """
    runs = {(run["arm"], run["seed"]): run for name, run in found.items() if name.startswith("accuracy, ")}
    seeds = sorted(set.intersection(*({seed for arm, seed in runs if arm == one} for one in ARMS)))
    if not seeds:
        return None
    speeds = found.get(f"speed, {runs[ARMS[0], seeds[0]]['prompts']} prompts")
    per_arm = {}
    for arm in ARMS:
        accuracies = [dict(runs[arm, seed]["accuracies"]) for seed in seeds]
        finals = [runs[arm, seed]["final_accuracy"] for seed in seeds]
        ahead = [final - runs[ARMS[0], seed]["final_accuracy"] for final, seed in zip(finals, seeds, strict=True)]
        reached = [next((step for step, value in run.items() if value >= target), None) for run in accuracies]
        known = speeds is not None and None not in reached
        per_arm[arm] = {
            "accuracy_by_step": {
                step: statistics.fmean(run[step] for run in accuracies)
                for step in sorted(set.intersection(*map(set, accuracies)))
            },
            "final_minus_trl": {"mean": statistics.fmean(ahead), "by_seed": ahead},
            "steps_to_target": reached,
            "seconds_to_target": statistics.fmean(reached) * speeds["arms"][arm]["seconds_per_step"]["median"]
            if known
            else None,
        }
    return {"seeds": seeds, "target": target, "arms": per_arm}


def write(section: str, figures: dict[str, Any]) -> None:
    """Add to the file of figures; figures of other runs stay."""
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    found[section] = figures
    if together := summary(found):
        found["summary"] = together
    RESULTS.write_text(json.dumps(dict(sorted(found.items())), indent=2) + "\n")


if __name__ == "__main__":
    main()
