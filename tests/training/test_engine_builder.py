"""Engines are built from the settings of the recipe."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from april.config.engine_rules import check_engine
from april.config.error import ConfigError
from april.config.recipe import recipe_from_dict
from april.config.settings.engine_settings import EngineSettings
from april.engines.embedded.process import EngineProcess
from april.engines.embedded.settings import EmbeddedSettings
from april.engines.vllm_inproc import VLLMInProcess
from april.training.engine_builder import open_engine
from tests import gpus


async def test_vllm_in_process_leaves_the_configured_memory_to_the_trainer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[dict[str, Any]] = []

    async def close() -> None: ...

    def load(model: str, **settings: Any) -> Any:
        made.append(settings)
        return SimpleNamespace(close=close)

    monkeypatch.setattr(VLLMInProcess, "load", load)
    for own in ({}, {"gpu_memory_utilization": 0.5, "enforce_eager": True, "max_num_seqs": 8}):
        engine = {"engine": "vllm-inproc", **own}
        async with open_engine(recipe_from_dict({"model": {"device": "cpu"}, "engine": engine}), None, tmp_path):
            pass
    names = ("gpu_memory_utilization", "enforce_eager", "max_num_seqs")
    assert [tuple(settings[name] for name in names) for settings in made] == [(0.3, False, 64), (0.5, True, 8)]


def test_settings_of_vllm_in_process_are_refused_for_other_engines() -> None:
    with pytest.raises(
        ConfigError, match=r'enforce_eager = True with engine = "vllm": it is for "vllm-inproc"; remove'
    ):
        check_engine(EngineSettings(engine="vllm", enforce_eager=True))
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization = 1\.2: must be a share above 0, at most 1"):
        check_engine(EngineSettings(gpu_memory_utilization=1.2))


async def test_the_engine_process_sees_a_gpu_that_the_trainer_does_not_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[tuple[str, dict[str, str]]] = []

    async def close() -> None: ...

    async def start(settings: EmbeddedSettings, environment: dict[str, str]) -> Any:
        made.append((settings.device, environment))
        return SimpleNamespace(close=close)

    monkeypatch.setattr(EngineProcess, "start", start)
    for count, device in ((2, "auto"), (2, "cpu"), (0, "auto")):
        gpus.install(monkeypatch, count)
        own = {"model": {"path": "policy", "device": device}, "engine": {"own_process": True}}
        async with open_engine(recipe_from_dict(own), None, tmp_path):
            pass
    hidden = {"CUDA_VISIBLE_DEVICES": "-1"}
    assert made == [("cuda", {"CUDA_VISIBLE_DEVICES": "1"}), ("cpu", hidden), ("cpu", {})]
