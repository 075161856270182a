"""AReaL's own rollouts and april's plug-in in AReaL, on one engine with realistic costs (`passes.py`).

AReaL's trainer, dataloader, workflow, executor, staleness manager, client, and its new weights from disk are its own; a
training step waits for a number of passes, during which both continue to generate. A pass takes 30 ms, since AReaL
sleeps up to 0.5 s between two polls. Arms:

- `synchronous`: AReaL with `rollout.max_head_offpolicyness=0`;
- `areal_N`, `areal_2N`, `areal_4N`: AReaL with `rollout.max_concurrent_rollouts` of N, as shipped, 2 N and 4 N;
- `areal_4N_bound2` and the like: the same with another `rollout.max_head_offpolicyness`, since AReaL's largest
  staleness exceeds it;
- `april_2N`, `april_4N`: april's `PPOTrainer`, at N' = 2 N and 4 N. (`auto` plans by the clock, and this
  engine's time is its passes.)

    .frameworks/areal/bin/python benchmarks/integrations/areal_rollouts.py
"""

from __future__ import annotations

import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

from areal.trainer import rl_trainer
from overlap_real import children
from pass_server import SGLangPasses
from passes import BOUND, GROUP, LONGEST, OVER, STEPS, N, Passes, Steps, measure

from april.integrations.areal import PPOTrainer
from tests.integrations.areal.trainer import configuration, prepare, rank, rows

SECONDS = 0.03
ARMS = "april_2N areal_2N synchronous april_4N areal_4N areal_N"
PROMPT = "{:04}?"


def reward(prompt: str, completion: str, prompt_ids: Any, completion_ids: Any, **row: Any) -> float:
    return float(len(completion_ids) % 3)


def run(folder: Path, arm: str, ticks: int, seed: int) -> Steps:
    """A run of an arm, its training steps `ticks` passes long."""
    passes = Passes(prompt=len(PROMPT.format(0)) + 1, seed=seed, seconds=SECONDS)
    server = SGLangPasses(folder / "model", passes)
    os.environ.update(rank(), AREAL_LLM_SERVER_ADDRS=server.address)
    place = folder / f"{arm}-{ticks}-{seed}"
    name, _, bound = arm.partition("_bound")
    over = OVER.get(name[-2:], N)
    config = configuration(
        folder,
        cluster__fileroot=str(place / "runs"),
        cluster__name_resolve__nfs_record_root=str(place / "names"),
        train_dataset__batch_size=N,
        total_train_steps=STEPS,
        gconfig__n_samples=GROUP,
        gconfig__max_new_tokens=LONGEST,
        rollout__consumer_batch_size=N,
        rollout__max_concurrent_rollouts=over,
        rollout__max_head_offpolicyness=0 if arm == "synchronous" else int(bound or BOUND),
        actor__use_decoupled_loss=False,
        actor__recompute_logprob=False,
        recover__mode="disabled",
    )
    data = rows(f"{n:04}" for n in range(400)), rows(range(100, 106))
    if arm.startswith("april"):
        trainer = PPOTrainer(config, *data, over_sampling_batch_size=over)
    else:
        trainer = rl_trainer.PPOTrainer(config, *data)
    steps: Steps = []

    def trained(batch: Any) -> Any:
        pairs = [pair for t in batch for pair in zip(t["input_ids"], t["attention_mask"], strict=True)]
        sequences = [ids[mask.bool()].tolist() for ids, mask in pairs]
        assert len(sequences) == N * GROUP, "not a step's samples"
        passes.pids = [os.getpid(), *children(os.getpid())]
        steps.append(server.train(sequences, ticks))
        return batch

    trainer.actor.compute_advantages = trained
    trainer.actor.ppo_update = lambda batch: None
    try:
        told = {"reward_fn": reward, "gconfig": config.gconfig, "tokenizer": config.tokenizer_path}
        trainer.train(workflow="areal.workflow.rlvr.RLVRWorkflow", workflow_kwargs=told)
    finally:
        trainer.close()
        server.close()
    assert len(steps) == STEPS
    return steps


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        measure(__file__, __doc__, ARMS, partial(run, folder))


if __name__ == "__main__":
    main()
