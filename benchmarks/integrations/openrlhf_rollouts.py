"""OpenRLHF's own loops and april's plug-in in OpenRLHF, on one engine with realistic costs (`passes.py`).

OpenRLHF's trainers, generator, executor, prompts, queues and Ray actors are its own; a training step waits for a number
of passes, followed by its own broadcast of weights. Arms:

- `synchronous`: its `PPOTrainer`;
- `asynchronous`: `--train.async_enable`, which generates a batch while it trains on the previous one, and delays new
  weights until that batch is complete;
- `partial_N`, `partial_2N`, `partial_4N`: `--train.partial_rollout_enable` as well, whose new weights interrupt
  generation, with `--rollout.vllm_generate_batch_size` of one, two and four batches;
- `april_2N`, `april_4N`: `PPOTrainer` with april's generator, at N' = 2 N and 4 N. (`auto` plans by the clock,
  and this engine's time is its passes.)

Trainer and engine of the synchronous arms take turns: a training step adds its passes to theirs.

    .frameworks/openrlhf/bin/python benchmarks/integrations/openrlhf_rollouts.py
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "integrations" / "openrlhf" / "stand_ins"))

import ray
from openrlhf.trainer import ppo_trainer, ppo_trainer_async
from openrlhf.trainer.ray import vllm_engine
from openrlhf.utils.deepspeed import DeepspeedStrategy
from overlap_real import children
from passes import BOUND, GROUP, LOGPROB, LONGEST, OVER, STEPS, N, Passes, Steps, measure

from april.integrations.openrlhf import PPOTrainer, Settings
from april.integrations.openrlhf.vllm_actor import RolloutActor, undecorated
from tests import tiny
from tests.integrations.openrlhf.test_trainer import arguments
from tests.integrations.restart import own_ray

TURNS = ("synchronous", "april_2N", "april_4N")
"""Arms whose trainer and engine take turns."""
ALIKE = ("asynchronous", "partial_N")
"""Arms that generate like the synchronous one, and differ only in the overlap with training."""
STAND_INS = Path(__file__).parents[2] / "tests" / "integrations" / "openrlhf" / "stand_ins"
ARMS = "april_2N synchronous partial_4N april_4N partial_2N partial_N asynchronous"
PROMPT = "{:04}?"
REWARD = """
def reward_func(queries, prompts, labels):
    return {"rewards": 1.0, "scores": 1.0, "extra_logs": {}}
"""


class Engine:
    """In vLLM's place."""

    def __init__(self, args: Any) -> None:
        self.passes = Passes(prompt=len(PROMPT.format(0)), seed=args.seed)
        scheduler, model = SimpleNamespace(max_num_seqs=self.passes.slots), SimpleNamespace(max_model_len=1024)
        self.vllm_config = SimpleNamespace(scheduler_config=scheduler, model_config=model)
        self.unfinished = 0
        self.output_processor = SimpleNamespace(get_num_unfinished_requests=lambda: self.unfinished)

    @classmethod
    def from_engine_args(cls, args: Any) -> Engine:
        return cls(args)

    async def is_sleeping(self) -> bool:
        return False

    async def pause_generation(self, mode: str) -> None:
        """What runs is kept."""

    async def resume_generation(self) -> None:
        """Resume kept requests."""

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
        all_ids: list[int] = []
        self.unfinished += 1
        try:
            async for new, reason in self.passes.respond(request_id, prompt["prompt_token_ids"]):
                all_ids += new
                ids = new if params.output_kind == "delta" else all_ids
                logprobs = [{id: SimpleNamespace(logprob=LOGPROB)} for id in ids]
                yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason=reason)])
        finally:
            self.unfinished -= 1


class Actor(RolloutActor):
    """OpenRLHF's actor, with the benchmark's requirements for its engine."""

    async def __init__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[misc]
        import vllm

        vllm.AsyncLLMEngine = Engine
        await super().__init__(*args, **kwargs)
        self.steps: Steps = []

    async def watch(self, pids: list[int]) -> None:
        self.llm.passes.pids = pids

    async def train(self, sequences: list[list[int]], ticks: int) -> int:
        """A training step; how many there were."""
        self.steps.append(self.llm.passes.consumed(sequences))
        await self.llm.passes.train(ticks)
        return len(self.steps)

    async def new_weights(self) -> None:
        self.llm.passes.version += 1

    async def seen(self) -> Steps:
        return self.steps


class Policy:
    """In the place of OpenRLHF's group of DeepSpeed actors."""

    def __init__(self, engines: list[Any]) -> None:
        self.engines = engines

    def async_run_method(self, method_name: str, **_: Any) -> list[Any]:
        assert method_name == "broadcast_to_vllm"
        return [engine.new_weights.remote() for engine in self.engines]


class EnoughError(Exception):
    """The run has had its steps."""


def train_step(self: Any, rollout_samples: list[Any], global_step: int) -> tuple[dict[str, Any], int]:
    """In the place of OpenRLHF's, whose broadcast follows."""
    (engine,) = self.vllm_engines
    assert len(rollout_samples) == N * GROUP, "not a step's samples"
    sequences = [experience.sequences[0].tolist() for experience in rollout_samples]
    if ray.get(engine.train.remote(sequences, self.args.ticks)) == STEPS:
        raise EnoughError
    self.broadcast_to_vllm()
    return {"timing/train": 0.0}, global_step + 1


class Synchronous(undecorated(ppo_trainer.PPOTrainer)):  # type: ignore[misc]
    train_step = train_step


class April(PPOTrainer):
    train_step = train_step


class Training(undecorated(ppo_trainer_async.TrainingActor)):  # type: ignore[misc]
    train_step = train_step


def run(folder: Path, arm: str, ticks: int, seed: int) -> Steps:
    """A run of an arm, its training steps `ticks` passes long."""
    interrupted = arm.startswith("partial")
    args = arguments(
        folder,
        eval__dataset=None,
        ckpt__save_steps=-1,
        ckpt__load_enable=False,
        rollout__batch_size=N,
        rollout__n_samples_per_prompt=GROUP,
        rollout__vllm_generate_batch_size=OVER.get(arm[-2:], N) if interrupted else N,
        train__batch_size=N * GROUP,
        train__async_enable=interrupted or arm == "asynchronous",
        train__partial_rollout_enable=interrupted,
        train__async_queue_size=1,
        ticks=ticks,
    )
    vllm_engine.RolloutRayActor = ray.remote(Actor)
    engines = vllm_engine.create_vllm_engines(
        1, 1, str(folder / "model"), seed, False, False, True, 1024, remote_rm_url=args.reward.remote_url
    )
    ray.get(engines[0].seen.remote())
    parts = (str(folder / "model"), DeepspeedStrategy(seed=7, args=args), Policy(engines), None, None, None, engines)
    kwargs = {"do_sample": True, "max_len": 1024, "max_new_tokens": LONGEST, "temperature": 1.0, "top_p": 1.0}
    actors = []
    if arm == "synchronous":
        trainer = Synchronous(*parts, **kwargs)
    elif arm.startswith("april"):
        trainer = April(Settings(over_sampling_batch_size=OVER[arm[-2:]], max_staleness=BOUND), *parts, **kwargs)
    else:
        ppo_trainer_async.TrainingActor = ray.remote(Training)
        trainer = undecorated(ppo_trainer_async.PPOTrainerAsync)(*parts, **kwargs)
        actors = [trainer.generator_actor, trainer.trainer_actor]
        ray.get(trainer.generator_actor.get_max_steps.remote())
    named = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children(os.getpid())}
    ours = [pid for pid, name in named.items() if name.startswith(b"ray::") and not name.startswith(b"ray::IDLE")]
    ray.get(engines[0].watch.remote([os.getpid(), *ours]))
    with contextlib.suppress(EnoughError):
        trainer.fit()
    steps: Steps = ray.get(engines[0].seen.remote())
    for actor in [*actors, *engines]:
        ray.kill(actor)
    assert len(steps) == STEPS
    return steps


def main() -> None:
    with tempfile.TemporaryDirectory() as name, own_ray(STAND_INS, RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES="0"):
        folder = Path(name)
        tiny.save(folder / "model")
        (folder / "prompts").mkdir()
        rows = [json.dumps({"question": PROMPT.format(n), "answer": "0"}) for n in range(400)]
        (folder / "prompts" / "train.jsonl").write_text("\n".join(rows))
        (folder / "reward.py").write_text(REWARD)
        measure(__file__, __doc__, ARMS, partial(run, folder), TURNS, ALIKE)


if __name__ == "__main__":
    main()
