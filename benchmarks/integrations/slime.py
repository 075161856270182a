"""slime's own partial rollout and april's plug-in in turns on one real SGLang server, behind slime's own router.

The same policy, prompts, rewards, N, N', groups and slots, and for sample i of either arm the same length, from one
long-tailed list. Arms:

- `slime`: `--partial-rollout` with a quick poll: its abort polls the server every 0.05 s instead of its default of
  3 s;
- `april`: the same flags, and the two that name april's plug-in.

Each round is a rollout of every arm, in turns, with new weights and an empty cache before each, as when slime trains
between them. Consumed tokens are tokens of the samples that training gets. Seconds are wall-clock seconds; processor
seconds are summed over the server, the router and this process, and can be compared on a shared machine.

    APRIL_SLIME_SOURCE=.frameworks/slime-source .frameworks/slime/bin/python benchmarks/integrations/slime.py
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import logging
import os
import random
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, os.environ["APRIL_SLIME_SOURCE"])

import requests
import slime.backends.sglang_utils.server_control as control
from overlap_real import children, processor_seconds
from record import save, spread
from slime.ray.rollout import _start_router
from slime.rollout import sglang_rollout
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.utils.http_utils import init_http_client

from april.engines.servers.launch import Launch, Server, launch_sglang
from april.integrations import slime as plugin
from april.integrations.slime.rollouts import SlimeRollouts
from april.integrations.slime.servers import OneVersion
from tests import tiny
from tests.integrations.slime.source import load_weights, prompt_file, slime_arguments

N, OVER, G, SLOTS = 8, 16, 4, 64
LONGEST, MEDIAN, SIGMA = 768, 60, 1.0
QUICK = 0.05
"""Seconds between two looks of slime's abort at a server that is not idle yet."""


def lengths(count: int = 8192) -> list[int]:
    """Response lengths by sample: log-normal, the longest many times the median."""
    draw = random.Random(0)
    return [max(8, min(LONGEST, round(MEDIAN * draw.lognormvariate(0, SIGMA)))) for _ in range(count)]


LENGTHS = lengths()


def as_long_as_planned() -> None:
    """Have both arms request exactly the planned tokens of each sample from the server."""
    generate = sglang_rollout.generate

    @functools.wraps(generate)
    async def planned(args: Namespace, sample: Any, sampling_params: dict[str, Any]) -> Any:
        sampling_params.update(max_new_tokens=LENGTHS[sample.index], ignore_eos=True)
        return await generate(args, sample, sampling_params)

    sglang_rollout.generate = planned
    body = OneVersion.body

    def planned_body(self: Any, stream: Any, salt: str) -> dict[str, Any]:
        group, _, index = stream.sample_id.partition(".")
        before = LONGEST - stream.budget
        stream.budget = LENGTHS[int(group) * G + int(index)] - before
        return body(self, stream, salt)

    OneVersion.body = planned_body
    SlimeRollouts._stop_tokens = lambda self: ()


def processor_seconds_of_all() -> float:
    """Of this process, the server and the router."""
    own = os.getpid()
    return sum(map(processor_seconds, [own, *children(own)]))


class Arm:
    """A data source of its own, and what its rollouts took and brought."""

    def __init__(self, args: Namespace, rollout: Any, source: type) -> None:
        self.args, self._rollout, self.source = args, rollout, source(args)
        self.steps: list[dict[str, float]] = []
        self.seen: set[int] = set()
        self.drawn = self.tokens = 0

    def rollout(self) -> None:
        id = len(self.steps)
        began, processor = time.perf_counter(), processor_seconds_of_all()
        groups = self._rollout(self.args, id, self.source).samples
        seconds, processor = time.perf_counter() - began, processor_seconds_of_all() - processor
        samples = [sample for group in groups for sample in group]
        assert len(groups) == N, "a rollout is N groups"
        assert all(sample.response_length == LENGTHS[sample.index] for sample in samples), "not as long as planned"
        assert not self.seen.intersection(sample.index for sample in samples), "a sample came twice"
        self.seen.update(sample.index for sample in samples)
        ages = [id - sample.metadata.get("start_rollout_id", id) for sample in samples]
        consumed = sum(sample.response_length for sample in samples)
        self.steps.append({"seconds": seconds, "processor": processor, "tokens": consumed, "staleness": max(ages)})

    def figures(self, warm_up: int) -> dict[str, Any]:
        steps = self.steps[warm_up:]
        total = {name: sum(step[name] for step in steps) for name in ("seconds", "processor", "tokens")}
        return {
            "seconds_per_rollout": spread([step["seconds"] for step in steps]),
            "processor_seconds_per_rollout": spread([step["processor"] for step in steps]),
            "consumed_tokens_per_second": total["tokens"] / total["seconds"],
            "consumed_tokens_per_processor_second": total["tokens"] / total["processor"],
            "consumed_tokens": total["tokens"],
            "staleness_max": max(step["staleness"] for step in self.steps),
        }


def compare(arms: dict[str, Arm], warm_up: int) -> dict[str, Any]:
    figures = {name: arm.figures(warm_up) for name, arm in arms.items()}
    pairs = list(zip(arms["april"].steps[warm_up:], arms["slime"].steps[warm_up:], strict=True))
    ratios = {}
    for per in ("seconds", "processor"):
        rate = f"consumed_tokens_per_{'second' if per == 'seconds' else 'processor_second'}"
        ratios[rate] = {
            "of_totals": figures["april"][rate] / figures["slime"][rate],
            "by_round": spread([a["tokens"] / a[per] * s[per] / s["tokens"] for a, s in pairs]),
        }
    return {"arms": figures, "april_over_slime": ratios}


def serve(model: Path, root: Path) -> Any:
    sglang = Path(".servers/sglang/bin/python").absolute()
    arguments = [
        *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
        *("--disable-overlap-schedule", "--disable-cuda-graph", "--sleep-on-idle", "--dtype", "float32"),
        *("--context-length", "1024", "--max-running-requests", str(SLOTS), "--max-total-tokens", "65536"),
        *("--mem-fraction-static", "0.2"),
    ]
    environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1"}
    return launch_sglang(model, Launch(log_dir=root, python=sglang, arguments=arguments, environment=environment))


def arguments_of(server: Server, model: Path, data: Path, april: bool) -> Namespace:
    own = (
        "--rollout-function-path april.integrations.slime.rollout "
        "--data-source-path april.integrations.slime.DataSource"
    )
    return slime_arguments(
        *("--hf-checkpoint", str(model), "--prompt-data", str(data), "--label-key", "label", "--num-rollout", "999"),
        *("--rollout-batch-size", str(N), "--n-samples-per-prompt", str(G), "--over-sampling-batch-size", str(OVER)),
        *("--partial-rollout", "--rollout-max-response-len", str(LONGEST), "--global-batch-size", str(N * G)),
        *("--rm-type", "random", "--micro-batch-size", "1", "--rollout-seed", "5", "--sglang-device", "cpu"),
        *("--rollout-external-engine-addrs", server.url),
        *(own.split() if april else ()),
    )


async def main(options: argparse.Namespace) -> None:
    os.environ.setdefault("SLIME_HOST_IP", "127.0.0.1")
    logging.disable(logging.INFO)
    as_long_as_planned()
    control.abort_server_until_idle.__defaults__ = (QUICK,)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        models = [
            tiny.save(
                root / f"policy-{seed}", seed=seed, num_hidden_layers=options.layers, max_position_embeddings=1024
            )
            for seed in range(2)
        ]
        data = prompt_file(root / "prompts.jsonl", 2000)
        async with serve(models[0], root) as server:
            args = arguments_of(server, models[0], data, april=False)
            router = args.sglang_router_ip, args.sglang_router_port = _start_router(args)
            url = f"http://{router[0]}:{router[1]}"
            requests.post(f"{url}/workers", json={"url": server.url, "worker_type": "regular"}).raise_for_status()
            while not requests.get(f"{url}/workers").json()["workers"]:
                await asyncio.sleep(0.05)
            init_http_client(args)
            own = arguments_of(server, models[0], data, april=True)
            own.sglang_router_ip, own.sglang_router_port = router
            arms = {
                "slime": Arm(args, sglang_rollout.generate_rollout, RolloutDataSourceWithBuffer),
                "april": Arm(own, plugin.rollout, plugin.DataSource),
            }
            for label in range(options.warm_up + options.rounds):
                for place, name in enumerate(sorted(arms, reverse=label % 2 == 0)):
                    load_weights(server.url, models[label % 2], 2 * label + place)
                    await asyncio.to_thread(arms[name].rollout)
                    print(label, name, arms[name].steps[-1], flush=True)
                if label > options.warm_up:
                    settings = {"N": N, "over": OVER, "G": G, "slots": SLOTS, "layers": options.layers}
                    save(
                        __file__, {**settings, "rounds": label + 1 - options.warm_up, **compare(arms, options.warm_up)}
                    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--warm-up", type=int, default=3, help="rollouts of each arm before the first round")
    parser.add_argument("--layers", type=int, default=4)
    asyncio.run(main(parser.parse_args()))
