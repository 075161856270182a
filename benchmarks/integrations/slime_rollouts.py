"""slime's own partial rollout and april's plug-in in slime, on one engine with realistic costs (`passes.py`).

slime's rollout function, data source, client and arguments are its own. The loops are those of its `train.py` and
`train_async.py`, with a training step that waits for a number of passes. The engine also answers the calls that slime
makes of its router. Both arms have the flags `--partial-rollout` and `--over-sampling-batch-size`. Arms:

- `synchronous`: slime without them;
- `slime_2N`, `slime_4N`: slime, with 2 N and 4 N groups in flight. Its abort polls every 0.05 s instead of every 3 s;
- `april_2N`, `april_4N`: april's rollout function and data source;
- `slime_async_2N`, `april_async_2N` and the like: the same, with the loop of `train_async.py`;
- `april_2N_bound3` and the like: the same with another bound on staleness.

slime has no bound on staleness. Trainer and engine of the arms without `async` take turns: a training step adds its
passes to theirs.

    APRIL_SLIME_SOURCE=.frameworks/slime-source .frameworks/slime/bin/python benchmarks/integrations/slime_rollouts.py
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, os.environ["APRIL_SLIME_SOURCE"])

import slime.backends.sglang_utils.server_control as control
from aiohttp import web
from pass_server import SGLangPasses
from passes import BOUND, GROUP, LONGEST, OVER, WARM_UP, N, Passes, Steps, measure
from slime.rollout import sglang_rollout
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.utils.http_utils import init_http_client

from april.integrations import slime as plugin
from tests import tiny
from tests.integrations.slime.source import load_weights, slime_arguments

TURNS = ["synchronous", *(f"{name}_{over}" for name in ("slime", "april") for over in OVER)]
"""Arms whose trainer and engine take turns."""
ARMS = "april_2N slime_2N synchronous april_4N slime_4N april_async_2N slime_async_2N april_async_4N slime_async_4N"
PROMPT = "{:04}?"
STEPS = WARM_UP + 24
"""Steps of a run."""
QUICK = 0.05
"""Seconds between two looks of slime's abort at a server that is not idle yet."""


class SlimePasses(SGLangPasses):
    """Answers the calls that slime makes of its router, and labels weights as slime does."""

    def _routes(self, router: web.UrlDispatcher) -> None:
        super()._routes(router)
        router.add_get("/workers", self._workers)
        router.add_get("/v1/loads", self._loads)

    async def _workers(self, request: web.Request) -> web.Response:
        return web.json_response({"workers": [{"url": self.url, "worker_type": "regular"}]})

    async def _loads(self, request: web.Request) -> web.Response:
        return web.json_response({"loads": [{"num_running_reqs": len(self.running), "num_waiting_reqs": 0}]})

    async def _load(self, request: web.Request) -> web.Response:
        self.weight_version = (await request.json())["weight_version"]
        return await super()._load(request)

    def _event(
        self, new: list[tuple[int, float]], drawn: list[tuple[int, float]], reason: str | None
    ) -> dict[str, Any]:
        return {"text": "", **super()._event(new, drawn, reason)}


def arguments(folder: Path, server: SlimePasses, name: str, over: int, bound: int) -> Namespace:
    own = (
        "--rollout-function-path april.integrations.slime.rollout "
        "--data-source-path april.integrations.slime.DataSource"
    )
    args = slime_arguments(
        *("--hf-checkpoint", str(folder / "model"), "--prompt-data", str(folder / "prompts.jsonl")),
        *("--num-rollout", str(STEPS), "--rollout-batch-size", str(N), "--n-samples-per-prompt", str(GROUP)),
        *("--rollout-max-response-len", str(LONGEST), "--global-batch-size", str(N * GROUP)),
        *("--rm-type", "random", "--micro-batch-size", "1", "--sglang-device", "cpu"),
        *("--rollout-external-engine-addrs", server.url),
        *(() if name == "synchronous" else ("--partial-rollout", "--over-sampling-batch-size", str(over))),
        *(own.split() if name == "april" else ()),
    )
    args.sglang_router_ip, args.sglang_router_port = server.address.split(":")
    args.april_max_staleness = bound
    return args


def run(folder: Path, arm: str, ticks: int, seed: int) -> Steps:
    """A run of an arm, its training steps `ticks` passes long."""
    passes = Passes(prompt=len(tiny.tokenizer().encode(PROMPT.format(0))), seed=seed)
    server = SlimePasses(folder / "model", passes)
    arm, _, bound = arm.partition("_bound")
    name = arm.partition("_")[0]
    args = arguments(folder, server, name, OVER.get(arm[-2:], N), int(bound or BOUND))
    init_http_client(args)
    sglang_rollout.GenerateState.clear_instances()
    if name == "april":
        rollout, source = plugin.rollout, plugin.DataSource(args)
    else:
        rollout, source = sglang_rollout.generate_rollout, RolloutDataSourceWithBuffer(args)
    steps: Steps = []

    def train(groups: list[list[Any]]) -> None:
        assert len(groups) == N, "a rollout is N groups"
        steps.append(server.train([sample.tokens for group in groups for sample in group], ticks))

    update = partial(load_weights, server.url, folder / "model")
    if "async" not in arm:
        for rollout_id in range(STEPS):
            train(rollout(args, rollout_id, source).samples)
            update(rollout_id)
    else:
        with ThreadPoolExecutor(1) as manager:
            ahead = manager.submit(rollout, args, 0, source)
            for rollout_id in range(STEPS):
                current = ahead.result()
                if rollout_id + 1 < STEPS:
                    ahead = manager.submit(rollout, args, rollout_id + 1, source)
                train(current.samples)
                # slime updates weights between two rollouts only.
                ahead.result()
                update(rollout_id)
    server.close()
    return steps


def main() -> None:
    logging.disable(logging.INFO)
    os.environ.setdefault("SLIME_HOST_IP", "127.0.0.1")
    control.abort_server_until_idle.__defaults__ = (QUICK,)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny.save(folder / "model")
        rows = ({"input": PROMPT.format(n), "label": str(n), "metadata": {}} for n in range(1000))
        (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
        measure(__file__, __doc__, ARMS, partial(run, folder), TURNS, steps=STEPS)


if __name__ == "__main__":
    main()
