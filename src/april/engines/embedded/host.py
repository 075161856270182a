"""The engine's half of an embedded engine that works elsewhere than its trainer: it is polled for as long as something
is in flight. `remote.py` is the other half, and says what goes between the two."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from april.engines.calls import Answers
from april.engines.packed import pack
from april.rollout.engine import Chunk, KVPolicy
from april.rollout.trajectory import Sample

if TYPE_CHECKING:
    import torch

    from april.engines.embedded.engine import EmbeddedEngine

SHARE_OF_OWN_GPU = 0.8
"""Of what is free beside the parameters; the rest is for activations and logits of a pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedSettings:
    """What is run elsewhere: settings as of `EmbeddedEngine`.

    Args:
        model: a Hugging Face causal language model, as a directory or a hub name; weights come by `update_weights`.
        dtype: of its parameters, a name of torch's.
        device: as torch names it.
        threads: CPU threads of torch; None: as torch chooses.
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

    def load(self) -> EmbeddedEngine:
        """The engine, with the model as it is on disk."""
        import torch

        from april.engines.embedded.engine import EmbeddedEngine
        from april.engines.pretrained import load_model

        if self.threads:
            torch.set_num_threads(self.threads)
        model = load_model(self.model, getattr(torch, self.dtype)).to(self.device)
        return EmbeddedEngine(
            model,
            max_num_seqs=self.max_num_seqs,
            context_length=self.context_length,
            kv_cache_bytes=self.budget(model.device),
            prefill_chunk=self.prefill_chunk,
            on_update=self.on_update,
            stream_interval=self.stream_interval,
            stop_token_ids=(),  # as of the embedded engine of a recipe
        )

    def budget(self, device: torch.device) -> int | None:
        """Return the memory for keys and values: on a GPU, which this process has to itself, most of what is free."""
        from april.engines.device_memory import free_bytes

        if self.kv_cache_bytes is None and device.type == "cuda":
            return int(free_bytes(device) * SHARE_OF_OWN_GPU)
        return self.kv_cache_bytes


class Host:
    """An engine, and what its trainer asks of it.

    Args:
        engine: embedded.
        send: takes a message to the trainer's half.
        read: gives the tensors of what weights were named by.
    """

    def __init__(
        self, engine: EmbeddedEngine, send: Callable[[Any], None], read: Callable[[Any], Awaitable[Iterable[Any]]]
    ) -> None:
        self._engine = engine
        self._send = send
        self._read = read
        self._work = asyncio.Event()
        self._answers = Answers(send, self._do)

    async def generate(self) -> None:
        """Hand on what is sampled, until cancelled."""
        while True:
            await self._work.wait()
            self._work.clear()
            while chunks := await self._engine.poll():
                self._send_chunks(chunks)

    def _send_chunks(self, chunks: list[Chunk]) -> None:
        self._send(("chunks", pack(chunks), self._engine.running))

    def received(self, message: Any) -> None:
        """Do what the trainer's half asks."""
        match message:
            case "submit", Sample() as sample:
                try:
                    self._engine.submit(sample)
                except ValueError as error:
                    self._send_chunks([Chunk(sample.id, (), (), self._engine.version, error=str(error))])
                self._work.set()
            case "forget", sample_ids:
                self._engine.forget(sample_ids)
            case "call", number, what, arguments:
                self._answers.asked(number, what, arguments)

    async def _do(self, what: str, *arguments: Any) -> None:
        match what, arguments:
            case "interrupt", (names,):
                if chunks := await self._engine.interrupt(names):
                    self._send_chunks(chunks)
            case "update", (version, weights):
                await self._engine.update_weights(version, await self._read(weights))
