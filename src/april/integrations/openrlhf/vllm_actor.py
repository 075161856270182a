"""OpenRLHF's vLLM actors as engines of april's.

In the actor, every sample is a stream of vLLM's; in the trainer, an actor is a `RemoteEngine`.

Invariants:
- every token that the actor received from vLLM is handed out once, also after an interrupt;
- after an interrupt vLLM runs nothing for april, so weights change and engines sleep with nothing in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

from openrlhf.trainer.ray import vllm_engine
from ray.exceptions import RayActorError, RayError

from april.engines.ray.actor_channel import ActorChannel, ChannelActor, reason_of
from april.engines.remote import RemoteEngine
from april.engines.replica import ReplicaGoneError
from april.engines.stream_engine import StreamEngine, Tokens
from april.rollout.engine import Capacity, Chunk, EngineError, KVPolicy
from april.rollout.trajectory.sample import Sample


def undecorated(actor: Any) -> Any:
    """Return the class that `ray.remote` was put on."""
    return actor.__ray_actor_class__


def _begin(sample: Sample) -> int:
    """Return the position at which the present response of a sample begins."""
    return sample.turn_span(len(sample.transitions) - 1)[0] if sample.transitions else 0


class RolloutActor(undecorated(vllm_engine.RolloutRayActor), ChannelActor):  # type: ignore[misc]
    """OpenRLHF's actor, which also serves its vLLM as an engine of april's."""

    async def __init__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[misc]
        await super().__init__(*args, **kwargs)  # type: ignore[misc]
        ChannelActor.__init__(self)
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
            min_tokens=0 if sample.length > _begin(sample) else 1,  # OpenRLHF's: a response is not empty
            max_tokens=sample.room(self._engine.capacity.context_length),
            logprobs=1,
            skip_special_tokens=False,
            output_kind=RequestOutputKind.DELTA,
        )
        # A new id for each request: the former request of a resumed sample may not be gone yet.
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

    async def april_open(self) -> tuple[int, Capacity]:
        """Begin a session with a trainer; return its number and the capacity."""
        life = self._life + 1
        await self._serve(self._engine, life)
        return life, self._engine.capacity


class RayReplica(RemoteEngine):
    """The trainer's end of a `RolloutActor`. `refresh` connects to it."""

    on_update: KVPolicy = "recompute"

    def __init__(self, actor: Any, name: str) -> None:
        super().__init__()
        self.name = name
        self._actor = actor

    async def refresh(self) -> None:
        try:
            life, capacity = await self._actor.april_open.remote()
        except RayActorError as error:
            raise ReplicaGoneError(f"{self.name} is gone, and OpenRLHF starts none again") from error
        except RayError as error:
            raise EngineError(f"{self.name}: {reason_of(error)}") from error
        self.capacity = capacity
        self._connect(ActorChannel(self._actor, life, heartbeat=False))

    def _lost(self, reason: str) -> None:
        super()._lost(f"{self.name}: {reason}")

    async def check(self) -> None:
        await self.ping()

    async def abandon(self) -> list[Chunk]:
        """Stop everything that the actor runs for april, if it can be reached; return the chunks that had arrived."""
        chunks: list[Chunk] = []
        with suppress(EngineError):
            chunks = await self.interrupt()
        return chunks + await super().abandon()

    def _remote_weights(self, weights: Any) -> None:
        """OpenRLHF has brought the weights to the actor already."""

    async def close(self) -> None:
        """End the session; the actor is OpenRLHF's."""
        self._disconnect("it was closed")


async def replicas(actors: Sequence[Any]) -> list[RayReplica]:
    """Connect to OpenRLHF's engines, which were made as `RolloutActor`s.

    Raises:
        ValueError: there are none, or they are others.
        EngineError: one cannot be reached.
    """
    if not actors:
        raise ValueError("--vllm.num_engines = 0: april generates with OpenRLHF's vLLM engines; set it to 1 or more")
    made = [RayReplica(actor, f"vLLM engine {index}") for index, actor in enumerate(actors)]
    try:
        await asyncio.gather(*(replica.refresh() for replica in made))
    except AttributeError:
        raise ValueError(
            "the vLLM engines are OpenRLHF's own: start the run by `python -m april.integrations.openrlhf`"
        ) from None
    return made
