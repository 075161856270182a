"""What april adds to vLLM's workers: the receiving side of `broadcast.py`, adapters merged in, output layers kept
fresh, and drafts verified on a CPU as on GPUs.

Runs in the server's workers, where `--worker-extension-cls` names `WorkerExtension`. It imports nothing of april: the
server's environment need not have it. vLLM's own nccl backend needs GPUs and vLLM's communicator on the trainer's side;
the one here, called `april`, is a plain torch group, gloo or nccl.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch._C import _distributed_c10d as c10d_types
from torch.distributed import distributed_c10d as c10d
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.triton_utils import HAS_TRITON


@dataclass
class InitInfo(WeightTransferInitInfo):
    address: str
    port: int
    world_size: int
    first_rank: int
    name: str
    backend: str
    timeout: float = 120.0


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


class WeightReceiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    _group: Any = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.shutdown()  # a trainer that makes a new group has left the one before
        parallel = self.parallel_config
        # `parallel.rank` counts within one data-parallel replica; all workers of the server join.
        rank = init_info.first_rank + parallel.data_parallel_index * parallel.world_size + parallel.rank
        timeout = timedelta(seconds=init_info.timeout)
        store = c10d_types.TCPStore(
            init_info.address, init_info.port, is_master=False, timeout=timeout, wait_for_workers=False
        )
        # As in `weight_group.join`: both sides must construct the group in the same way.
        self._group, _ = c10d._new_process_group_helper(
            init_info.world_size,
            rank,
            [],
            c10d.Backend(init_info.backend),
            c10d.PrefixStore(init_info.name, store),
            group_name=init_info.name,  # type: ignore[arg-type]
            timeout=timeout,
        )
        c10d._world.pg_group_ranks[self._group] = {i: i for i in range(init_info.world_size)}

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """The bytes of all tensors come as one, and the tensors are views of it."""
        kinds = [getattr(torch, dtype) for dtype in update_info.dtypes]
        sizes = [math.prod(shape) * kind.itemsize for kind, shape in zip(kinds, update_info.shapes, strict=True)]
        packed = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        dist.broadcast(packed, src=0, group=self._group)
        tensors = [
            part.view(kind).view(shape)
            for part, kind, shape in zip(packed.split(sizes), kinds, update_info.shapes, strict=True)
        ]
        self.model.load_weights(zip(update_info.names, tensors, strict=True))

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        refresh_output_layer(self.model)

    def shutdown(self) -> None:
        if self._group is not None:
            if dist.get_backend(self._group) == "nccl":
                c10d._abort_process_group(self._group)  # destroying waits for a trainer that may be gone
            else:
                dist.destroy_process_group(self._group)
            self._group = None


if "april" not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine("april", WeightReceiver)


def refresh_output_layer(model: Any) -> None:
    """Have an output layer that is tied to the embeddings take up what the embeddings have become.

    On a CPU, vLLM 0.32 computes with a repacked copy of the output layer, and a weight update does
    not repeat that copy unless the checkpoint has separate weights for the layer.
    """
    text = getattr(model, "language_model", model)  # a model that reads images has its text model inside
    head = getattr(text, "lm_head", None)
    if head is not None and hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)


def merged(weights: Iterable[tuple[str, torch.Tensor]], directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """A policy's tensors, LoRA adapters added in, as the trainer would merge them: computed in the adapters' type.

    Raises:
        ValueError: an adapter is for a tensor that the policy does not have.
    """
    config = json.loads((directory / "adapter_config.json").read_text())
    # LoRA computes W + (alpha / r)·B·A (arXiv 2106.09685, section 4.1).
    scale = config["lora_alpha"] / config["r"]
    adapters = load_file(directory / "adapter_model.safetensors")
    downs = {
        name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"): name
        for name in adapters
        if name.endswith(".lora_A.weight")
    }
    for name, weight in weights:
        if (down := downs.pop(name.removesuffix(".weight"), None)) is not None:
            up = adapters[down.replace(".lora_A.", ".lora_B.")]
            weight = weight.to(up.dtype) + (up @ adapters[down] * scale).to(weight.device)
        yield name, weight
    if downs:
        raise ValueError(f"{directory}: no weights are there for the adapters of {sorted(downs)}")


def expand(
    output: torch.Tensor, values: torch.Tensor, ends: torch.Tensor, replace_from: int, replace_to: int, longest: int
) -> None:
    """Give each drafted token its request's setting: `values[i]` for the tokens of `output` before `ends[i]`."""
    counts = ends.diff(prepend=ends.new_zeros(1)).long()
    output.copy_(values.where(values != replace_from, replace_to).repeat_interleave(counts))


if not HAS_TRITON:
    # Without Triton (on a CPU), vLLM 0.32 gives drafted tokens whatever temperature, top-k and top-p
    # memory holds (its issue 55005), and dies of top-k in a step for which nothing was drafted.
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.v1.sample.ops import topk_topp_sampler

    of_some = topk_topp_sampler.apply_top_k_only

    def apply_top_k_only(logits: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return of_some(logits, k) if len(k) else logits

    register_kernels({"vllm.v1.sample.rejection_sampler.expand_kernel": expand})
    topk_topp_sampler.apply_top_k_only = apply_top_k_only


class WorkerExtension:
    """The methods a worker gets."""

    def merge_adapters(self, directory: str) -> None:
        """Compute with the policy that the LoRA adapters in `directory` were begun with, and with them."""
        from vllm.model_executor.model_loader import get_model_loader

        worker: Any = self
        settings = worker.vllm_config
        base = copy.copy(settings.model_config)
        base.model = json.loads((Path(directory) / "adapter_config.json").read_text())["base_model_name_or_path"]
        base.model_weights, base.revision = "", None
        weights = get_model_loader(settings.load_config).get_all_weights(base, worker.model_runner.get_model())
        worker.reload_weights(weights_iterator=merged(weights, Path(directory)))

    def nccl_version(self) -> str | None:
        """The version of the nccl library that torch uses in this worker; None without a GPU."""
        return ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None

    def refresh_output_layer(self) -> None:
        refresh_output_layer(self.model_runner.get_model())  # type: ignore[attr-defined]
