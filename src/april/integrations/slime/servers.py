"""slime's SGLang servers, and their connection for one rollout."""

from __future__ import annotations

import asyncio
import logging
from argparse import Namespace
from functools import partial
from typing import Any

from slime.utils.http_utils import get

from april.engines.pool import EnginePool
from april.engines.servers.client import HTTPClient, RequestError
from april.engines.servers.local_model import local_vocab_size
from april.engines.servers.server_routes import ServerRoutes
from april.engines.servers.sglang import SGLang
from april.engines.servers.stream import Delta, Stream
from april.engines.servers.stream_interval import StreamInterval
from april.integrations.servers import FrameworkServer
from april.integrations.slime.dataset_images import DatasetImages, check_input
from april.integrations.support_sets import SupportSets
from april.rollout.engine import Engine, EngineError
from april.rollout.sampling import SamplingParams
from april.rollout.trajectory.sample import Sample

log = logging.getLogger(__name__)


REGISTRATION = 30.0
"""Seconds to wait until slime's router lists a server: the router answers before servers have registered."""


class OneVersion(SGLang):
    """SGLang during one rollout, in which its weights must not change. slime labels the weights."""

    expected: str | None = None
    """slime's label of the weights."""

    def __init__(
        self,
        http: HTTPClient,
        support_sets: SupportSets | None = None,
        routes: ServerRoutes | None = None,
        images: DatasetImages | None = None,
    ) -> None:
        super().__init__(http, routes)
        self._support_sets = support_sets
        self.dataset_images = images
        self._checked: set[str] = set()
        """Requests with images whose tokens were compared with the server's."""
        self._compared: str | None = None
        """The request whose ids the server reports, for one request alone: each of its events contains them."""

    def unsupported_sampling(self, sampling: SamplingParams) -> str | None:
        return None if self._support_sets is None else super().unsupported_sampling(sampling)

    def body(self, stream: Stream, salt: str) -> dict[str, Any]:
        body = super().body(stream, salt)
        if self._support_sets is None:
            # Without top-p, slime's trainer computes log-probabilities over the whole vocabulary, also with top-k.
            body.pop("return_sampling_mask", None)
        return body

    def unsupported_images(self) -> str | None:
        return super().unsupported_images() if self.dataset_images is None else None

    def image_fields(self, stream: Stream, salt: str) -> dict[str, Any]:
        images = self.dataset_images
        assert images is not None
        fields = images.request(stream.features, stream.token_ids, salt)
        if self._compared is None and images.has_response(stream.features, stream.token_ids):
            self._compared = stream.request_id
            fields["return_prompt_token_ids"] = True
        return fields

    def read(self, event: bytes, stream: Stream) -> Delta | None:
        delta = super().read(event, stream)
        if delta is None:
            return None
        if stream.features and delta.token_ids and stream.request_id not in self._checked:
            check_input(event, stream.token_ids, stream.request_id == self._compared)
            self._checked.add(stream.request_id)
        if delta.version not in (None, self.expected):
            raise RequestError(f"its weights changed from {self.expected!r} to {delta.version!r} during a rollout")
        if self._support_sets is not None and delta.token_ids:
            self._support_sets.read(event, stream.sample_id, len(stream.token_ids), delta.token_ids)
        return delta._replace(version=None, spans=())


class SlimeServer(FrameworkServer):
    """One of slime's servers. slime loads its weights and labels them."""

    _api: OneVersion

    @property
    def label(self) -> str | None:
        """slime's label of the weights: a count that starts again with every process."""
        return self._label

    def submit(self, sample: Sample) -> None:
        if sample.features and (images := self._api.dataset_images) is not None:
            tokens = [*sample.prompt_ids, *sample.response_ids]
            if reason := images.unsendable(sample.features, tokens):
                raise ValueError(f"sample {sample.id}: {reason}")
        super().submit(sample)

    async def refresh(self) -> None:
        before = self._label
        await super().refresh()
        if before is not None and self._label != before:
            # The rollout's label stays, so that a repeated refresh fails as well.
            now, self._label = self._label, before
            raise EngineError(f"{self!r} holds weights {now!r} where the rollout started with {before!r}")
        self._api.expected = self._label


async def connect(
    args: Namespace,
    support_sets: SupportSets | None,
    interval: StreamInterval,
    routes: ServerRoutes | None = None,
    images: DatasetImages | None = None,
) -> tuple[Engine, str | None]:
    """Return slime's servers as one engine, and slime's label of their weights.

    Every rollout connects again, because slime replaces servers and drops their caches between rollouts.

    Raises:
        EngineError: no server answers, or the servers hold different weights.
        ValueError: slime separates prefill from decode.
    """
    router = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
    deadline = asyncio.get_running_loop().time() + REGISTRATION
    while not (workers := (await get(f"{router}/workers"))["workers"]):
        if asyncio.get_running_loop().time() >= deadline:
            raise EngineError(f"slime's router at {router} lists no server")
        await asyncio.sleep(0.5)
    split = [worker["url"] for worker in workers if worker.get("worker_type", "regular") != "regular"]
    if split:
        raise ValueError(f"prefill and decode on separate servers ({', '.join(split)}) are not supported")
    vocab_size = local_vocab_size(args.hf_checkpoint)
    api = partial(OneVersion, support_sets=support_sets, routes=routes, images=images)
    # A server that does not answer must not end the rollout: the others take the samples.
    found = await asyncio.gather(
        *(
            SlimeServer.connect(worker["url"], api, vocab_size=vocab_size, stream_interval=interval)
            for worker in workers
        ),
        return_exceptions=True,
    )
    replicas = [replica for replica in found if isinstance(replica, SlimeServer)]
    errors = [error for error in found if isinstance(error, BaseException)]
    for error in errors:
        log.warning("this rollout does not use a server: %s", error)
    labels = {replica.label for replica in replicas}
    if len(labels) != 1:
        await asyncio.gather(*(replica.close() for replica in replicas))
        if labels:
            raise EngineError(f"slime's servers hold different weights: {sorted(map(str, labels))}")
        raise EngineError(f"none of slime's {len(workers)} servers answers") from next(iter(errors), None)
    return replicas[0] if len(replicas) == 1 else EnginePool(replicas), labels.pop()
