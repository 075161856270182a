"""verl on machines without a GPU: a platform for CPUs, and a rollout engine in the place of vLLM.

verl has no platform for a CPU, but accepts one that is registered from outside. This platform implements the calls for
a GPU, and its engines are the ones registered for CUDA (`VERL_ENGINE_DEVICE`). verl takes rollout engines from outside,
too. With this module in `VERL_USE_EXTERNAL_MODULES`, every process of a run begins with both.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import fsdp
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry, set_platform


def _nothing(*_: Any, **__: Any) -> int:
    return 0


ANSWERED = (
    *("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved", "memory_stats"),
    *("set_device", "empty_cache", "synchronize", "reset_peak_memory_stats", "manual_seed", "manual_seed_all"),
    "ipc_collect",
)
MEMORY = SimpleNamespace(total_memory=2**34, name="CPU")


@PlatformRegistry.register(platform="cpu")
class CPU(PlatformBase):  # type: ignore[misc]
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = SimpleNamespace(
        current_device=lambda: "cpu",
        is_available=lambda: False,
        device_count=lambda: 1,
        get_device_properties=lambda *_: MEMORY,
        get_device_name=lambda *_: "CPU",
        mem_get_info=lambda *_: (2**34, 2**34),
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
        **dict.fromkeys(ANSWERED, _nothing),
    )
    set_device = synchronize = manual_seed = manual_seed_all = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Any:
        yield

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False


os.environ["VERL_ENGINE_DEVICE"] = "cuda"
set_platform(CPU())

import ray  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from verl.workers.rollout import base  # noqa: E402
from verl.workers.rollout.replica import RolloutReplicaRegistry  # noqa: E402


class Offloaded(fsdp.CPUOffloadPolicy):
    """verl offloads a reference model to pinned memory, of which there is none without a GPU."""

    def __init__(self, pin_memory: bool = True) -> None:
        super().__init__(pin_memory=False)


fsdp.CPUOffloadPolicy = Offloaded


def init_process_group(backend: str | None = None, **settings: Any) -> None:
    """torch's function. verl's backend names the CPU twice: as itself, and as the platform's device."""
    _init_process_group(backend="gloo" if backend == "cpu:gloo,cpu:gloo" else backend, **settings)


_init_process_group = dist.init_process_group
dist.init_process_group = init_process_group


REPLICA = "tiny-0"
"""Name of the replica's actor, by which a worker finds it."""


class RolloutEngine(base.BaseRollout):  # type: ignore[misc]
    """A training worker's end of the rollout engine: it passes weights on to the replica, adapters merged. Each update
    must bring other weights than the one before."""

    sent: dict[str, torch.Tensor] | None = None

    async def resume(self, tags: list[str]) -> None:
        """The replica wakes up with its weights."""

    async def release(self) -> None:
        """The trainer puts the replica to sleep."""

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], peft_config: Any = None, global_steps: int = 0, **_: Any
    ) -> None:
        named = {name: tensor.detach().clone() for name, tensor in weights}
        if dist.get_rank() == 0:
            if peft_config is not None:
                named = self._merged(named, peft_config)
            if self.sent is not None:
                assert any((named[name] != self.sent[name]).any() for name in named), "the weights have not changed"
            self.sent = named
            await ray.get_actor(REPLICA).set_weights.remote(global_steps, named)

    def _merged(self, adapter: dict[str, torch.Tensor], settings: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

        model = AutoModelForCausalLM.from_pretrained(self.model_config.local_path, dtype=torch.float32)
        config = LoraConfig(**{name: settings[name] for name in ("r", "lora_alpha", "target_modules")})
        peft = get_peft_model(model, config)
        unknown = set_peft_model_state_dict(peft, adapter).unexpected_keys
        assert not unknown, unknown
        return dict(peft.merge_and_unload().state_dict())


def replica() -> Any:
    # Imported when a run needs it: it imports classes of verl that import this module's platform.
    from tests.integrations.verl.trainer import TinyReplica

    class NamedReplica(TinyReplica):
        actor_name = REPLICA

    return NamedReplica


def limit_of_vllm() -> None:
    """Replace the module of vLLM's limit on the rank of adapters, which verl reads before a run."""
    package, utils = (ModuleType(f"verl.workers.rollout.vllm_rollout{name}") for name in ("", ".utils"))
    utils.get_vllm_max_lora_rank = lambda rank: rank  # type: ignore[attr-defined]
    sys.modules |= {module.__name__: module for module in (package, utils)}


limit_of_vllm()
base._ROLLOUT_REGISTRY["vllm", "async"] = f"{__name__}.RolloutEngine"
RolloutReplicaRegistry.register("vllm", replica)
