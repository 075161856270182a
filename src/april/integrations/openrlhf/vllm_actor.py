"""OpenRLHF's vLLM actors as engines of april's.

In the actor, every sample is a stream of vLLM's; in the trainer, an actor is a replica whose tokens come in batches.

Invariants:
- every token that the actor received of vLLM is handed out once, an interrupted request's too;
- after an interrupt vLLM runs nothing for april, so weights change and engines sleep with nothing in flight;
- a poll that is cancelled loses nothing: the next one gets what the actor answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import ray
from openrlhf.trainer.ray import vllm_engine
from ray.exceptions import RayActorError, RayError

from april.engines.replica import ReplicaGoneError
from april.engines.stream_engine import StreamEngine, Tokens
from april.rollout.engine import Capacity, Chunk, EngineError, KVPolicy
from april.rollout.trajectory import Sample


def undecorated(actor: Any) -> Any:
    """The class that `ray.remote` was put on."""
    return actor.__ray_actor_class__


class RolloutActor(undecorated(vllm_engine.RolloutRayActor)):  # type: ignore[misc]
    """OpenRLHF's actor, and what it holds as an engine: the methods that begin with `april_`."""

    async def __init__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[misc]
        await super().__init__(*args, **kwargs)
        config = self.llm.vllm_config
        slots, context = config.scheduler_config.max_num_seqs, config.model_config.max_model_len
        self._engine = StreamEngine(self._stream, Capacity(slots, context))
        self._requests = 0

    async def _stream(self, sample: Sample) -> AsyncIterator[Tokens]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        drawn = sample.sampling
        params = SamplingParams(
            temperature=drawn.temperature,
            top_p=drawn.top_p,
            top_k=drawn.top_k or -1,
            min_tokens=0 if sample.length else 1,  # OpenRLHF's: a response is not empty
            max_tokens=sample.room(self._engine.capacity.context_length),
            logprobs=1,
            skip_special_tokens=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._requests += 1
        prompt = TokensPrompt(prompt_token_ids=[*sample.prompt_ids, *sample.response_ids])
        outputs = self.llm.generate(prompt, params, request_id=f"april-{sample.id}-{self._requests}")
        async for output in outputs:
            (part,) = output.outputs
            ids = list(part.token_ids)
            if ids:
                yield ids, [logprobs[id].logprob for id, logprobs in zip(ids, part.logprobs, strict=True)]
            if part.finish_reason not in (None, "stop", "length"):
                raise EngineError(f"vLLM ended the request: {part.finish_reason}")

    async def april_capacity(self) -> Capacity:
        return self._engine.capacity

    async def april_submit(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            self._engine.submit(sample)

    async def april_poll(self) -> tuple[list[Chunk], int]:
        return await self._engine.poll(), self._engine.running

    async def april_interrupt(self, sample_ids: Sequence[str] | None) -> list[Chunk]:
        return await self._engine.interrupt(sample_ids)

    async def april_update(self, version: int) -> None:
        await self._engine.update_weights(version)


class RayReplica:
    """A `RolloutActor`, seen from the trainer."""

    on_update: KVPolicy = "recompute"

    def __init__(self, actor: Any, name: str, capacity: Capacity) -> None:
        self.capacity = capacity
        self.name = name
        self.running = 0
        self._actor = actor
        self._version: int | None = None
        self._new: list[Sample] = []
        self._submitting: asyncio.Task[None] | None = None
        self._polling: asyncio.Task[list[Chunk]] | None = None
        self._held: list[Chunk] = []
        """Came with the answer to an interrupt of others."""

    def submit(self, sample: Sample) -> None:
        self._new.append(sample)
        if self._submitting is None:
            self._submitting = asyncio.create_task(self._submit(), name=f"submit to {self.name}")

    async def _submit(self) -> None:
        """What came by the time that the loop gets here goes in one call."""
        try:
            while self._new:
                new, self._new = self._new, []
                await self._call("april_submit", new)
        finally:
            self._submitting = None

    async def _submitted(self) -> None:
        if self._submitting is not None:
            await asyncio.shield(self._submitting)

    async def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return await getattr(self._actor, method).remote(*arguments)
        except RayError as error:
            raise EngineError(f"{self.name}: {error}".splitlines()[0]) from error

    async def _poll(self) -> list[Chunk]:
        chunks: list[Chunk]
        chunks, self.running = await self._call("april_poll")
        return chunks

    async def poll(self) -> list[Chunk]:
        await self._submitted()
        if not self._held:
            self._held = await self._polled()
        held, self._held = self._held, []
        return held

    async def _polled(self) -> list[Chunk]:
        """Return the actor's answer; if the wait is cancelled, the next call returns it."""
        if self._polling is None:
            self._polling = asyncio.create_task(self._poll(), name=f"poll {self.name}")
        polling = self._polling
        try:
            chunks = await asyncio.shield(polling)
        except Exception:
            self._polling = None  # the next call asks again
            raise
        self._polling = None
        return chunks

    async def interrupt(self, sample_ids: Iterable[str] | None = None) -> list[Chunk]:
        names = None if sample_ids is None else set(sample_ids)
        await self._submitted()
        rest: list[Chunk] = await self._call("april_interrupt", None if names is None else list(names))
        if self._polling is not None:  # an interrupt wakes it
            self._held += await self._polled()
        chunks = [*self._held, *rest]
        self._held = [chunk for chunk in chunks if names is not None and chunk.sample_id not in names]
        return [chunk for chunk in chunks if names is None or chunk.sample_id in names]

    async def abandon(self) -> list[Chunk]:
        return await self.interrupt()

    async def check(self) -> None:
        await self._call("april_capacity")

    async def refresh(self) -> None:
        try:
            await self.check()
        except EngineError as error:
            if isinstance(error.__cause__, RayActorError):
                raise ReplicaGoneError(f"{self.name} is gone, and OpenRLHF starts none again") from error
            raise

    async def update_weights(self, version: int, weights: Any = None) -> None:
        """OpenRLHF has brought the weights there already."""
        await self._call("april_update", version)

    def forget(self, sample_ids: Iterable[str] | None = None) -> None:
        """vLLM holds nothing of an interrupted request but what its prefix cache may have."""

    async def close(self) -> None:
        """The actor is OpenRLHF's."""


def replicas(actors: Sequence[Any]) -> list[RayReplica]:
    """OpenRLHF's engines, which were made as `RolloutActor`s.

    Raises:
        ValueError: there are none, or they are others.
    """
    if not actors:
        raise ValueError("--vllm.num_engines = 0: april generates with OpenRLHF's vLLM engines; set it to 1 or more")
    try:
        capacities = ray.get([actor.april_capacity.remote() for actor in actors])
    except AttributeError:
        raise ValueError(
            "the vLLM engines are OpenRLHF's own: start the run by `python -m april.integrations.openrlhf`"
        ) from None
    return [
        RayReplica(actor, f"vLLM engine {i}", c) for i, (actor, c) in enumerate(zip(actors, capacities, strict=True))
    ]
