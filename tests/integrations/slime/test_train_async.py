"""The rollout function in the loops of slime's `train.py` and `train_async.py`, on a stand-in for SGLang's server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.integrations.model_server import SGLangServer
from tests.integrations.slime.source import load_weights, need_slime, prompt_file, slime_arguments

need_slime()

from slime.utils.http_utils import init_http_client  # noqa: E402

from april.integrations import slime as plugin  # noqa: E402
from april.integrations.slime import rollouts  # noqa: E402
from tests import tiny  # noqa: E402


class Server(SGLangServer):
    """A server that is its own router."""

    def _routes(self, router: web.UrlDispatcher) -> None:
        super()._routes(router)
        router.add_get("/workers", self._workers)

    async def _workers(self, request: web.Request) -> web.Response:
        return web.json_response({"workers": [{"url": self.url, "worker_type": "regular"}]})


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tiny.save(tmp_path / "model"))
    yield server
    server.close()


def collected(server: Server, folder: Path, ahead: bool, steps: int = 4) -> tuple[list[bool], list[int]]:
    """Whether groups started early in each rollout, and the number of groups left in the buffer after it."""
    data = prompt_file(folder / "prompts.jsonl", 60)
    args = slime_arguments(
        *("--hf-checkpoint", str(server.path), "--prompt-data", str(data), "--label-key", "label"),
        *("--num-rollout", str(steps), "--rollout-batch-size", "2", "--n-samples-per-prompt", "2"),
        *("--partial-rollout", "--over-sampling-batch-size", "4", "--rollout-max-response-len", "24"),
        *("--global-batch-size", "4", "--micro-batch-size", "1", "--rm-type", "random", "--sglang-device", "cpu"),
        *("--rollout-external-engine-addrs", server.url),
    )
    args.sglang_router_ip, args.sglang_router_port = server.address.split(":")
    init_http_client(args)
    source = plugin.DataSource(args)
    refilled, left = [], []
    for rollout_id in range(steps):
        assert len(plugin.rollout(args, rollout_id, source).samples) == 2
        scheduler: Any = source.rollouts._adapter.scheduler  # type: ignore[union-attr]
        assert not server.running, "slime updates weights now"
        refilled.append(scheduler.refill)
        left.append(len(scheduler.buffer))
        if not (ahead and rollout_id == 0):  # train_async.py requests the second rollout before the first update
            load_weights(server.url, server.path, rollout_id + 1)
    return refilled, left


def test_groups_start_early_with_the_loop_of_train_async(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts, "IDLE", float("inf"))
    refilled, left = collected(server, tmp_path, ahead=True)
    assert refilled == [False, True, True, True]
    assert max(left[1:]) > 2, "N' = 4 groups were unfinished while 2 were ready"


def test_no_group_starts_early_if_the_servers_waited_for_training(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts, "IDLE", 0.0)
    refilled, left = collected(server, tmp_path, ahead=True)
    assert refilled == [False] * 4
    assert max(left) <= 2


def test_no_group_starts_early_with_the_loop_of_train(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts, "IDLE", float("inf"))
    refilled, left = collected(server, tmp_path, ahead=False)
    assert refilled == [False] * 4
    assert max(left) <= 2
