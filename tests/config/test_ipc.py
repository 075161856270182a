"""Where servers cannot read the trainer's memory, a run does not start."""

from __future__ import annotations

from typing import Any

import pytest

from tests.config.problems import problems

SOUND: dict[str, Any] = {
    "model": {"path": "org/model", "device": "cuda"},
    "engine": {"engine": "vllm", "weight_transfer": "ipc", "gpus_per_replica": 2, "replicas": 2},
    "trainer": {"layout": "shared", "processes": 4},
}


def found(**sections: dict[str, Any]) -> list[str]:
    recipe = {name: {**SOUND[name], **sections.get(name, {})} for name in SOUND}
    return [line for line in problems(recipe) if '"ipc"' in line]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, None),
        ({"trainer": {"layout": "split"}}, 'set trainer.layout = "shared"'),
        ({"model": {"device": "cpu"}}, "trainer or servers compute on the CPU"),
        ({"engine": {"gpus_per_replica": 0}}, "trainer or servers compute on the CPU"),
        ({"engine": {"engine": "embedded"}}, "for vLLM and SGLang servers that april starts on the trainer's GPUs"),
        ({"engine": {"urls": ["http://x:1"]}}, "for vLLM and SGLang servers that april starts on the trainer's GPUs"),
        ({"trainer": {"processes": 2}}, "2 servers have 2 GPUs each and trainer.processes = 2: make them equal"),
    ],
)
def test_obstacles_to_ipc_are_reported_in_one_line(changed: dict[str, Any], says: str | None) -> None:
    lines = found(**changed)
    assert len(lines) == (says is not None), lines
    assert says is None or says in lines[0]


def test_memory_that_cannot_be_shared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    (line,) = found()
    assert "PYTORCH_ALLOC_CONF sets expandable_segments:True, whose memory CUDA IPC cannot share: remove it" in line
