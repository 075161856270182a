"""Time that engines and trainer on the same GPUs need to change places, once in each training step.

Interrupted engines sleep, the trainer's state moves to the GPUs, and after training back to host memory; engines wake
up and take the new weights. Neither generation nor training runs in that time.
"""

from __future__ import annotations

from dataclasses import dataclass

from april.simulation.hardware import LORA_TRAINER_BYTES, NODE, TRAINER_BYTES, ModelShape

GRADIENT_BYTES = 4.0
"""Bytes of a gradient per parameter, which are freed after each step and never move."""
COPY_BYTES = 2.0
"""Bytes of the rounded copy of a parameter, which moves with the trainer's state."""


@dataclass(frozen=True, kw_only=True)
class TurnOver:
    """Times of a turn.

    Sleeping and waking: vLLM's figures for 32 billion parameters at level 2, which drops weights and KV cache (others'
    measurement; april has none). Copies between host memory and a GPU: half of what PCIe 5.0 with 16 lanes transfers.

    Args:
        sleep_seconds: engines release their memory.
        wake_seconds: engines allocate weights and KV cache again.
        host_bandwidth: bytes/s between pinned host memory and each GPU.
    """

    sleep_seconds: float = 0.08
    wake_seconds: float = 0.47
    host_bandwidth: float = 2.5e10

    def seconds(self, model: ModelShape, gpus: int, trainer_bytes: float = TRAINER_BYTES) -> float:
        """Return the seconds of a turn without the weight update.

        Args:
            gpus: GPUs that train; each moves its shard of the state, at least an eighth.
            trainer_bytes: bytes of the trainer's state on GPUs, for each parameter.
        """
        moved = trainer_bytes
        if trainer_bytes > LORA_TRAINER_BYTES:
            moved += COPY_BYTES - GRADIENT_BYTES
        shard = moved * model.parameters / min(gpus, NODE)
        return self.sleep_seconds + self.wake_seconds + 2 * shard / self.host_bandwidth
