"""AReaL's own trainer on a CPU: its configuration, its data, its workflow's reward, and records of its batches."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from areal.api import ModelRequest, RolloutWorkflow
from areal.api.cli_args import PPOConfig, SGLangConfig, to_structured_cfg
from areal.experimental.openai import ArealOpenAI
from areal.utils import name_resolve
from areal.utils.hf_utils import load_hf_tokenizer
from areal.workflow.rlvr import RLVRWorkflow
from datasets import Dataset
from omegaconf import OmegaConf

from april.integrations.areal import PPOTrainer
from tests import tiny
from tests.integrations.model_server import SGLangServer

GROUP = 3
BATCH = 4
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}<eos>\n{% endfor %}"
"""AReaL's client joins turns at end tokens."""


def reward(prompt: str, completion: str, prompt_ids: Any, completion_ids: Any, answer: str, **row: Any) -> float:
    """The length of a response, modulo 3."""
    assert prompt.startswith(f"{answer}?")
    return float(len(completion_ids) % 3)


def half(prompt: str, completion: str, prompt_ids: Any, completion_ids: Any, answer: str, **row: Any) -> float:
    """As `reward` for odd prompts, nothing for even ones."""
    return reward(prompt, completion, prompt_ids, completion_ids, answer, **row) * (int(answer) % 2)


def parity(prompt: str, completion: str, prompt_ids: Any, completion_ids: Any, answer: str, **row: Any) -> float:
    """1 for responses of odd length."""
    return float(len(completion_ids) % 2)


def failing(prompt: str, completion: str, prompt_ids: Any, completion_ids: Any, answer: str, **row: Any) -> float:
    raise LookupError("no such answer")


def accept(trajectory: dict[str, torch.Tensor]) -> bool:
    """A filter of groups: not all rewards are the same."""
    return len(set(trajectory["rewards"].tolist())) > 1


class TwoTurns(RLVRWorkflow):  # type: ignore[misc]
    """Requests a second response."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        await super().arun_episode(engine, data)
        return await super().arun_episode(engine, data)


class Images(RLVRWorkflow):  # type: ignore[misc]
    """Requests a response to a picture."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        return await engine.agenerate(ModelRequest(input_ids=[1], gconfig=self.gconfig, image_data=["picture"]))


class Chat(RolloutWorkflow):  # type: ignore[misc]
    """Talks to AReaL's client of OpenAI's API, until a message has an even length.

    Args:
        style: of AReaL's export: `concat` joins turns, `individual` returns a sequence for each.
    """

    def __init__(
        self, reward_fn: Any, gconfig: Any, tokenizer: Any, max_turns: int, turn_discount: float, style: str = "concat"
    ) -> None:
        self.gconfig = gconfig.new(n_samples=1)
        self.tokenizer = load_hf_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self.max_turns, self.turn_discount, self.style = max_turns, turn_discount, style

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        joined = self.style == "concat"
        client = ArealOpenAI(engine, self.tokenizer, chat_template_type="concat" if joined else "hf")
        messages = list(data["messages"])
        for _ in range(self.max_turns):
            made = await client.chat.completions.create(messages=messages, **self.gconfig.to_openai_args_dict())
            message = made.choices[0].message
            client.set_reward(made.id, float(len(message.content) % 2))
            if len(message.content) % 2 == 0:
                break
            messages += [message.model_dump(exclude_none=True), {"role": "user", "content": "Again."}]
        client.apply_reward_discount(self.turn_discount)
        return client.export_interactions(self.style)


class Penalty(RLVRWorkflow):  # type: ignore[misc]
    """Requests other sampling than the configuration has."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.gconfig = self.gconfig.new(frequency_penalty=0.5)


# Of a server that is not started; the trainer reads SGLang's version.
SGLangConfig.build_args = staticmethod(
    lambda sglang_config, **_: {
        "lora_paths": sglang_config.lora_paths,
        "context_length": sglang_config.context_length,
    }
)


def rows(numbers: Any) -> Dataset:
    return Dataset.from_list([{"messages": [{"role": "user", "content": f"{n}?"}], "answer": str(n)} for n in numbers])


def prepare(folder: Path, layers: int = 2, long: bool = False) -> None:
    """The model, and the only rank there is. Responses of a `long` policy seldom end before their budget."""
    model = tiny.model(num_hidden_layers=layers)
    if long:
        model.get_input_embeddings().weight.data[tiny.SHAPE["eos_token_id"]] = 0.0  # it is the output layer, too
    model.save_pretrained(folder / "model")
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")


def rank() -> dict[str, str]:
    """The environment variables that AReaL's launcher sets for a process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {"AREAL_SPMD_MODE": "1", **world}


def configuration(folder: Path, **changed: Any) -> PPOConfig:
    """What AReaL makes of a file of settings; `changed` by its names with `__` for a dot."""
    names = {"experiment_name": "april", "trial_name": "test", "fileroot": str(folder / "runs")}
    model = str(folder / "model")
    values = {
        **{
            f"{section}.{name}": value
            for section in ("rollout", "saver", "recover", "evaluator", "stats_logger")
            for name, value in names.items()
        },
        "experiment_name": "april",
        "trial_name": "test",
        "cluster.fileroot": str(folder / "runs"),
        "cluster.name_resolve.type": "nfs",
        "cluster.name_resolve.nfs_record_root": str(folder / "names"),
        "cluster.n_nodes": 1,
        "tokenizer_path": model,
        "total_train_epochs": 1,
        "train_dataset.path": "prompts",
        "train_dataset.type": "rl",
        "train_dataset.batch_size": BATCH,
        "valid_dataset.path": "held-out",
        "valid_dataset.type": "rl",
        "valid_dataset.batch_size": 3,
        "gconfig.n_samples": GROUP,
        "gconfig.max_new_tokens": 40,
        "rollout.backend": "sglang:d1",
        "rollout.max_head_offpolicyness": 5,
        "rollout.consumer_batch_size": BATCH,
        "rollout.setup_timeout": 60,
        "sglang.context_length": 96,
        "actor.experiment_name": "april",
        "actor.trial_name": "test",
        "actor.path": model,
        "actor.backend": "fsdp:d1",
        "actor.dtype": "float32",
        "actor.attn_impl": "sdpa",
        "actor.weight_update_mode": "disk",
        "actor.gradient_checkpointing": False,
        "actor.mb_spec.max_tokens_per_mb": 4096,
        "actor.optimizer.type": "adam",
        "actor.optimizer.lr": 0.01,
        "actor.optimizer.warmup_steps_proportion": 0.0,
        "actor.ppo_n_minibatches": 1,
        "actor.use_decoupled_loss": True,
        "actor.kl_ctl": 0.0,
        "recover.mode": "on",
        "recover.freq_steps": 1,
        "evaluator.freq_steps": None,
    }
    values |= {name.replace("__", "."): value for name, value in changed.items()}
    given = OmegaConf.create({})
    for name, value in values.items():
        OmegaConf.update(given, name, value, force_add=True)
    config: PPOConfig = OmegaConf.to_object(to_structured_cfg(given, PPOConfig))
    name_resolve.reconfigure(config.cluster.name_resolve)
    return config


class Trainer(PPOTrainer):
    """Keeps what every step was trained on, the weights of every version, and what waited around evaluations."""

    def __init__(self, config: PPOConfig, servers: Sequence[SGLangServer] = ()) -> None:
        super().__init__(config, rows(range(16)), rows(range(100, 106)), over_sampling_batch_size=7)
        self.servers = servers
        self.steps: list[Any] = []
        self.batches: list[list[dict[str, torch.Tensor]]] = []
        self.weights = [self._served()]
        self.waiting: list[str] = []
        self.rejected = 0
        compute = self.actor.compute_advantages

        def kept(batch: Any) -> Any:
            self.steps.append(self.rollouts.latest)
            self.rejected += len(self.rollouts.latest.rejections)
            self.batches.append([dict(trajectory) for trajectory in batch])
            return compute(batch)

        self.actor.compute_advantages = kept

    def _served(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.servers[0].model.state_dict().items()}

    def _save_recover_checkpoint(self, **step: int) -> None:
        self.weights.append(self._served())
        super()._save_recover_checkpoint(**step)

    def _evaluate(self, **step: Any) -> None:
        self.waiting.append(str(self.rollouts.state_dict()))
        super()._evaluate(**step)
        self.waiting.append(str(self.rollouts.state_dict()))
