"""The program of each process of a sharded job:
`accelerate launch ... tests.integrations.trl.sharded_job FOLDER HOW [URL]`, with the URL of an SGLang server that
generates in place of the processes' own engines.

accelerate 1.15 applies `--use_fsdp` only if it finds accelerators, and silently trains whole models (DDP) on a CPU.
Here it finds simulated ones; everything else is its own, on gloo. It applies `--use_deepspeed`. DeepSpeed would compile
a kernel for small messages between the processes of a node before its first one; here gloo sends them.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from trl import GRPOConfig

from april.integrations.trl import PartialRollouts
from tests import tiny
from tests.integrations.trl.trainer import Compared, Reward, rows

FOLDER, HOW = Path(sys.argv[1]), sys.argv[2]
ENGINE: dict[str, Any] = {"engine": "sglang", "urls": tuple(sys.argv[3:])} if sys.argv[3:] else {"max_num_seqs": 8}


class Sharded(Compared):
    """Checks that the policy is sharded."""

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        # Before the comparison's forward pass, after which FSDP2 keeps some parameters whole.
        assert sharded(self), f"{HOW} was asked for, and the policy is whole in each process"
        return super()._generate_and_score_completions(inputs)


def sharded(trainer: Any) -> bool:
    """Whether parameters, or under ZeRO-2 the optimizer's state, are a share of them in each process."""
    if HOW == "fsdp2":
        return all(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
    partitioned = all(hasattr(parameter, "ds_tensor") for parameter in trainer.model.parameters())
    return trainer.deepspeed.zero_optimization_stage() == int(HOW[-1]) and partitioned == (HOW == "zero3")


def trainer(model: Any) -> Sharded:
    args = GRPOConfig(
        output_dir=str(FOLDER),
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=60,
        learning_rate=1e-2,
        use_cpu=True,
        bf16=False,
        activation_checkpointing=False,
        max_steps=4,
        logging_steps=1,
        save_strategy="steps",
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
    )
    assert args.device.type == "cpu"
    if HOW.startswith("fsdp"):
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return Sharded(
        model=model,
        reward_funcs=Reward(),
        args=args,
        train_dataset=rows(),
        processing_class=tiny.tokenizer(),
        partial_rollouts=PartialRollouts(over_sampling_batch_size=6, stream_interval=2, **ENGINE),
    )


def main() -> None:
    torch.set_num_threads(1)
    loaded = str(FOLDER / f"model-{os.environ['RANK']}")
    tiny.model().save_pretrained(loaded)
    if HOW.startswith("zero"):
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    seen = {}
    for name, model, checkpoint in (
        ("straight", tiny.model(), None),
        ("resumed", loaded, str(FOLDER / "checkpoint-2")),  # ZeRO-3 loads it in shards
    ):
        trained = trainer(model)
        trained.train(resume_from_checkpoint=checkpoint)
        trained.close()
        seen[name] = {
            "batches": [[(s.group_id, s.index, s.response_ids) for _, s in batch] for batch, _ in trained.rows],
            "differences": [[max([0.0, *part.tolist()]) for part in parts] for parts in trained.differences],
            "logs": [entry for entry in trained.state.log_history if "loss" in entry],
        }
    (FOLDER / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
