"""SkyRL's own trainer on a CPU: its worker, with stand-ins for calls of CUDA, and the configuration of a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ray
import torch
from safetensors.torch import save_file
from skyrl.backends.skyrl_train.distributed import fsdp_utils
from skyrl.backends.skyrl_train.workers.fsdp import fsdp_worker
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.dataset import PromptDataset
from skyrl.train.entrypoints import main_base
from skyrl.train.utils import validate_cfg
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from transformers import PreTrainedTokenizerFast

from april.integrations.settings import Settings
from april.integrations.skyrl import Experiment
from tests import tiny

GROUP = 3
BATCH = 4


class Length(BaseTextEnv):
    """A response is worth its length, modulo 3."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.answer = (extras or {})["answer"]

    def step(self, action: str) -> BaseTextEnvStepOutput:
        return BaseTextEnvStepOutput(observations=[], reward=float(len(action) % 3), done=True, metadata={})

    def get_metrics(self) -> dict[str, Any]:
        return {"answer": float(self.answer)}


class Half(Length):
    """So is one to an odd prompt; to an even one, it is worth nothing."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        made = super().step(action)
        return BaseTextEnvStepOutput(**{**made, "reward": made["reward"] * (int(self.answer) % 2)})


class Endless(Length):
    """Always requests another turn."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        observations = [{"role": "user", "content": "And then?"}]
        return BaseTextEnvStepOutput(observations=observations, reward=float(len(action) % 3), done=False, metadata={})


def without_cuda() -> None:
    """Every call of CUDA that SkyRL's policy worker makes between a start and a checkpoint."""
    mesh = torch.distributed.device_mesh.init_device_mesh
    group = torch.distributed.init_process_group

    def on_cpu(device_type: str, **shape: Any) -> Any:
        return mesh("cpu", **shape)

    torch.distributed.device_mesh.init_device_mesh = on_cpu
    torch.distributed.init_process_group = lambda backend, timeout: group("gloo", timeout=timeout)
    fsdp_utils.init_device_mesh = on_cpu
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.set_device = torch.cuda.synchronize = lambda *_: None
    torch.Tensor.cuda = lambda tensor: tensor


class PolicyWorker(fsdp_worker.FSDPPolicyWorkerBase):  # type: ignore[misc]
    """SkyRL's, with weights that go to servers by a file in the place of NCCL."""

    def __init__(self, **settings: Any) -> None:
        without_cuda()
        super().__init__(**settings)

    async def init_weight_sync_state(self, client: Any, config: Any) -> None:
        self._weight_sync_inference_client = client

    async def broadcast_to_inference_engines(self, client: Any, config: Any, model_id: str | None = None) -> None:
        if self._is_lora:
            await super().broadcast_to_inference_engines(client, config, model_id)
            folder = Path(self.cfg.ckpt_path).parent / "adapters"
            folder.mkdir(exist_ok=True)
            shutil.copytree(self.cfg.policy.model.lora.lora_sync_path, folder / f"{len(list(folder.iterdir())):04}")
            return
        weights = {name: p.full_tensor() for name, p in self.model.model.state_dict().items()}
        folder = Path(self.cfg.ckpt_path).parent / "weights"
        folder.mkdir(exist_ok=True)
        path = folder / f"{len(list(folder.iterdir())):04}.pt"
        torch.save(weights, path)
        await self._weight_sync_inference_client._call_all_servers("/load", {"path": str(path)})


class DiskPolicyWorker(PolicyWorker):
    """SkyRL's, with weights that go to real vLLM servers from a directory, by vLLM's own calls."""

    async def broadcast_to_inference_engines(self, client: Any, config: Any, model_id: str | None = None) -> None:
        weights = {name: p.full_tensor().contiguous() for name, p in self.model.model.state_dict().items()}
        folder = Path(self.cfg.ckpt_path).parent / "weights"
        folder.mkdir(exist_ok=True)
        path = folder / f"{len(list(folder.iterdir())):04}"
        shutil.copytree(self.cfg.policy.model.path, path)
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        client = self._weight_sync_inference_client
        await client._call_all_servers("/collective_rpc", call)
        await client.reset_prefix_cache()


class Rows(PromptDataset):  # type: ignore[misc]
    """SkyRL's dataset, read in one process instead of eight."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "num_workers": 1})


fsdp_worker.PolicyWorker = ray.remote(num_gpus=1)(PolicyWorker)
main_base.PromptDataset = Rows


def tokenizer() -> PreTrainedTokenizerFast:
    made = tiny.tokenizer()
    made.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    return made


def prepare(folder: Path) -> None:
    """Model and data."""
    tiny.model().save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    for name, numbers in (("prompts", range(16)), ("held-out", range(100, 106))):
        rows = [
            {"prompt": [{"role": "user", "content": f"{n}?"}], "env_class": "length", "answer": str(n)} for n in numbers
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def values_of(folder: Path, urls: list[str]) -> dict[str, Any]:
    """Return the settings of a run with a tiny model on a CPU."""
    return {
        "data.train_data": [str(folder / "prompts.jsonl")],
        "data.val_data": [str(folder / "held-out.jsonl")],
        "data.dataloader.num_workers": 0,
        "trainer.policy.model.path": str(folder / "model"),
        "trainer.policy.model.lora.lora_sync_path": str(folder / "adapter"),
        "trainer.policy.optimizer_config.lr": 0.01,
        "trainer.policy.optimizer_config.num_warmup_steps": 0,
        "trainer.policy.fsdp_config.mixed_precision": {"param_dtype": "fp32", "reduce_dtype": "fp32"},
        "trainer.flash_attn": False,
        "trainer.remove_microbatch_padding": False,
        "trainer.placement.colocate_all": False,
        "trainer.placement.policy_num_gpus_per_node": 1,
        "trainer.algorithm.use_kl_loss": False,
        "trainer.algorithm.off_policy_correction.tis_ratio_type": "token",
        "trainer.train_batch_size": BATCH,
        "trainer.policy_mini_batch_size": BATCH,
        "trainer.micro_train_batch_size_per_gpu": 4,
        "trainer.micro_forward_batch_size_per_gpu": 4,
        "trainer.epochs": 1,
        "trainer.max_prompt_length": 16,
        "trainer.eval_interval": -1,
        "trainer.eval_before_train": False,
        "trainer.eval_batch_size": 6,
        "trainer.ckpt_interval": 1,
        "trainer.hf_save_interval": -1,
        "trainer.max_ckpts_to_keep": -1,
        "trainer.resume_mode": "latest",
        "trainer.logger": "console",
        "trainer.ckpt_path": str(folder / "checkpoints"),
        "trainer.export_path": str(folder / "exports"),
        "trainer.log_path": str(folder / "logs"),
        "generator.n_samples_per_prompt": GROUP,
        "generator.sampling_params.max_generate_length": 40,
        "generator.inference_engine.run_engines_locally": False,
        "generator.inference_engine.enable_ray_prometheus_stats": False,
        "trainer.enable_ray_gpu_monitor": False,
        "generator.inference_engine.external_proxy_url": urls[0],
        "generator.inference_engine.external_server_urls": urls,
        "environment.env_class": "length",
    }


def words_of(folder: Path, urls: list[str], **changed: Any) -> list[str]:
    """Return these settings as arguments of a command line."""
    values = values_of(folder, urls) | changed
    # OmegaConf reads values as YAML, of which JSON is a part.
    return [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in values.items()]


def configuration(folder: Path, urls: list[str], **changed: Any) -> SkyRLTrainConfig:
    """What SkyRL makes of a command line; `changed` by its names with `__` for a dot."""
    values = values_of(folder, urls)
    values |= {name.replace("__", "."): value for name, value in changed.items()}
    cfg = SkyRLTrainConfig.from_cli_overrides(values)
    validate_cfg(cfg)
    return cfg


def train(cfg: SkyRLTrainConfig, settings: Settings | None, watch: Any = None) -> Experiment:
    """Train in this process, as SkyRL's entrypoint does in one of Ray's. `watch` is one of SkyRL's callbacks."""
    experiment = Experiment(cfg, settings)
    set_up = experiment._setup_trainer

    def watched() -> Any:
        trainer = set_up()
        if watch is not None:
            if cfg.trainer.fully_async.enabled:  # SkyRL's trainer takes no callbacks then
                watch.attach(trainer)
            else:
                trainer.add_callback(watch)
        return trainer

    experiment._setup_trainer = watched
    experiment.run()
    return experiment


@ray.remote(num_cpus=1)
def run_with_stand_ins(cfg: SkyRLTrainConfig, settings: Settings) -> None:
    """Run april's task in a process with this module's stand-ins."""
    # Imported here, because Ray sends this function without its module.
    from tests.integrations.skyrl.trainer import train

    train(cfg, settings)
