"""Stands in for slime's `MegatronTrainRayActor`, on a CPU: Megatron's own attention refuses slime's packed sequences
(`DotProductAttention.forward`: "Packed sequence is not supported"), and Transformer Engine's needs a GPU.

It trains a Hugging Face model on the data of slime's rollout manager, with slime's policy loss, and writes weights
where slime's actor group loads them into the servers (`--update-weight-transport disk`).
"""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import ray
import torch
from slime.ray.ray_actor import RayActor
from slime.utils.ppo_utils import compute_policy_loss
from transformers import AutoModelForCausalLM, AutoTokenizer

RECORD = "steps.jsonl"
"""File in the folder of `--save`: facts about each step."""
ENTROPY = 0.01
"""Coefficient of an entropy bonus. It changes the weights although all rewards of a random policy are equal."""


class CPUTrainActor(RayActor):  # type: ignore[misc]
    def __init__(self, world_size: int, rank: int, master_addr: str | None, master_port: int | None) -> None:
        assert world_size == 1
        self.master_addr, self.master_port = self._get_current_node_ip_and_free_port()

    def init(self, args: Namespace, role: str, **_: Any) -> int:
        self.args = args
        self.model = AutoModelForCausalLM.from_pretrained(args.hf_checkpoint, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.version = 0
        first: int = args.start_rollout_id
        return first

    def set_rollout_manager(self, rollout_manager: Any) -> None:
        parallel = {"dp_size": 1, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
        ray.get(rollout_manager.set_train_parallel_config.remote(parallel))

    def train(self, rollout_id: int, rollout_data_ref: list[Any], external_data: Any = None) -> None:
        data = ray.get(rollout_data_ref[0].inner)
        total = torch.zeros(())
        for place, ids in enumerate(data["tokens"]):
            tokens, length = torch.as_tensor(ids).long(), data["response_lengths"][place]
            scores = self.model(tokens[None]).logits[0, -length - 1 : -1].log_softmax(-1)
            new = scores.gather(1, tokens[-length:, None])[:, 0]
            old = torch.as_tensor(data["rollout_log_probs"][place]).float()
            mask = torch.as_tensor(data["loss_masks"][place]).float()
            advantage = torch.full_like(new, float(data["rewards"][place]))
            loss, _ = compute_policy_loss(old - new, advantage, self.args.eps_clip, self.args.eps_clip_high)
            entropy = -(scores.exp() * scores).sum(-1)
            total = total + ((loss - ENTROPY * entropy) * mask).sum() / max(float(mask.sum()), 1.0)
        self.optimizer.zero_grad()
        total.backward()
        self.optimizer.step()
        facts = {
            "rollout": rollout_id,
            "version": self.version,
            "samples": len(data["tokens"]),
            "updates": len(data["global_batch_sizes"]),
            "trained": sum(int(torch.as_tensor(mask).sum()) for mask in data["loss_masks"]),
        }
        folder = Path(self.args.save)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / RECORD).open("a") as file:
            file.write(json.dumps(facts) + "\n")

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        self._write(Path(self.args.save) / f"model_{rollout_id}")

    def update_weights(self) -> None:
        self.version += 1
        self._write(Path(self.args.update_weight_disk_dir) / f"weight_v{self.version:06d}")

    def _write(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(self.args.hf_checkpoint).save_pretrained(folder)

    def clear_memory(self) -> None:
        pass
