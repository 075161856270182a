"""The program of each process of a job: `accelerate launch ... -m tests.integrations.trl.job FOLDER`.

Twelve rows a generation batch in groups of four: in two processes of six rows each, the middle group lies across both.
Every process writes its records to `FOLDER/rank-R.json`. At the end process 1 dies during a training.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from trl import GRPOConfig

from april.integrations.trl import PartialRollouts
from tests import tiny
from tests.integrations.trl.trainer import SMALL, Reward, Watched, rows


class Dies(TrainerCallback):
    """Ends its process, as if it were out of memory, when a step begins."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step and args.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def trainer(folder: Path, processes: int, **settings: Any) -> Watched:
    config = {
        **SMALL,
        "output_dir": str(folder),
        "per_device_train_batch_size": 6 // processes,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    return Watched(
        model=tiny.model(),
        reward_funcs=Reward(),
        args=GRPOConfig(**{**config, **settings}),
        train_dataset=rows(),
        eval_dataset=rows(4, first=100),
        processing_class=tiny.tokenizer(),
        partial_rollouts=PartialRollouts(over_sampling_batch_size=6, max_num_seqs=8, stream_interval=2),
    )


def record(trained: Watched) -> dict[str, Any]:
    """What one process saw: the rows of each of its batches, the rewards' prompts, the logs, and the policy."""
    return {
        "batches": [
            [
                {
                    "answer": row["answer"],
                    "group": sample.group_id,
                    "tokens": sample.response_ids,
                    "versions": sample.versions.tolist(),
                    "mask": int(output["completion_mask"][i].sum()),
                    "advantage": float(output["advantages"][i]),
                }
                for i, (row, sample) in enumerate(batch)
            ]
            for batch, output in trained.rows
        ],
        "seen": list(trained.reward_funcs[0].seen),
        "logs": [{k: v for k, v in entry.items() if "time" not in k} for entry in trained.state.log_history],
        "policy": [parameter.double().sum().item() for parameter in trained.model.parameters()],
    }


def main() -> None:
    folder, processes = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    straight = trainer(folder, processes)
    straight.train()
    seen = {"straight": record(straight)}
    straight.reward_funcs[0].seen.clear()
    straight.evaluate()
    seen["evaluated"] = straight.reward_funcs[0].seen
    straight.close()
    resumed = trainer(folder, processes)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    resumed.close()
    seen["resumed"] = record(resumed)
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(seen))
    dying = trainer(folder, processes, max_steps=6)
    dying.add_callback(Dies(5))
    dying.train(resume_from_checkpoint=True)


if __name__ == "__main__":
    main()
