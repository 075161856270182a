"""vLLM started by the command of docs/engines.md, without april's plug-ins. The other documented commands start the
session's servers of these tests (`start_by_hand`) and the servers of `test_train`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from april.engines.servers.vllm import connect_vllm
from april.rollout.engine import EngineError
from april.rollout.sampling import SamplingParams
from tests.servers.conftest import make_samples, start_by_hand
from tests.servers.test_engines import EXACT, error_by_version, finish, submit
from tests.servers.tiny import Oracle, tiny_model


async def test_vllm_started_by_hand(tmp_path: Path) -> None:
    models = [tiny_model(tmp_path / str(seed), seed) for seed in range(2)]
    async with start_by_hand("vllm", "vLLM", models[0], tmp_path) as server:
        engine = await connect_vllm(server.url)
        await engine.update_weights(1, models[1])
        samples = make_samples(2, SamplingParams(24, temperature=0.7))
        submit(engine, samples)
        await finish(engine, samples)
        oracles = [Oracle(model, joint=False) for model in models]
        assert max(error_by_version(sample, oracles) for sample in samples) < EXACT
        await engine.close()

        config = models[0] / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
        with pytest.raises(EngineError, match=r"--worker-extension-cls april\.engines\.servers\.vllm_worker"):
            await connect_vllm(server.url)
