"""vLLM in the trainer's process. It runs in vLLM's own environment; its samples are checked here."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from april.rollout.sampling import FinishReason, SamplingParams
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.segment import Segment
from tests.limits import HANG
from tests.servers.conftest import ENVIRONMENT, ROOT, python_of
from tests.servers.test_engines import EXACT, error_by_version
from tests.servers.tiny import Oracle, tiny_model


def test_interrupt_new_weights_resume(tmp_path: Path) -> None:
    models = [tiny_model(tmp_path / str(seed), seed) for seed in range(3)]
    script = Path(__file__).with_name("inproc_script.py")
    run = subprocess.run(
        [python_of("vllm"), script, *models],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG,
    )
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")] or [run.stdout[-3000:]]
    result = json.loads(line.removeprefix("RESULT "))
    assert "sample 9.0: token 100000 is outside the vocabulary" in result["refused"]
    assert result["turns"] == ["interrupted", "asleep", "weights awake", "updated", "serving"]
    oracles = [Oracle(path, joint=False) for path in models]
    sampling = SamplingParams(60, temperature=0.8, top_p=0.9)
    versions = set()
    for i, saved in enumerate(result["samples"]):
        sample = Group.start(i, Prompt((5, 6, 7, 10 + i)), 1, sampling, 0).samples[0]
        sample.segments = [Segment(version, ids, logprobs) for version, ids, logprobs in saved["segments"]]
        sample.length = sum(map(len, sample.segments))
        versions |= set(sample.versions)
        assert (saved["finish"], sample.length) == (FinishReason.LENGTH, 60)
        assert error_by_version(sample, oracles) < EXACT
    assert versions == {0, 1, 2}
