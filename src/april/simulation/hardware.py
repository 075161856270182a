"""Cost models computed from a GPU and a model's shape, by a roofline.

A decode step reads every weight once, whatever the batch size (of experts, only those that some sample is routed to),
and computes 2 FLOP per parameter and sample; it takes the longer of the two times. Attention reads the KV cache of the
running samples. Prefill computes 2 FLOP per parameter and token, and attention's 4 FLOP per layer, head dimension and
earlier token. Only a share of bandwidth and FLOP/s is reached (`bandwidth_share`, `compute_share`), and each step has a
launch overhead; these three are assumptions, to be replaced by a measurement (`april calibrate`) once a machine is
available.

GPUs, dense bfloat16, from the vendors' data sheets:
- A100 SXM: 80 GB, 2.039 TB/s, 312 TFLOP/s (NVIDIA A100 Tensor Core GPU data sheet);
- H100 SXM: 80 GB, 3.35 TB/s, 989 TFLOP/s. H200 SXM: 141 GB, 4.8 TB/s, 989 TFLOP/s (NVIDIA H100 and H200 Tensor Core
  GPU data sheets; both print 1,979 with sparsity, half of which is dense);
- B200 of an HGX board: 180 GB, 8 TB/s, 2,250 TFLOP/s (NVIDIA DGX B200 data sheet: 1,440 GB, 64 TB/s);
- MI300X: 192 GB, 5.3 TB/s, 1,307 TFLOP/s (AMD Instinct MI300X data sheet).

Shapes from the models' config.json: Qwen/Qwen3-0.6B, Qwen/Qwen3-1.7B, Qwen/Qwen3-4B, Qwen/Qwen3-8B,
Qwen/Qwen3-30B-A3B, deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B, zai-org/GLM-4-9B-0414.
"""

from __future__ import annotations

from dataclasses import dataclass

from april.simulation.cost_model import CostModel


@dataclass(frozen=True, kw_only=True)
class GPU:
    """Figures of a data sheet: bytes, bytes/s, FLOP/s in dense bfloat16."""

    name: str
    memory: float
    bandwidth: float
    flops: float

    def times(self, count: int) -> GPU:
        """Return `count` GPUs that compute a model's layers together, without any loss, as one."""
        if count == 1:
            return self
        name = f"{count} × {self.name}"
        return GPU(name=name, memory=self.memory * count, bandwidth=self.bandwidth * count, flops=self.flops * count)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder with grouped-query attention and a gated MLP, or `experts` of them in each layer.

    Args:
        intermediate: width of the MLP, or of an expert.
        experts: experts of a layer; 1 for a dense model.
        experts_per_token: experts that a token is routed to.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    experts: int = 1
    experts_per_token: int = 1

    @property
    def matrix_parameters(self) -> int:
        """Parameters that a token is multiplied with: layers, with its own experts, and the output head."""
        return round(self._matrices(self.experts_per_token))

    @property
    def parameters(self) -> int:
        """All parameters except biases, norms and routers."""
        return round(self._matrices(self.experts)) + (0 if self.tied else self.hidden * self.vocabulary)

    def read_parameters(self, tokens: int) -> float:
        """Return the parameters that a pass over `tokens` tokens reads, if routing is uniform over experts."""
        missed = (1 - self.experts_per_token / self.experts) ** tokens
        return self._matrices(self.experts * (1 - missed))

    def _matrices(self, experts: float) -> float:
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate * experts) + self.hidden * self.vocabulary

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV cache per token, in bfloat16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Assumptions: shares of a data sheet's figures that are reached, and overheads.

    Args:
        bandwidth_share: share of the memory bandwidth, in decoding.
        compute_share: share of the FLOP/s, in prefill, decoding and training.
        step_overhead: seconds of each decode step in addition to reading and computing.
        memory_share: share of the memory for weights and KV cache.
        slots: samples that decode together on one GPU.
        link: bytes/s at which new weights reach a GPU.
        update_overhead: seconds of each weight update in addition to the transfer.
        interrupt_seconds: from an interrupt to the last partial response.
    """

    bandwidth_share: float = 0.7
    compute_share: float = 0.45
    step_overhead: float = 2e-3
    memory_share: float = 0.85
    slots: int = 256
    link: float = 2.5e10
    update_overhead: float = 1.0
    interrupt_seconds: float = 0.1


GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU(name="a100", memory=80e9, bandwidth=2.039e12, flops=312e12),
        GPU(name="h100", memory=80e9, bandwidth=3.35e12, flops=989e12),
        GPU(name="h200", memory=141e9, bandwidth=4.8e12, flops=989e12),
        GPU(name="b200", memory=180e9, bandwidth=8e12, flops=2250e12),
        GPU(name="mi300x", memory=192e9, bandwidth=5.3e12, flops=1307e12),
    )
}
MODELS = {
    shape.name: shape
    for shape in (
        ModelShape(
            name="qwen3-0.6b",
            layers=28,
            hidden=1024,
            intermediate=3072,
            heads=16,
            kv_heads=8,
            head_dim=128,
            vocabulary=151936,
            tied=True,
        ),
        ModelShape(
            name="qwen3-1.7b",
            layers=28,
            hidden=2048,
            intermediate=6144,
            heads=16,
            kv_heads=8,
            head_dim=128,
            vocabulary=151936,
            tied=True,
        ),
        ModelShape(
            name="qwen3-4b",
            layers=36,
            hidden=2560,
            intermediate=9728,
            heads=32,
            kv_heads=8,
            head_dim=128,
            vocabulary=151936,
            tied=True,
        ),
        ModelShape(
            name="qwen3-8b",
            layers=36,
            hidden=4096,
            intermediate=12288,
            heads=32,
            kv_heads=8,
            head_dim=128,
            vocabulary=151936,
            tied=False,
        ),
        ModelShape(
            name="qwen3-30b-a3b",
            layers=48,
            hidden=2048,
            intermediate=768,
            heads=32,
            kv_heads=4,
            head_dim=128,
            vocabulary=151936,
            tied=False,
            experts=128,
            experts_per_token=8,
        ),
        ModelShape(
            name="r1-distill-1.5b",
            layers=28,
            hidden=1536,
            intermediate=8960,
            heads=12,
            kv_heads=2,
            head_dim=128,
            vocabulary=151936,
            tied=False,
        ),
        ModelShape(
            name="glm4-9b",
            layers=40,
            hidden=4096,
            intermediate=13696,
            heads=32,
            kv_heads=2,
            head_dim=128,
            vocabulary=151552,
            tied=False,
        ),
    )
}
TRAINER_BYTES, LORA_TRAINER_BYTES, OFFLOADED_BYTES = 16.0, 2.0, 0.0
"""Bytes of the trainer's state on GPUs per parameter: float32 weights, gradients and two moments; with LoRA only the
weights, as adapters are small; 0 with trainer.cpu_offload, whose transfers take no time in this model."""
NODE = 8
"""Maximum number of GPUs over which a trainer that shares them with engines shards its state."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


def roofline(
    gpu: GPU,
    model: ModelShape,
    assumptions: Roofline | None = None,
    *,
    trainer_gpus: int = 0,
    trainer_bytes: float = TRAINER_BYTES,
) -> CostModel:
    """Return the cost model of one engine on one GPU.

    Args:
        trainer_gpus: GPUs that the trainer shares with the engines; each holds its shard of the trainer's state, at
            least an eighth, in memory that the KV cache then lacks. 0 if the trainer has other GPUs.
        trainer_bytes: bytes of the trainer's state, for each parameter.

    Raises:
        ValueError: the model, or model and trainer together, do not fit the GPU.
    """
    given = assumptions or Roofline()
    bandwidth, flops = gpu.bandwidth * given.bandwidth_share, gpu.flops * given.compute_share
    weights = 2 * model.parameters
    room = gpu.memory * given.memory_share - weights
    state = trainer_bytes * model.parameters / min(trainer_gpus, NODE) if trainer_gpus else 0.0
    kv_tokens = int((room - state) / model.kv_bytes)
    if kv_tokens < 1:
        trainer = f" and {state / 1e9:.0f} GB for its part of the trainer's state" if state else ""
        raise ValueError(
            f"{model.name} needs {weights / 1e9:.0f} GB for its weights{trainer} and does not fit a {gpu.name} "
            f"({gpu.memory / 1e9:.0f} GB)"
        )
    computing = 2 * model.matrix_parameters / flops
    batches = (*(b for b in BATCHES if b < given.slots), given.slots)
    return CostModel(
        slots=given.slots,
        kv_tokens=kv_tokens,
        decode_batches=batches,
        decode_seconds=tuple(
            given.step_overhead + max(2 * model.read_parameters(b) / bandwidth, b * computing) for b in batches
        ),
        kv_token_seconds=model.kv_bytes / bandwidth,
        prefill_token_seconds=computing,
        # Scores and values over the half of the pairs that causality leaves.
        prefill_pair_seconds=2 * model.layers * model.heads * model.head_dim / flops,
        update_seconds=given.update_overhead + weights / given.link,
        interrupt_seconds=given.interrupt_seconds,
        source=f"roofline: {model.name} on {gpu.name}",
    )


def check_trainer(gpu: GPU, model: ModelShape, gpus: int, trainer_bytes: float = TRAINER_BYTES) -> None:
    """Check that a trainer fits `gpus` GPUs that only train.

    Raises:
        ValueError: the trainer does not fit.
    """
    state = trainer_bytes * model.parameters
    if state > gpus * gpu.memory * Roofline().memory_share:
        raise ValueError(
            f"weights, gradients and optimizer of {model.name} take {state / 1e9:.0f} GB: training needs more GPUs "
            f"than {gpus} {gpu.name} ({gpu.memory / 1e9:.0f} GB each)"
        )


def training_seconds_per_token(gpu: GPU, model: ModelShape, gpus: int, assumptions: Roofline | None = None) -> float:
    """Return seconds of training per consumed token: 6 FLOP per parameter for forward and backward, and 2 for the
    forward pass that computes the trainer's log-probabilities."""
    given = assumptions or Roofline()
    return 8 * model.matrix_parameters / (gpu.flops * given.compute_share * gpus)
