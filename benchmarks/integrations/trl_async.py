"""TRL's asynchronous trainer and april's, on one engine with realistic costs (`passes.py`).

TRL's `AsyncGRPOTrainer`, its rollout worker in a process of its own, dataset, batcher and collator are its own; a
training step waits for a number of passes, and new weights are TRL's pause and resume, which keep requests. TRL draws
no token of a request again then. Arms:

- `trl_N`, `trl_2N`: TRL's worker with `max_inflight_tasks` of the samples of N and 2 N groups. It starts a sample
  whenever one ends, so that more groups are unfinished;
- `april_2N`, `april_4N`: april's `AsyncGRPOTrainer`, at N' = 2 N and 4 N;
- `trl_2N_bound4` and the like: the same with another `max_staleness`. TRL drops older samples.

    .frameworks/trl/bin/python benchmarks/integrations/trl_async.py
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from aiohttp import web
from datasets import Dataset
from overlap_real import children
from pass_server import VLLMPasses
from passes import BOUND, GROUP, LOGPROB, LONGEST, OVER, STEPS, N, Passes, Steps, measure
from trl.experimental.async_grpo import AsyncGRPOConfig, async_grpo_trainer, async_rollout_worker, packing

from april.engines.pool import EnginePool
from april.integrations.servers import FrameworkServer, UnlabelledVLLM
from april.integrations.trl import PartialRollouts, rollout_worker
from april.integrations.trl.async_grpo import AsyncGRPOTrainer
from tests import tiny
from tests.integrations.trl.on_cpu import varlen_attention
from tests.integrations.trl.tools import RESPONSE
from tests.integrations.trl.trainer import TEMPLATE

ARMS = "april_2N trl_N april_4N trl_2N_bound4"
PROMPT = "{:04}?"
ROWS = 1000


def reward(prompts: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(len(ids) % 3) for ids in completion_ids]


class Completions(VLLMPasses):
    """Answers the requests of TRL's worker."""

    def _routes(self, router: web.UrlDispatcher) -> None:
        super()._routes(router)
        router.add_post("/v1/completions", self._complete)

    async def _complete(self, request: web.Request) -> web.Response:
        self.asked += 1
        drawn: list[int] = []
        async for tokens, _ in self.passes.respond(f"trl-{self.asked}", (await request.json())["prompt"], LONGEST):
            drawn += tokens
        choice = {"token_ids": drawn, "logprobs": {"token_logprobs": [LOGPROB] * len(drawn)}}
        return web.json_response({"choices": [choice]})


class NewWeights:
    """TRL's weight transfer: the engine counts the weights that it gets, and continues its requests with them."""

    def __init__(self, passes: Passes) -> None:
        self.passes = passes

    def init_weight_transfer(self) -> None: ...

    pause = resume = destroy = init_weight_transfer

    def send_weights(self, weights: Iterator[Any]) -> None:
        for _ in weights:
            pass
        self.passes.version += 1


@asynccontextmanager
async def open_engine(passes: Passes, url: str, *_: Any) -> AsyncIterator[EnginePool]:
    """The engine behind april's worker."""

    class Counted(FrameworkServer):
        async def update_weights(self, version: int, weights: Any = None) -> None:
            await super().update_weights(version, weights)
            passes.version += 1

    engine = EnginePool([await Counted.connect(url, UnlabelledVLLM, vocab_size=101, stream_interval="auto")])
    try:
        yield engine
    finally:
        await engine.close()


class Rows(async_grpo_trainer.RolloutQueueDataset):  # type: ignore[misc]
    """Remembers the samples that TRL's batcher has read."""

    read: list[list[int]]

    def __iter__(self) -> Iterator[Any]:
        for row in super().__iter__():
            self.read.append(row["input_ids"].tolist())
            yield row


def simulated(kind: type[Any], train: Callable[[list[list[int]]], None]) -> type[Any]:
    """Return a trainer whose training step is `train`, which gets the samples of the step."""

    class Simulated(kind):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            # The batcher has read the next step's samples already.
            sequences, Rows.read[:] = Rows.read[: N * GROUP], Rows.read[N * GROUP :]
            train(sequences)
            return sum(parameter.sum() for parameter in model.parameters()) * 0.0

        def _log_step_metrics(self) -> None: ...

    return Simulated


def run(folder: Path, arm: str, ticks: int, seed: int) -> Steps:
    """A run of an arm, its training steps `ticks` passes long."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = RESPONSE
    prompts = [[{"role": "user", "content": PROMPT.format(n)}] for n in range(ROWS)]
    length = len(tokenizer.apply_chat_template(prompts[0], add_generation_prompt=True, return_dict=False))
    passes = Passes(prompt=length, seed=seed)
    server = Completions(folder / "model", passes)
    name, _, bound = arm.partition("_bound")
    over = OVER.get(name[-2:], N)
    config = AsyncGRPOConfig(
        output_dir=str(folder / f"{arm}-{ticks}-{seed}"),
        per_device_train_batch_size=N * GROUP,
        gradient_accumulation_steps=1,
        num_generations=GROUP,
        max_completion_length=LONGEST,
        max_steps=STEPS,
        max_staleness=int(bound or BOUND),
        max_inflight_tasks=over * GROUP,
        token_budget=0,
        vllm_server_base_url=server.url,
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        activation_checkpointing=False,
        report_to=[],
        disable_tqdm=True,
    )
    steps: Steps = []
    Rows.read = []

    def train(sequences: list[list[int]]) -> None:
        assert len(sequences) == N * GROUP, "not a step's samples"
        passes.pids = [os.getpid(), *children(os.getpid())]
        seen = server.train(sequences, ticks)
        finished = sum(response.whole for group in passes.responses.values() for response in group)
        left = len(Rows.read) + trainer.rollout_queue.qsize()
        # Finished samples of unfinished groups count as dropped here. Their number changes little between two steps.
        steps.append({**seen, "dropped": finished - N * GROUP * (len(steps) + 1) - left})

    data = Dataset.from_dict({"prompt": prompts})
    given = {"args": config, "train_dataset": data, "processing_class": tokenizer}
    if name.startswith("april"):
        rollout_worker.open_engine = partial(open_engine, passes, server.url)
        own = PartialRollouts(over_sampling_batch_size=over)
        trainer = simulated(AsyncGRPOTrainer, train)(str(folder / "model"), reward, partial_rollouts=own, **given)
    else:
        worker = async_rollout_worker.AsyncRolloutWorker(
            model_name="tiny",
            dataset=data.shuffle(seed=config.seed),
            reward_funcs=[reward],
            processing_class=tokenizer,
            eos_token_ids=[1],
            num_generations=GROUP,
            max_inflight_tasks=over * GROUP,
            vllm_server_url=server.url,
            max_tokens=LONGEST,
        )
        trainer = simulated(async_grpo_trainer.AsyncGRPOTrainer, train)(
            str(folder / "model"), reward, rollout_worker=worker, weight_transfer=NewWeights(passes), **given
        )
    trainer.train()
    server.close()
    assert len(steps) == STEPS
    return steps


def main() -> None:
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    async_grpo_trainer.RolloutQueueDataset = Rows
    async_rollout_worker.is_vllm_available = lambda: True
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny.save(folder / "model")
        measure(__file__, __doc__, ARMS, partial(run, folder))


if __name__ == "__main__":
    main()
