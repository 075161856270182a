"""A replica of verl's that is an SGLang server somewhere else.

verl's own replicas run the inference engine inside a Ray actor on a GPU: `vLLMReplica.launch_servers` and
`SGLangReplica.launch_servers` read the GPUs of the training workers. They cannot use a server that runs already.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import ray
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from tests import tiny


@ray.remote(num_cpus=0, max_concurrency=100)
class ServerActor:
    """A replica in front of a server, with the calls and the gate of verl's replicas.

    Args:
        url: of the server.
        folder: where the policy of each version is saved.
        response_length: budget of requests without one.
    """

    def __init__(self, url: str, folder: str, response_length: int) -> None:
        self._url, self._folder, self._response_length = url, Path(folder), response_length
        self._open = asyncio.Event()
        self._open.set()
        self._rejecting = self._asleep = False
        self._running = self._sent = 0
        self.global_steps: int | None = None

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        async with aiohttp.ClientSession() as session, session.post(f"{self._url}{path}", json=body) as answer:
            return await answer.json(content_type=None)

    async def set_weights(self, version: int) -> None:
        """Wake up with the policy of a version."""
        assert not self._running, "weights changed while requests were running"
        path = tiny.save(self._folder / str(version), seed=version)
        body = {"model_path": str(path), "weight_version": str(version), "flush_cache": True}
        loaded = await self._post("/update_weights_from_disk", body)
        assert loaded["success"], loaded
        self._asleep, self.global_steps = False, version

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        while not self._open.is_set():
            if self._rejecting:
                return self._output([], "aborted")
            await self._open.wait()
        self._running += 1
        self._sent += 1
        sampling = {
            "max_new_tokens": sampling_params.get("max_tokens", self._response_length),
            "temperature": sampling_params.get("temperature", 1.0),
            "stop_token_ids": [tiny.SHAPE["eos_token_id"]],
        }
        body = {"rid": f"{request_id}-{self._sent}", "input_ids": list(prompt_ids), "sampling_params": sampling}
        try:
            answer = await self._post("/generate", {**body, "return_logprob": True})
        finally:
            self._running -= 1
        meta = answer.get("meta_info", {})  # a request that was aborted in the queue has none
        ended = meta.get("finish_reason", {"type": "abort"})["type"] != "abort"
        return self._output(meta.get("output_token_logprobs") or [], "completed" if ended else "aborted")

    def _output(self, drawn: list[list[Any]], reason: str) -> TokenOutput:
        return TokenOutput(
            token_ids=[token for _, token, *_ in drawn],
            log_probs=[logprob for logprob, *_ in drawn],
            stop_reason=reason,
            extra_fields={"global_steps": self.global_steps},
        )

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        self._open.clear()
        self._rejecting = reject_request
        while self._running:
            await self._post("/abort_request", {"abort_all": True})
            await asyncio.sleep(0.02)

    async def resume_generation(self) -> None:
        self._rejecting = False
        self._open.set()

    def asleep(self) -> bool:
        return self._asleep

    def sleep(self) -> None:
        assert not self._running, "the replica was put to sleep while requests were running"
        self._asleep = True

    def wake_up(self) -> None: ...


class ServerReplica(RolloutReplica):
    async def launch_servers(self) -> None:
        where = self.config.custom
        self._server_handle = ServerActor.remote(where["url"], where["folder"], self.config.response_length)
        self._server_address = where["url"]
        self.servers = [self._server_handle]


class RunningServers(LLMServerManager):
    rollout_replica_class = ServerReplica
