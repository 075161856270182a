"""Settings of an embedded engine: on a model of this process, or loaded in another process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from april.rollout.engine import KVPolicy
from april.rollout.trajectory.routes import RouterReplay

if TYPE_CHECKING:
    import torch

    from april.engines.embedded.engine import EmbeddedEngine
    from april.images.store import ImageStore

SHARE_OF_OWN_GPU = 0.8
"""Share of the memory that the parameters leave free; the rest is for activations and logits of a forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedSettings:
    """An embedded engine, with the settings of `EmbeddedEngine`; `load` reads the first four and the last.

    Args:
        model: a Hugging Face causal language model, as a directory or a hub name; weights come by `update_weights`.
        dtype: type of its parameters, a name of torch's.
        device: as torch names it.
        threads: CPU threads of torch; None: torch's default.
        kept_images: see `kept` of `ImageStore`.
    """

    model: str
    dtype: str = "float32"
    device: str = "cpu"
    threads: int | None = None
    max_num_seqs: int = 64
    context_length: int | None = None
    kv_cache_bytes: int | None = None
    prefill_chunk: int = 1024
    on_update: KVPolicy = "recompute"
    stream_interval: int = 1
    router_replay: RouterReplay = "off"
    kept_images: Path | None = None

    def load(self) -> EmbeddedEngine:
        """Return the engine, with the model's weights as they are on disk."""
        import torch

        from april.engines.pretrained import load_model
        from april.images.store import ImageStore
        from april.images.support import load_images

        if self.threads:
            torch.set_num_threads(self.threads)
        model = load_model(self.model, getattr(torch, self.dtype)).to(self.device)
        images = load_images(self.model, self.kept_images)
        store = images if isinstance(images, ImageStore) else None
        return self.engine(model, self.budget(model.device), store)

    def engine(self, model: Any, kv_cache_bytes: int | None, images: ImageStore | None) -> EmbeddedEngine:
        """Return an engine on `model`, in this process."""
        from april.engines.embedded.engine import EmbeddedEngine

        return EmbeddedEngine(
            model,
            max_num_seqs=self.max_num_seqs,
            context_length=self.context_length,
            kv_cache_bytes=kv_cache_bytes,
            prefill_chunk=self.prefill_chunk,
            on_update=self.on_update,
            stream_interval=self.stream_interval,
            router_replay=self.router_replay,
            stop_token_ids=(),  # samples have their own, and calibration must not stop
            images=images,
        )

    def budget(self, device: torch.device) -> int | None:
        """Return the memory for keys and values; on a GPU, which this process does not share, most free memory."""
        from april.engines.device_memory import free_bytes

        if self.kv_cache_bytes is None and device.type == "cuda":
            return int(free_bytes(device) * SHARE_OF_OWN_GPU)
        return self.kv_cache_bytes
