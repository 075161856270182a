"""verl's rollout replicas as an engine of april's.

Invariants:
- every token that a replica returns is handed out once, with its policy version;
- after an interrupt no request is sent; a request that has not returned by then is parked, and its tokens count once
  its sample is submitted again;
- a replica never has so many requests that an abort would queue behind them;
- a replica that has died receives no requests;
- each request of a sample carries the images of its prompt, and no response has a placeholder of images.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from ray.exceptions import ActorDiedError

from april.engines.chunk_queue import ChunkQueue
from april.engines.fit import require_room
from april.engines.servers.client import RequestError
from april.engines.servers.server_routes import MISSING, ServerRoutes
from april.rollout.engine import Capacity, Chunk, EngineError
from april.rollout.sampling import FinishReason
from april.rollout.trajectory.sample import Sample

CALLS = 900
"""Maximum number of requests at a replica, unless `max_num_seqs` is higher. A replica runs 1,000 calls at once, or 16
more than `max_num_seqs`. Further calls queue, and a queued abort would run after the requests that it should end."""


def capacity_of(rollout: Any, gpus: int) -> tuple[Capacity, int, int]:
    """Return the total capacity of verl's replicas on `gpus` GPUs, the number of requests sent at a time, and the
    number of replicas.

    A replica is one server with all its ranks. Each of vLLM's data-parallel ranks has `max_num_seqs` slots, limited by
    the number of calls; SGLang's ranks share the slots; verl does not use data-parallel ranks with TensorRT-LLM.

    Args:
        rollout: verl's rollout settings.
    """
    ranks = rollout.data_parallel_size
    replicas = max(1, gpus // (rollout.tensor_model_parallel_size * ranks * rollout.pipeline_model_parallel_size))
    calls = max(CALLS, rollout.max_num_seqs)
    slots = min(rollout.max_num_seqs * (ranks if rollout.name == "vllm" else 1), calls)
    context = rollout.max_model_len or rollout.prompt_length + rollout.response_length
    return Capacity(slots * replicas, context), calls * replicas, replicas


@dataclass(eq=False, slots=True)
class ReplicaRequest:
    """A request of one sample.

    Args:
        token_ids: prompt and response so far.
        budget: maximum number of tokens still to sample.
        answer: call of the replica.
        media: images of the prompt, as further arguments of the call.
        parked: the request was interrupted and did not return in time.
    """

    sample_id: str
    token_ids: list[int]
    budget: int
    answer: asyncio.Task[Any]
    media: Mapping[str, Any]
    parked: bool = False


def no_media(sample: Sample) -> Mapping[str, Any] | None:
    """Return the further arguments of a request where samples have no images."""
    return {}


class ReplicaEngine:
    """verl's rollout replicas as one engine. Replicas do not stream: a request returns when it ended or was aborted, so
    its tokens arrive in one chunk.

    Args:
        client: verl's `LLMServerClient`, in the variant that does not resume requests by itself.
        capacity: total capacity of the replicas.
        sampling_params: verl's sampling parameters, without the token budget.
        abort: makes every replica return its requests, and reject or hold later ones.
        calls: maximum number of requests sent to all replicas together; further requests wait here.
        replicas: number of replicas.
        lost: called with the error of an actor that died; returns the number of replicas left.
        patience: seconds without an answer after which an interrupt stops waiting. Requests that have not returned by
            then are parked: they are late, or held by a replica until generation resumes. The tokens of a parked
            request are handed out once its sample is submitted again.
        routes: shape of the routes that replicas return; None without router replay.
        media: returns the images of a sample as further arguments of its request; None if they are not kept.
        undrawn: token ids that fail a request whose response has one.
    """

    def __init__(
        self,
        client: Any,
        capacity: Capacity,
        sampling_params: Mapping[str, Any],
        abort: Callable[[], Awaitable[None]],
        calls: int = CALLS,
        replicas: int = 1,
        lost: Callable[[ActorDiedError], int] | None = None,
        patience: float = 2.0,
        routes: ServerRoutes | None = None,
        media: Callable[[Sample], Mapping[str, Any] | None] = no_media,
        undrawn: Collection[int] = (),
    ) -> None:
        self.capacity = capacity
        self.version = 0
        self._client = client
        self._sampling_params = sampling_params
        self._abort = abort
        self._calls = calls
        self._per_replica = capacity.slots // replicas, calls // replicas
        self._lost = lost
        self._patience = patience
        self._routes = routes
        self._media = media
        self._undrawn = frozenset(undrawn)
        self._waiting: deque[tuple[str, list[int], int, Mapping[str, Any]]] = deque()
        """Requests not sent yet: id, tokens so far, token budget and images of their samples."""
        self._requests: dict[str, ReplicaRequest] = {}
        self._parked: dict[str, ReplicaRequest] = {}
        self._interrupting = False
        self._queue = ChunkQueue()

    @property
    def running(self) -> int:
        return min(len(self._requests), self.capacity.slots)

    def submit(self, sample: Sample) -> None:
        needed = len(sample.prompt_ids) + sample.sampling.max_tokens
        # A turn of an agent loop gets what its context leaves.
        if not sample.transitions and needed > self.capacity.context_length:
            raise ValueError(
                f"sample {sample.id}: prompt and response budget take {needed} tokens where a replica holds "
                f"{self.capacity.context_length}: raise actor_rollout_ref.rollout.max_model_len"
            )
        require_room(sample, self.capacity.context_length, "a replica")
        parked = self._parked.pop(sample.id, None)
        if parked is not None:
            self._expect(parked)
            return
        budget = sample.room(self.capacity.context_length)
        token_ids = [*sample.prompt_ids, *sample.response_ids]
        media = self._media(sample)
        if media is None:
            # A check of the replicas' health: any prompt will do, but without its images none of their placeholders.
            token_ids, media = list(itertools.takewhile(lambda token: token not in self._undrawn, token_ids)), {}
        self._waiting.append((sample.id, token_ids, budget, media))
        self._send()

    def _send(self) -> None:
        while self._waiting and len(self._requests) < self._calls:
            id, token_ids, budget, media = self._waiting.popleft()
            # A new id per request: verl sends requests with the same id to the same replica, however busy it is, even
            # after an abort has emptied that replica's cache.
            answer = asyncio.create_task(
                self._client.generate(
                    request_id=f"{id}/{len(token_ids)}",
                    prompt_ids=token_ids,
                    sampling_params={**self._sampling_params, "max_tokens": budget},
                    **media,
                ),
                name=f"generate {id}",
            )
            self._expect(ReplicaRequest(id, token_ids, budget, answer, media))

    def _expect(self, request: ReplicaRequest) -> None:
        self._requests[request.sample_id] = request
        request.answer.add_done_callback(functools.partial(self._returned, request))

    def _returned(self, request: ReplicaRequest, answer: asyncio.Task[Any]) -> None:
        # A parked request: `submit` adds this callback again when the sample returns.
        if self._requests.get(request.sample_id) is not request:
            return
        del self._requests[request.sample_id]
        if answer.cancelled():
            return
        error = answer.exception()
        if isinstance(error, ActorDiedError) and self._lost is not None:
            self.set_replicas(self._lost(error))
        if error is not None:
            self._queue.put(Chunk(request.sample_id, (), (), self.version, error=f"{type(error).__name__}: {error}"))
        else:
            self._read(request, answer.result())
        if not self._interrupting:
            self._send()

    def _read(self, request: ReplicaRequest, output: Any) -> None:
        ids, logprobs = list(output.token_ids), list(output.log_probs or ())
        # The replica's own count: a parked request may return tokens of weights before the engine's version.
        version = output.extra_fields.get("global_steps")
        chunk = Chunk(request.sample_id, ids, logprobs, self.version if version is None else version)
        if len(ids) != len(logprobs) or len(ids) > request.budget:
            returned = f"the replica returned {len(ids)} tokens and {len(logprobs)} log-probabilities"
            chunk = chunk._replace(
                token_ids=(), logprobs=(), error=f"{returned} where {request.budget} tokens were requested"
            )
        elif drawn := self._undrawn.intersection(ids):
            # verl's replica and trainer would take it for an image; verl's vLLM replica masks it.
            chunk = chunk._replace(token_ids=(), logprobs=(), error=f"the replica drew {min(drawn)}, a placeholder")
        elif len(ids) == request.budget:
            chunk = chunk._replace(finish=FinishReason.LENGTH)
        elif output.stop_reason not in ("abort", "aborted"):
            chunk = chunk._replace(finish=FinishReason.STOP)
            if not ids:
                chunk = chunk._replace(finish=None, error=f"the request ended ({output.stop_reason}) without a token")
        elif request.parked and not self._interrupting:
            # A late answer to the interrupt: continue the sample from its tokens.
            told, budget = [*request.token_ids, *ids], request.budget - len(ids)
            self._waiting.appendleft((request.sample_id, told, budget, request.media))
        elif not self._interrupting:
            chunk = chunk._replace(error="the replica aborted the request")
        self._queue.put(self._with_routes(chunk, request, output.routed_experts))

    def _with_routes(self, chunk: Chunk, request: ReplicaRequest, returned: Any) -> Chunk:
        """Add the routes of a request, which replicas return from its first token on."""
        if self._routes is None:
            return chunk
        if returned is None:
            lost = chunk._replace(token_ids=(), logprobs=(), finish=None, error=MISSING)
            return chunk if chunk.finish is None else lost
        try:
            rows = self._routes.rows(np.asarray(returned), 0)
        except RequestError as error:
            return chunk._replace(token_ids=(), logprobs=(), finish=None, error=str(error))
        consumed = len(request.token_ids) + len(chunk.token_ids) - 1
        return chunk._replace(routes=rows.up_to(consumed))

    def set_replicas(self, replicas: int) -> None:
        """Adjust capacity and number of requests to the number of replicas left."""
        slots, calls = self._per_replica
        self.capacity = replace(self.capacity, slots=max(slots * replicas, 1))
        self._calls = max(calls * replicas, 1)

    async def poll(self) -> list[Chunk]:
        while not self._queue and self._requests:
            await self._queue.ready()
        return self._queue.take()

    async def interrupt(self, sample_ids: Iterable[str] | None = None) -> list[Chunk]:
        """Stop samples (see `Engine.interrupt`): all samples at the replicas, or none of them.

        Raises:
            EngineError: samples at the replicas are not named. verl aborts all requests together, and its replicas
                accept no others before the next weights.
        """
        named = None if sample_ids is None else set(sample_ids)
        stopped = {id for id in self._requests if named is None or id in named}
        if stopped and len(stopped) < len(self._requests):
            others = len(self._requests) - len(stopped)
            raise EngineError(f"verl aborts all requests together: {others} samples in flight were not named")
        self._waiting = deque(waiting for waiting in self._waiting if named is not None and waiting[0] not in named)
        self._interrupting = bool(stopped)
        try:
            if stopped:
                await self._abort()
                answered = unanswered = {request.answer for request in self._requests.values()}
                # Wait as long as requests keep returning. A replica that holds requests until generation resumes
                # returns none.
                while unanswered and answered:
                    answered, unanswered = await asyncio.wait(unanswered, timeout=self._patience)
        finally:
            self._interrupting = False
            for id in stopped.intersection(self._requests):
                request = self._parked[id] = self._requests.pop(id)
                request.parked = True
        # A `poll` that waits for requests which are parked now has nothing left to wait for.
        self._queue.wake()
        return self._queue.take(named)

    async def update_weights(self, version: int, weights: Any = None) -> None:
        """Record the version. verl has already updated the weights."""
        self.version = version

    def forget(self, sample_ids: Iterable[str] | None = None) -> None:
        for id in list(self._parked) if sample_ids is None else sample_ids:
            if request := self._parked.pop(id, None):
                request.answer.cancel()

    async def close(self) -> None:
        self.forget()
        for request in self._requests.values():
            request.answer.cancel()
