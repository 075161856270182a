"""verl's trainer modes and april's on one replica with the costs of a real one: the replica's time of a step.

verl's own trainer loop, dataloader, TransferQueue, replay buffer, agent-loop and reward workers, LLM client and load
balancer run as they are; the policy is not trained. The replica is an actor behind the gate of verl's vLLM server. It
decodes in batched passes: one token for every running request. A pass has the duration of the cost model (Qwen3-8B on
an H100, by its data sheet), prefill included; so a tail costs passes, and a resumed request its prefill. It samples no
policy: each response is as long as planned, from one long-tailed list, the same for every arm.

Arms, with the same N, G and slots:

- `sync`: verl's synchronous mode;
- `colocate_async`: verl's partial rollouts with N' = 2 N (`num_warmup_batches` 1), as shipped: groups that are more
  than 7 updates old when they are complete are dropped;
- `colocate_async, wait`: the same with april's bound, by waiting (`max_off_policy_threshold` 6: at most 5 updates);
- `april`: N' = 2 N, `max_staleness` 5.

Engine seconds are the sum of the passes by the cost model, and depend on no machine: a step begins when all in-flight
requests of its mode have arrived, and no pass runs between the end of the group that completes a batch and the abort.
So the framework's own time does not count for any arm. If a mode continues because it waits for an older group, the
replica continues after a while.

    .frameworks/verl/bin/python benchmarks/integrations/verl_modes.py   # adds the runs that its file lacks
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

import ray
from record import save, spread
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.workers.rollout.replica import TokenOutput

from april.integrations.verl import AprilTrainer
from april.simulation.hardware import GPUS, MODELS, roofline
from tests import tiny
from tests.integrations.verl.trainer import (
    BEGUN,
    TinyReplica,
    TinyServers,
    Untrained,
    config_of,
    save_policy,
    save_prompts,
    train,
)

N, G, SLOTS = 8, 4, 64
LONGEST, MEDIAN, SIGMA = 768, 60, 1.0
COST = roofline(GPUS["h100"], MODELS["qwen3-8b"])
POLL, PAUSE = 0.1, 1.5
"""Seconds between two polls of the replay buffer (2 as shipped), and of training a policy. Clients of verl retry 1 s
after an abort."""
PATIENCE, LATER = 25.0, 8.0
"""Seconds without an abort after which a mode is taken to wait for an older group: first in a step, and then."""

WARM_UP = "trainer.v1.colocate_async.num_warmup_batches=1"
WAIT = ("trainer.v1.sampler.max_off_policy_threshold=6", "trainer.v1.sampler.max_off_policy_strategy=wait")
ARMS = {
    "sync": ("sync", N, ()),
    "colocate_async": ("colocate_async", 2 * N, (WARM_UP,)),
    "colocate_async, wait": ("colocate_async", 2 * N, (WARM_UP, *WAIT)),
    "april": ("april", 2 * N, (f"trainer.v1.april.over_sampling_batch_size={2 * N}",)),
}
"""Mode, groups in flight, settings."""


def lengths(seed: int, count: int = 4096) -> list[int]:
    """Response lengths by sample: log-normal, the longest many times the median."""
    draw = random.Random(seed)
    return [max(8, min(LONGEST, round(MEDIAN * draw.lognormvariate(0, SIGMA)))) for _ in range(count)]


class Request:
    """The replica's state of a request: `text` is its response so far, whose first character identifies the sample of
    its prompt."""

    def __init__(self, prompt: int, tokens: int, text: str) -> None:
        self.prompt = prompt
        self.tokens = tokens
        self.text = text
        self.begun = len(text)
        self.over = asyncio.Event()

    def finished(self, lengths: list[int]) -> bool:
        return bool(self.text) and len(self.text) == lengths[self.prompt * G + int(self.text[0])]


@ray.remote(num_cpus=0, max_concurrency=1000)
class PassServer:
    """A replica that decodes in batched passes. `phases` records its work between two weight updates."""

    def __init__(self, seed: int, under_way: int) -> None:
        self._lengths = lengths(seed)
        self._under_way = under_way
        self._version = self._gone = self._stalls = 0
        self._done: dict[int, int] = defaultdict(int)
        self._tokenizer = tiny.tokenizer()
        self._drawn: dict[int, int] = defaultdict(int)
        self._open = asyncio.Event()
        self._open.set()
        self._rejecting = False
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._phase: dict[str, float] | None = None
        self.phases: list[dict[str, float]] = []
        self._passing = asyncio.get_running_loop().create_task(self._pass())

    async def set_weights(self, version: int) -> None:
        assert not self._running, "weights changed while requests were running"
        self._version, self._stalls = version, 0
        self._phase = {"passes": 0, "engine": 0.0, "tokens": 0}

    async def dropped(self, groups: int) -> None:
        """Record the number of groups dropped so far."""
        self._gone = groups

    @property
    def _there(self) -> bool:
        """Whether all requests have come that should be here."""
        gone = (self._version * N + self._gone) * G
        return len(self._running) + len(self._waiting) >= self._under_way * G - (sum(self._done.values()) - gone)

    @property
    def _batches(self) -> bool:
        """Whether a step's groups are complete."""
        return sum(done == G for done in self._done.values()) - self._version * N - self._gone >= N

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        while not self._open.is_set():
            if self._rejecting:
                fields = {"global_steps": self._version}
                return TokenOutput(token_ids=[], stop_reason="aborted", extra_fields=fields)
            await self._open.wait()
        said = self._tokenizer.decode(prompt_ids)
        prompt, separator, response = said.partition(": ")
        match = BEGUN.fullmatch(prompt + separator)
        assert match, said
        request = Request(int(match[1]), len(prompt_ids), response)
        self._waiting.append(request)
        await request.over.wait()
        new = request.text[request.begun :]
        ids = self._tokenizer(new)["input_ids"] if new else []
        reason = "completed" if request.finished(self._lengths) else "aborted"
        fields = {"global_steps": self._version}
        return TokenOutput(token_ids=ids, log_probs=[-1.0] * len(ids), stop_reason=reason, extra_fields=fields)

    async def _pass(self) -> None:
        """Decode as long as there is something to decode."""
        began = False
        while True:
            if not (self._open.is_set() and self._phase is not None):
                began = False
            if not (self._open.is_set() and (began or (self._phase is not None and self._there))):
                await asyncio.sleep(0.01)
                continue
            began = True
            if not self._running and not self._waiting:
                await asyncio.sleep(0.01)
                continue
            free = SLOTS - len(self._running)
            taken, self._waiting = self._waiting[:free], self._waiting[free:]
            self._running += taken
            seconds = sum(COST.prefill_token_seconds * request.tokens for request in taken)
            held = sum(request.tokens for request in self._running)
            seconds += float(COST.base()[len(self._running)]) + COST.kv_token_seconds * held
            self._phase["passes"] += 1
            self._phase["engine"] += seconds
            self._phase["tokens"] += len(self._running)
            completes = False
            for request in self._running:
                if not request.text:
                    request.text = str(self._drawn[request.prompt])
                    self._drawn[request.prompt] += 1
                else:
                    request.text += "x"
                request.tokens += 1
                if request.finished(self._lengths):
                    request.over.set()
                    self._done[request.prompt] += 1
                    completes |= self._done[request.prompt] == G
            self._running = [request for request in self._running if not request.over.is_set()]
            await asyncio.sleep(0)
            if completes and self._batches:
                await self._end_of_sampling()

    async def _end_of_sampling(self) -> None:
        """A batch is complete: wait for the end of sampling, or until it is clear that more is wanted."""
        patience = LATER if self._stalls else PATIENCE
        until = time.perf_counter() + patience
        while self._open.is_set() and self._phase is not None and time.perf_counter() < until:
            await asyncio.sleep(0.01)
        if self._open.is_set() and self._phase is not None:
            self._stalls += 1

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        self._open.clear()
        self._rejecting = reject_request
        for request in [*self._running, *self._waiting]:
            request.over.set()
        self._running, self._waiting = [], []

    async def resume_generation(self) -> None:
        self._rejecting = False
        self._open.set()

    async def running(self) -> int:
        return len(self._running) + len(self._waiting)

    async def sleep(self) -> None:
        if self._phase is not None:
            self.phases.append({**self._phase, "stalls": self._stalls})
            self._phase = None

    async def wake_up(self) -> None: ...

    async def all_phases(self) -> list[dict[str, float]]:
        return self.phases


class PassReplica(TinyReplica):
    async def launch_servers(self) -> None:
        self._server_handle = PassServer.options(runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}}).remote(
            **self.config.custom
        )
        self._server_address = f"passes-{self.replica_rank}"
        self.servers = [self._server_handle]


class PassServers(TinyServers):
    rollout_replica_class = PassReplica


class Measured(Untrained):
    """A trainer that waits where it would train, and looks for a batch often."""

    servers = PassServers

    def init(self) -> None:
        super().init()
        self.replay_buffer.poll_interval = POLL

    def _step_once(self, metrics: dict[str, Any], *args: Any) -> Any:
        batch = super()._step_once(metrics, *args)
        dropped = sum(value for name, value in metrics.items() if name.endswith("/off_policy/evicted_samples"))
        self.dropped = getattr(self, "dropped", 0) + dropped
        (server,) = self.actor_rollout_wg.servers
        ray.get(server.dropped.remote(self.dropped))
        time.sleep(PAUSE)
        return batch

    def fit(self, manager: Any) -> None:
        super().fit(manager)
        (server,) = self.actor_rollout_wg.servers
        self.measured = ray.get(server.all_phases.remote())


class Sync(Measured, PPOTrainerSync): ...


class Colocate(Measured, PPOTrainerColocateAsync): ...


class April(Measured, AprilTrainer): ...


KINDS = {"sync": Sync, "colocate_async": Colocate, "april": April}


def run(arm: str, seed: int, steps: int, root: Path) -> list[dict[str, float]]:
    """One run; what each of its steps took and brought."""
    mode, under_way, overrides = ARMS[arm]
    settings = (
        *(f"data.train_batch_size={N}", f"actor_rollout_ref.rollout.n={G}", f"data.max_response_length={LONGEST}"),
        *(
            f"actor_rollout_ref.rollout.max_num_seqs={SLOTS}",
            f"+actor_rollout_ref.rollout.custom={{seed:{seed},under_way:{under_way}}}",
        ),
        *(f"trainer.v1.trainer_mode={mode}", f"trainer.total_training_steps={steps}", "trainer.save_freq=-1"),
        *("trainer.val_before_train=false", "reward.custom_reward_function.name=compute_sum"),
        *(f"actor_rollout_ref.rollout.max_model_len={LONGEST + 64}", "trainer.resume_mode=disable"),
    )
    trainer = train(
        config_of(root / "model", root / "prompts.parquet", root / "none", *settings, *overrides), KINDS[mode]
    )
    planned = lengths(seed)
    rows, seen = [], set()
    for step, (batch, phase) in enumerate(zip(trainer.batches, trainer.measured, strict=True), 1):
        groups = defaultdict(list)
        for row in batch:
            groups[row["extra_info"]["index"]].append(row)
        assert len(groups) == N, "a step is N groups"
        assert not seen & set(groups), "a group came twice"
        seen |= set(groups)
        for prompt, group in groups.items():
            own = sorted(len(row["responses"]) for row in group)
            assert own == sorted(planned[prompt * G : prompt * G + G]), "not as long as planned"
        ages = [step - 1 - min(row["tag"]["min_global_steps"] for row in group) for group in groups.values()]
        consumed = sum(len(row["responses"]) for row in batch)
        rows.append({**phase, "consumed": consumed, "oldest": max(ages), "age": sum(ages) / N})
    return rows


Runs = dict[str, dict[str, list[dict[str, float]]]]
"""By arm and seed of the lengths, what each step took and brought."""


def rate(run: list[dict[str, float]], warm_up: int) -> float:
    """Consumed tokens per engine second, behind the warm-up."""
    return sum(step["consumed"] for step in run[warm_up:]) / sum(step["engine"] for step in run[warm_up:])


def figures(runs: dict[str, list[dict[str, float]]], warm_up: int) -> dict[str, Any]:
    """Of an arm."""
    steps = [step for run in runs.values() for step in run[warm_up:]]
    return {
        "consumed_tokens_per_engine_second": spread([rate(run, warm_up) for run in runs.values()]),
        "mean_staleness": sum(step["age"] for step in steps) / len(steps),
        "max_staleness": max(step["oldest"] for run in runs.values() for step in run),
        "sampled_tokens": sum(step["tokens"] for run in runs.values() for step in run),
        "consumed_tokens": sum(step["consumed"] for run in runs.values() for step in run),
    }


def ratios(runs: Runs, warm_up: int) -> dict[str, Any]:
    """Ratio of consumed tokens per engine second of april to verl's arms, on the same lengths."""
    mine = runs.get("april", {})
    both = {arm: sorted(set(mine) & set(theirs)) for arm, theirs in runs.items() if arm != "april"}
    return {
        arm: spread([rate(mine[seed], warm_up) / rate(runs[arm][seed], warm_up) for seed in seeds])
        for arm, seeds in both.items()
        if seeds
    }


def main(options: argparse.Namespace) -> None:
    os.environ["RAY_prestart_worker_first_driver"] = "0"  # noqa: SIM112
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    ray.init(
        address="local",
        num_cpus=32,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        save_policy(root / "model", max_position_embeddings=1024)
        save_prompts(root / "prompts.parquet", 1000)
        settings = {
            **{"N": N, "G": G, "slots": SLOTS, "median": MEDIAN, "longest": LONGEST, "sigma": SIGMA},
            **{"steps": options.steps, "warm_up": options.warm_up, "cost": COST.source},
        }
        file = Path(__file__).with_suffix(".json")
        saved = json.loads(file.read_text()) if file.is_file() else {}
        runs: Runs = saved["runs"] if saved.items() >= settings.items() else {}
        for seed in range(options.seeds):
            for arm in options.arms or list(ARMS):
                if str(seed) not in runs.setdefault(arm, {}):
                    runs[arm][str(seed)] = run(arm, seed, options.warm_up + options.steps, root)
                    done = {name: figures(own, options.warm_up) for name, own in runs.items() if own}
                    print(seed, arm, done[arm], flush=True)
                    save(
                        __file__,
                        {**settings, "arms": done, "april_over": ratios(runs, options.warm_up), "runs": runs},
                    )
    ray.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each arm, each with lengths of its own")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=4)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=[])
    main(parser.parse_args())
