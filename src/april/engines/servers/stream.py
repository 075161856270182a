"""One sample's request to a server, with validation of the response.

Invariants:
- every token of an event is checked (vocabulary, log-probability, budget) before any of its tokens is delivered;
- tokens before a malformed event are delivered;
- the tokens decide whether a response has ended, not the server's finish reason.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

import msgspec

from april.engines.servers.client import RequestError
from april.rollout.engine import Chunk
from april.rollout.sampling import FinishReason, SamplingParams
from april.rollout.trajectory.features import Feature
from april.rollout.trajectory.routes import RouteRows

log = logging.getLogger(__name__)

Finish = FinishReason | Literal["abort", "again"]
"""How a stream ends. "again": the server stopped although the sample has not ended; another request continues it."""

LOGPROB_SLACK = 1e-3
"""How far above 0 rounding may carry a log-probability before it is invalid."""


class Delta(NamedTuple):
    """Tokens of one event of a stream.

    `version` is the server's label for the weights that sampled it; `spans`, with the last event, its account of the
    whole stream as (label, first token, end). None and empty where it gives none.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish: Finish | None = None
    version: str | None = None
    spans: Sequence[tuple[str, int, int]] = ()
    routes: RouteRows | None = None
    """Routes of the request's tokens, with its last event."""


class StreamState(Enum):
    """Who gets the tokens of a stream. Transitions: `requests.py`, `freezable_requests.py`."""

    WAITING = "waiting"
    """Its request has not been sent."""
    RUNNING = "running"
    """Tokens are handed out; an error fails the sample's request."""
    STOPPING = "stopping"
    """It is being interrupted: tokens are handed out, and its end is no failure."""
    FROZEN = "frozen"
    """The server has paused its request, and its sample is not in flight: tokens are held for the sample."""
    ENDING = "ending"
    """Its request is aborted although its sample is not in flight: tokens are held for the sample."""
    DISCARDED = "discarded"
    """Tokens that still arrive are dropped."""


@dataclass(slots=True, eq=False)
class Stream:
    """One request to a server: its parameters, and how far its response has come."""

    sample_id: str
    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    seed: int
    budget: int
    version: int
    vocab_size: int
    interval: int = 1
    """Tokens that the server may collect before it sends them together."""
    received: int = 0
    begun: int = 0
    """Tokens received before the current request."""
    events: int = 0
    """Events that contained tokens."""
    state: StreamState = StreamState.WAITING
    after: Stream | None = None
    """Earlier stream of the same sample, which has to end first."""
    held: list[Chunk] = field(default_factory=list)
    """Chunks that arrived while the sample was not in flight."""
    task: asyncio.Task[None] | None = None
    routes_from: int = 0
    """First token, of prompt and response, whose routes are missing."""
    features: tuple[Feature, ...] = ()
    """Images of the prompt."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """(version, first token) of each run of tokens from one version."""

    @property
    def open(self) -> bool:
        return self.task is not None and not self.task.done()

    @property
    def budget_left(self) -> int:
        return self.budget - self.received

    def continues(self, token_ids: Sequence[int]) -> bool:
        """Whether a sample with these tokens, prompt included, is where this stream was interrupted: a sample that has
        ended at a stop string comes back with its next turn."""
        held = sum(len(chunk.token_ids) for chunk in self.held)
        count = len(self.token_ids) - held
        return len(token_ids) == count and self.token_ids[:count] == list(token_ids)

    def renew(self) -> None:
        """Prepare another request that continues the response."""
        self.request_id += "+"
        self.begun = self.received
        self.spans.clear()

    def take_in(
        self,
        events: Iterable[bytes],
        read: Callable[[bytes, Stream], Delta | None],
        deliver: Callable[[Stream, Chunk], None],
        labelled: bool = True,
    ) -> Finish | None:
        """Deliver the tokens of events that arrived together, as one chunk per version. Return how the stream ended.

        Args:
            read: decodes one event.
            deliver: takes each chunk.
            labelled: whether the server's labels name the weights that sampled the tokens.

        Raises:
            RequestError: an event is malformed, or reports that the request failed.
        """
        ids: list[int] = []
        logprobs: list[float] = []
        finish: Finish | None = None
        routes: RouteRows | None = None
        version = self.version
        try:
            for event in events:
                try:
                    delta = read(event, self)
                except msgspec.DecodeError as error:
                    raise RequestError(f"an event is malformed ({error}): {event[:100]!r}") from None
                if delta is None:
                    continue
                self._check(delta)
                named = parse_version(delta.version) if labelled and delta.version is not None else None
                if named is not None and named != version and delta.token_ids:
                    if ids:
                        deliver(self, Chunk(self.sample_id, ids, logprobs, version))
                        ids, logprobs = [], []
                    version = self.version = named
                self.events += bool(delta.token_ids)
                if delta.token_ids and (not self.spans or self.spans[-1][0] != version):
                    self.spans.append((version, self.received))
                ids.extend(delta.token_ids)
                logprobs.extend(delta.logprobs)
                self.token_ids.extend(delta.token_ids)
                self.received += len(delta.token_ids)
                finish = self._finish(delta)
                if delta.routes is not None:
                    routes = self._consumed(delta.routes)
                if finish is not None:
                    self._compare(delta.spans)
                    break
        finally:
            reason = finish if isinstance(finish, FinishReason) else None
            if ids or reason is not None or routes is not None:
                deliver(self, Chunk(self.sample_id, ids, logprobs, version, finish=reason, routes=routes))
        return finish

    def _consumed(self, rows: RouteRows) -> RouteRows | None:
        """Return the rows of consumed tokens, of which the last token is none; None if there are none."""
        kept = rows.up_to(len(self.token_ids) - 1)
        if kept is None or not len(kept.experts):
            return None
        self.routes_from = max(self.routes_from, kept.end)
        return kept

    def _check(self, delta: Delta) -> None:
        ids, logprobs = delta.token_ids, delta.logprobs
        if len(ids) != len(logprobs):
            raise RequestError(f"{len(ids)} tokens came with {len(logprobs)} log-probabilities")
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            token = next(token for token in ids if not 0 <= token < self.vocab_size)
            raise RequestError(f"token {token!r} came, which is outside the vocabulary")
        # The sum is finite only if all are.
        if logprobs and not (math.isfinite(sum(logprobs)) and max(logprobs) <= LOGPROB_SLACK):
            logprob = next(p for p in logprobs if not -math.inf < p <= LOGPROB_SLACK)
            raise RequestError(f"log-probability {logprob!r} came")
        total = self.received + len(ids)
        if total > self.budget:
            raise RequestError(f"{total} tokens came where {self.budget} were asked for")

    def _finish(self, delta: Delta) -> Finish | None:
        """Return how the sample ended, by its tokens: a server that aborts at that moment may report otherwise."""
        if delta.token_ids and delta.token_ids[-1] in self.sampling.stop_token_ids:
            return FinishReason.STOP
        if self.received == self.budget:
            return FinishReason.LENGTH
        if isinstance(delta.finish, FinishReason):
            raise RequestError(
                f"the response ended ({delta.finish}) after {self.received} tokens, with no stop token, where "
                f"{self.budget} were asked for"
            )
        return delta.finish

    def _compare(self, spans: Sequence[tuple[str, int, int]]) -> None:
        """Compare the received tokens and their versions with the server's summary in the last event."""
        # The server counts from the start of its last request, which may continue an earlier one.
        theirs = [(parse_version(label), start + self.begun) for label, start, end in spans if end > start]
        total = self.begun + max((end for _, _, end in spans), default=self.received - self.begun)
        named = all(version is not None for version, _ in theirs)
        if total != self.received or (named and theirs and theirs != self.spans):
            log.warning(
                "sample %s: %d tokens of versions %s came where the server counts %s",
                self.sample_id,
                self.received,
                self.spans,
                spans,
            )


@functools.cache
def parse_version(label: str) -> int | None:
    """Return the policy version in a server's label ("12", "v12"); None if there is none ("default")."""
    match = re.fullmatch(r"v?(\d+)", label)
    return int(match[1]) if match else None
