"""Runs in vLLM's environment: samples with `VLLMInProcess` under three policies and prints the results as JSON."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys

from april.engines.vllm_inproc import VLLMInProcess
from april.engines.weight_transfer import InProcess, Tensors
from april.rollout.sampling import SamplingParams
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt


def forget_weights(engine: VLLMInProcess) -> None:
    """Zero the weights, as level 2 of sleep leaves them undefined."""
    for parameter in engine._engine.model_executor.driver_worker.model_runner.get_model().parameters():
        parameter.data.zero_()


async def main(models: list[str]) -> None:
    from safetensors.torch import load_file

    def in_process(model: str) -> Tensors:
        return InProcess(lambda: iter(load_file(f"{model}/model.safetensors").items())).offer(1)

    engine = VLLMInProcess.load(
        models[0],
        ignore_eos=True,
        stream_interval=3,
        enforce_eager=True,
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=32,
        max_model_len=512,
        max_num_seqs=4,
        kv_cache_memory_bytes=2**24,
    )
    sampling = SamplingParams(60, temperature=0.8, top_p=0.9)
    samples = [Group.start(i, Prompt((5, 6, 7, 10 + i)), 1, sampling, 0).samples[0] for i in range(8)]
    by_id = {sample.id: sample for sample in samples}
    turns = itertools.count()

    def absorb(chunks: list) -> None:  # type: ignore[type-arg]
        for chunk in chunks:
            by_id[chunk.sample_id].extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)

    for version, model in enumerate(models):
        if version == 1:
            await engine.update_weights(version, in_process(model))
        if version == 2:
            await engine.sleep()
            forget_weights(engine)  # sleep mode needs a GPU
            await engine.wake_weights()
            await engine.update_weights(version, model)
            await engine.wake_kv_cache()
        for sample in samples:
            if sample.finish is None:
                engine.submit(sample)
        while any(s.finish is None for s in samples) and (
            version == len(models) - 1 or max(s.length for s in samples) < 20 * (version + 1)
        ):
            poll = asyncio.ensure_future(engine.poll())
            await asyncio.sleep(0)
            poll.cancel()  # A cancelled poll loses nothing.
            await asyncio.wait([poll])
            absorb(await engine.poll())
            stopped = samples[next(turns) % len(samples)]
            absorb(await engine.interrupt([stopped.id]))  # The remaining samples continue.
            if stopped.finish is None:
                engine.submit(stopped)
        absorb(await engine.interrupt())
    try:
        engine.submit(Group.start(9, Prompt((5, 100_000)), 1, sampling, 0).samples[0])
    except ValueError as error:
        refused = str(error)
    turns_taken = [transition.state.value for transition in engine.turns.take()]
    await engine.close()
    print(
        "RESULT "
        + json.dumps({"samples": [sample.to_dict() for sample in samples], "refused": refused, "turns": turns_taken})
    )


asyncio.run(main(sys.argv[1:]))
