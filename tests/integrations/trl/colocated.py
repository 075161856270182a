"""Runs of `vllm_mode = "colocate"`, in this process or as each process of a job:
`accelerate launch ... -m tests.integrations.trl.colocated FOLDER SETTINGS`.

They use vLLM if it is installed (`scripts/setup_trl_colocate.sh`), and otherwise the stand-in.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from trl import GRPOConfig
from trl.generation import vllm_generation

from april.engines.job import JobEngine
from april.integrations.trl import PartialRollouts
from tests import tiny
from tests.integrations.trl.trainer import SMALL, Compared, Reward, rows
from tests.servers.tiny import tiny_model

STAND_INS = Path(__file__).with_name("stand_ins")
VLLM = find_spec("vllm") is not None
"""Whether vLLM is installed."""


def trainer(folder: Path, rollouts: dict[str, Any] | None = None, peft_config: Any = None, **settings: Any) -> Compared:
    """A trainer of three groups of four in a batch, over all processes, whose model is not the one on disk."""
    path, other = (tiny_model(folder / f"model-{seed}-{os.environ.get('RANK', 0)}", seed) for seed in (0, 1))
    policy = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    policy.load_state_dict(AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32).state_dict())
    policy.generation_config.eos_token_id = [1, *range(20, 45)]  # one token in twenty: responses of many lengths
    small = dict(SMALL)
    if VLLM:  # which needs an older transformers
        small["gradient_checkpointing"] = small.pop("activation_checkpointing")
    config = {
        **small,
        "output_dir": str(folder),
        "per_device_train_batch_size": 6 // int(os.environ.get("WORLD_SIZE", 1)),
        "logging_steps": 1,
        "save_strategy": "no",
        "max_completion_length": 24,
        "use_vllm": True,
        "vllm_max_model_length": 256,
    }
    args = GRPOConfig(**{**config, **settings})
    if os.environ.get("ACCELERATE_USE_FSDP"):  # accelerate ignores it where it finds no accelerators
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    own = {"over_sampling_batch_size": 5, "max_num_seqs": 8, "stream_interval": 5, **(rollouts or {})}
    with patch.dict(os.environ):  # TRL sets RANK and others, and accelerate takes the next trainer's process for a job
        return Compared(
            model=policy,
            reward_funcs=Reward(),
            args=args,
            train_dataset=rows(),
            eval_dataset=rows(4, first=100),
            processing_class=tiny.tokenizer(),
            peft_config=peft_config,
            partial_rollouts=PartialRollouts(**own),
        )


def llm_class() -> type:
    """Return vLLM's own class, or the stand-in's, which is on the path."""
    if VLLM:
        from tests.integrations.trl.small_llm import SmallLLM

        return SmallLLM
    import vllm

    return vllm.LLM


def main() -> None:
    folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    if not VLLM:
        sys.path.insert(0, str(STAND_INS))
    vllm_generation.LLM = llm_class()
    torch.set_num_threads(1)
    rounds = []
    go_round = JobEngine._go_round

    async def counted(self: Any, before: Any, what: str, *arguments: Any) -> None:
        rounds.append(what)
        await go_round(self, before, what, *arguments)

    JobEngine._go_round = counted  # type: ignore[method-assign,assignment]
    trained = trainer(folder, **settings)
    trained.train()
    llm = trained.vllm_generation.llm
    seen = {
        "batches": [
            [
                {"answer": row["answer"], "group": sample.group_id, "tokens": sample.response_ids}
                for row, sample in batch
            ]
            for batch, _ in trained.rows
        ],
        "differences": [[max([0.0, *part.tolist()]) for part in parts] for parts in trained.differences],
        "logs": [entry for entry in trained.state.log_history if "loss" in entry],
        "policy": [parameter.double().sum().item() for parameter in trained.model.parameters()],
        "calls": llm.calls,
        "steps": llm.steps,
        "rounds": rounds,
        "sharded": all(isinstance(parameter, DTensor) for parameter in trained.model.parameters()),
    }
    trained.close()
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
